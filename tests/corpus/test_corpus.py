"""Some programs of the corpus have the plans whose digests are stored; all of it: `python -m tests.corpus --check -n 2`."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gt.dispatcher.programs.passes import bucket_reductions
from tests.corpus.__main__ import main, versions
from tests.corpus.compare import Changes, difference, digest, read_digests
from tests.corpus.work import known, planned

DIGESTS, VERSIONS = read_digests()
SAMPLE = [
    "examples/signal_demo", "examples/compile_demo-1f1b", "examples/gpt2-1-bf16",
    "configs/one", "configs/tp2", "configs/dp2tp2", "configs/pp2", "configs/tp2-captured-cudagraphs",
    "configs/gpt2-tp2", "configs/llama-dp2", "configs/qwen-tp2",
    "random/eager-2", "random/eager-44", "random/network-1", "random/network-7", "random/unplaced-1", "random/unplaced-2",
    "random/pipeline-2", "random/pipeline-3", "random/pipeline-5",
]  # fmt: skip
HOW = """{name}: the plan is not the one whose digest is stored. To see the difference:
    git worktree add /tmp/before COMMIT    # one whose plans are right
    (cd /tmp/before && PYTHONPATH=. python -m tests.corpus --store /tmp/stored --only {name})
    python -m tests.corpus --compare /tmp/stored --only {name}
It is meant: python -m tests.corpus --digests -n 2
"""


def needs(name: str) -> None:
    """Skip a program whose plan depends on another version of a package than there is."""
    of = ["torch", "transformers"] if name.startswith(("configs/gpt2-", "configs/llama-", "configs/qwen-")) else ["torch"]
    for package in of:
        if versions()[package] != VERSIONS[package]:
            pytest.skip(f"digests are of {package} {VERSIONS[package]}, and this is {versions()[package]}")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_program_has_the_plan_that_is_stored(name: str) -> None:
    needs(name)
    _, found, _ = planned(name, None, None, Changes())
    assert found == DIGESTS[name], HOW.format(name=name)


def test_every_program_has_a_digest() -> None:
    for package in VERSIONS:
        if versions()[package] == "none":
            pytest.skip(f"{package} is not installed")
    assert list(known()) == list(DIGESTS), "run python -m tests.corpus --digests -n 2"


def test_a_change_of_the_planner_is_found_and_shown(tmp_path, monkeypatch, capsys) -> None:
    command = ["--only", "random/pipeline-1", "--compare", str(tmp_path)]
    assert main(["--store", str(tmp_path), *command[:2]]) == 0
    assert main(command) == 0
    capsys.readouterr()
    moved = bucket_reductions._moved
    monkeypatch.setattr(bucket_reductions, "_moved", lambda rows, context: moved(rows, replace(context, bucket=1 << 10)))
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "together" in out and "@@" in out and "random/pipeline-1 differs" in out


TEXT = "w0 define #16 op {}\nw0 1 aten.mm #16 %1 %2\nw0 2 aten.relu #17 %2\nw0 3 free %1\n"


def test_instructions_in_another_order_are_a_difference() -> None:
    lines = TEXT.splitlines()
    swapped = "\n".join([lines[0], lines[2], lines[1], lines[3]]) + "\n"
    shown = difference("p", TEXT, swapped)
    assert f"-{lines[2]}" in shown and f"+{lines[2]}" in shown
    assert not difference("p", TEXT, TEXT) and digest(TEXT) != digest(swapped)


def test_renamed_words_and_ignored_patterns_are_no_difference() -> None:
    now = TEXT.replace("free", "release").replace("{}", '{"writes": []}')
    assert difference("p", TEXT, now)
    assert not difference("p", TEXT, now, Changes([("free", "release")], [r'"writes": \[\]']))
    assert difference("p", TEXT, now, Changes([("fre", "releas")], [r'"writes": \[\]'])), "a word is renamed whole"


def test_the_end_of_a_text_that_is_missing_is_a_difference() -> None:
    assert "-w0 3 free %1" in difference("p", TEXT, TEXT[: TEXT.rindex("w0")])
    assert len(difference("p", TEXT, TEXT + "more\n" * 9000)) < 100

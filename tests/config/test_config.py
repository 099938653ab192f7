"""The YAML: what it becomes, and what every mistake in it says."""

from __future__ import annotations

import difflib
import random

import pytest
import torch

import gt
from gt.config.load import MAX_COMPARED_NAMES, check_workers, common_letters, hint, load
from gt.config.match import assign, match, unmatched
from gt.config.schema import Rule
from gt.errors import ConfigError
from tests.helpers.planned import planned

SEED = """\
# a stage and its tensor-parallel groups
pp_stage0:
  shard:
    axis: 0
    workers: [0, 1]
pp_stage0_colpar:
  shard: {axis: 1, workers: [0, 1]}
pp_stage0_rowpar:
  shard: {axis: 0, workers: [0, 1]}

pp_stage1:
  workers: [2, 3]
  backward: pp_stage0
data:
  shard: {axis: 0, workers: [[0, 1], [2, 3]]}
gt:
  modules:
    "transformer.h.[0-5].*": pp_stage0
    "*.attn.c_attn": {group: pp_stage0_colpar, parts: 3}
  schedule: zb-h1
"""


def test_the_seeds_form() -> None:
    config = load(SEED, "sharding.yaml")
    assert list(config.groups) == ["pp_stage0", "pp_stage0_colpar", "pp_stage0_rowpar", "pp_stage1", "data"]
    stage = config.groups["pp_stage0"]
    assert (stage.axis, stage.workers, stage.nested, stage.line) == (0, ((0, 1),), False, 2)
    assert config.groups["pp_stage0_colpar"].axis == 1
    assert config.groups["pp_stage1"].axis == 0 and config.groups["pp_stage1"].backward == "pp_stage0"
    assert config.groups["data"].workers == ((0, 1), (2, 3)) and config.groups["data"].nested
    assert config.groups["data"].flat == (0, 1, 2, 3)
    assert config.schedule == "zb-h1" and config.text == SEED and config.path == "sharding.yaml"
    assert config.modules[1] == Rule("*.attn.c_attn", "pp_stage0_colpar", 3, 19)
    assert config.where("data") == "data (sharding.yaml:14)"


@pytest.mark.parametrize("text", ["", "# nothing but a comment\n", "---\n"])
def test_an_empty_config_has_no_groups(text: str) -> None:
    if text == "---\n":  # an explicit empty document is a null, not a mapping
        with pytest.raises(ConfigError, match="want a mapping"):
            load(text)
    else:
        assert load(text).groups == {}


def test_backward_and_compile_are_kept() -> None:
    config = load("a: {workers: [0]}\nb: {workers: [1], backward: a, compile: true}\n")
    assert config.groups["b"].backward == "a" and config.groups["b"].compile
    assert config.groups["a"].backward is None and not config.groups["a"].compile


def test_bare_workers_take_the_suffixes_axis() -> None:
    config = load("a_colpar: {workers: [0, 1]}\na_rowpar: {workers: [0, 1]}\na: {shard: {workers: [0, 1]}}\n")
    assert [group.axis for group in config.groups.values()] == [1, 0, 0]


MISTAKES = [
    ("a:\n  worker: [0]\n", r"a \(f.yaml:2\): unknown key 'worker' in the group; did you mean 'workers'\?"),
    ("a:\n  shard:\n    axes: 0\n    workers: [0]\n", r"\(f.yaml:3\): unknown key 'axes' in shard; did you mean"),
    ("a: {shard: {axis: one, workers: [0]}}", r"a \(f.yaml:1\): axis is 'one', want a whole number"),
    ("a: {shard: {axis: 1.5, workers: [0]}}", r"axis is '1.5', want a whole number"),
    ("a: {shard: {axis: true, workers: [0]}}", r"axis is 'true', want a whole number"),
    ("a: {shard: {axis: , workers: [0]}}", r"axis is empty, want a whole number"),
    ("a: {shard: {axis: 0}}", r"a \(f.yaml:1\): shard has no workers"),
    ("a: {shard: [0, 1]}", r"shard is a list, want a mapping"),
    ("a: {workers: [0], shard: {workers: [0]}}", r"workers both in the group and in its shard"),
    ("a: {workers: 0}", r"workers is '0', want a list of worker numbers"),
    ("a: {workers: []}", r"workers is an empty list"),
    ("a: {workers: [0, -1]}", r"worker -1 is negative"),
    ("a: {workers: [0, 1, 0]}", r"worker 0 is named twice"),
    ("a: {workers: [0, x]}", r"a worker is 'x', want a number from 0"),
    ("a: {workers: [[0, 1], [2]]}", r"rows of different lengths"),
    ("a: {workers: [[0, 1], 2]}", r"rows of different lengths"),
    ("a: {workers: [0, [1]]}", r"a worker is a list"),
    ("a: {workers: [[0, 1], [1, 2]]}", r"worker 1 is named twice"),
    ("a: {}", r"a \(f.yaml:1\): the group has no workers"),
    ("a: {workers: [0]}\nb: {backward: a}", r"b \(f.yaml:2\): the group has no workers"),
    ("a: 3", r"a \(f.yaml:1\): the group is '3', want a mapping, such as `workers: \[0, 1\]`$"),
    ("a:\n  workers:[0]\n", r"the group is 'workers:\[0\]', want a mapping, such as .*, with a space after the colon$"),
    ("tensor_parallel: 2", r"the group is '2', want a mapping.*; ready configs have such layouts, as gt:llama/tp2$"),
    ("a: {workers: [0], axis: 1}", "unknown key 'axis' in the group: it is a key of shard; write shard: {axis: ..., "),
    ("a: {gpus: [0]}", r"a \(f.yaml:1\): unknown key 'gpus' in the group; did you mean 'workers'\?$"),
    ("a: {tensor_parallel: 2}", r"unknown key 'tensor_parallel' in the group; known: .*gt:llama/tp2$"),
    ("a:\n  workers: [0]\n  workers: [1]\n", r"a \(f.yaml:3\): the group has 'workers' twice, first in line 2"),
    ("a: {workers: [0]}\n\na: {workers: [1]}\n", r"f.yaml:3: the config has 'a' twice, first in line 1"),
    ("a: {workers: [0], backward: ab}\naa: {workers: [0]}", r"\(f.yaml:1\): backward: no group 'ab'; did you mean 'a"),
    ("a: {workers: [0], backward: [a]}", r"backward is a list, want the name of a group"),
    ("a: {workers: [0], compile: 1}", r"compile is '1', want true or false"),
    ("a_colpar: {shard: {axis: 0, workers: [0, 1]}}", r"axis is 0, but a group named \*_colpar has axis 1"),
    ("gt: {module: {}}", r"gt \(f.yaml:1\): unknown key 'module' in gt; did you mean 'modules'\?"),
    ("gt: {schedule: 3}", r"schedule is '3', want the name of a schedule"),
    ("a: {workers: [0]}\ngt:\n  schedule: zbh1\n", r"gt \(f.yaml:3\): schedule 'zbh1' is not known: want one of gpipe, 1f1b"),
    ("gt: {schedule: 'auto:2GB'}", r"gt \(f.yaml:1\): .* '2GB' is no size, want bytes of activations"),
    ("gt: {modules: {x: a}}", r"gt modules 'x' \(f.yaml:1\): no group 'a'"),
    (f"a: {{workers: [0x{'f' * 4000}]}}", r"a worker is '0xfff.*', want a number from 0"),
    ("a: {workers: [9223372036854775808]}", "a worker is '9223372036854775808', want a number from 0"),
    ("a: {workers: [0]}\nb\ud800: {workers: [0]}", r"f.yaml:2: not YAML: the character '\\ud800' is not allowed"),
    ("a: {workers: [0]}\ngt: {modules: {x: {group: a, parts: 0}}}", r"parts is 0, want a whole number from 1 to 999"),
    ("a: {workers: [0]}\ngt: {modules: {x: {group: a, parts: 1000}}}", r"parts is 1000, want a whole number from 1 to 999"),
    ('"a\\x1fb": {workers: [0]}', r"the group 'a\\x1fb' has the character '\\x1f'"),
    ("a/b: {workers: [0]}", r"the group 'a/b' has the character '/'"),
    ("'  ': {workers: [0]}", r"is blank, want a name"),
    (f"{'n' * 256}: {{workers: [0]}}", r"has 256 characters, at most 255 are taken"),
    ("a: {workers: [0]}\ngt: {modules: {x: {parts: 2}}}", r"the rule has no group"),
    ("a: {workers: [0]}\ngt:\n  modules:\n    x: [a, b]\n", r"gt modules 'x' \(f.yaml:4\): no group 'b'"),
    ("a: {workers: [0]}\ngt: {modules: {x: []}}", r"the list of groups is empty"),
    ("a: {workers: [0]}\ngt: {modules: {x: _colpar}}", r"no group ends in _colpar"),
    ("3: {workers: [0]}", r"f.yaml:1: the config has the key '3', want a name"),
    ("- a\n- b\n", r"f.yaml:1: the config is a list, want a mapping"),
    ("a: {workers: [0, 1}\n", r"f.yaml:1: not YAML: "),
    ("a:\n  workers: " + "[" * 40_000, r"f.yaml:2: nested too deep: more than 16 lists and mappings within one another"),
    ("a:\n  workers: [0]\n b: 3\n", r"f.yaml:3: not YAML: "),
    ("a: !!python/object:os.system {}", r"a \(f.yaml:1\): "),
    ("a: {shard: {axis: !!int x, workers: [0]}}", r"axis is 'x', want a whole number"),
]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: {workers: [0]}\nschedule: 1f1b\n", r"^f\.yaml:2: schedule is no group: .* `gt: \{schedule: 1f1b\}`$"),
        ("precision: {compute: bf16}\n", r"^f\.yaml:1: precision is no group: .* `gt: \{precision: \.\.\.\}`$"),
        ("offload: {path: {workers: [0]}}\n", r"^f\.yaml:1: offload is no group: .* `gt: \{offload: \.\.\.\}`$"),
        ("data_parallel: [0, 1]\n", r"^f\.yaml:1: data_parallel is no group: .* `gt: \{data_parallel: \.\.\.\}`$"),
        ("a: {workers: [0]}\n# \0\n", r"^f\.yaml:2: not YAML: the character '\\x00' is not allowed; remove it$"),
    ],
)
def test_a_setting_outside_of_gt_and_a_control_character_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(text, "f.yaml")


@pytest.mark.parametrize(("text", "message"), MISTAKES)
def test_a_mistake_is_named_with_group_file_and_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(text, "f.yaml")


def test_workers_that_do_not_exist() -> None:
    config = load("a: {workers: [0, 1]}\nb:\n  workers: [[4, 5], [6, 7]]\n", "sharding.yaml")
    check_workers(config, [f"w{i}" for i in range(8)])
    with pytest.raises(ConfigError, match=r"^b \(sharding.yaml:2\) names worker 6, but there are 6: w0, w1, "):
        check_workers(config, [f"w{i}" for i in range(6)])
    with pytest.raises(ConfigError, match="there is none"):
        check_workers(config, [])


RULES = (
    Rule("*", "all"),
    Rule("transformer.h.[0-5].*", "front"),
    Rule("transformer.h.[!0-5].*", "back"),
    Rule("*.attn.c_attn", "fused"),
    Rule("transformer.h.3.attn.c_attn", "third"),
    Rule("transformer.h.1?.*", "teens"),
)


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("lm_head", "all"),
        ("transformer.h.0.ln_1", "front"),
        ("transformer.h.7.ln_1", "back"),
        ("transformer.h.0.attn.c_attn", "fused"),
        ("transformer.h.3.attn.c_attn", "third"),
        ("transformer.h.11.mlp", "teens"),
    ],
)
def test_the_most_specific_pattern_wins(name: str, group: str) -> None:
    found = match(RULES, name)
    assert found is not None and found.group == group


def test_the_model_itself_has_an_empty_name_that_no_wildcard_matches() -> None:
    rules = (Rule("*", "all"), Rule("", "root"), Rule("up", "_colpar"))
    placed = assign(rules, ["", "a", "up"])
    assert {name: rule.group for name, rule in placed.items()} == {"": "root", "a": "all", "up": "root_colpar"}
    assert match(rules[:1], "") is None and [rule.pattern for rule in unmatched(rules, ["a"])] == ["", "up"]


def test_the_later_of_equal_patterns_wins_and_unused_patterns_are_found() -> None:
    found = match((Rule("a.*", "first"), Rule("*.b", "second"), Rule("*.b", "third")), "a.b")
    assert found is not None and found.group == "third"
    assert [rule.pattern for rule in unmatched(RULES, ["lm_head"])] == [rule.pattern for rule in RULES[1:]]
    assert match((), "x") is None


STAGED = """
s0: {workers: [0, 1]}
s0_colpar: {workers: [0, 1]}
s1: {workers: [2, 3]}
s1_colpar: {workers: [2, 3]}
gt:
  modules:
    net: s0
    "net.h.*": [s0, s1]
    "*.up": {group: _colpar, parts: 2}
    "*.skip": s0
"""


def test_a_list_of_groups_cuts_modules_into_runs_and_a_suffix_is_of_the_stage_around() -> None:
    layers = [name for n in range(5) for name in (f"net.h.{n}", f"net.h.{n}.mlp", f"net.h.{n}.mlp.up", f"net.h.{n}.skip")]
    placed = assign(load(STAGED).modules, ["net", "net.up", "net.h", *layers, "head"])
    assert [placed[f"net.h.{n}"].group for n in range(5)] == ["s0", "s0", "s0", "s1", "s1"]
    assert [placed[f"net.h.{n}.mlp.up"].group for n in range(5)] == ["s0_colpar"] * 3 + ["s1_colpar"] * 2
    assert {placed[f"net.h.{n}.skip"].group for n in range(5)} == {"s0"} and placed["net.h.4.mlp"].group == "s1"
    assert placed["net.up"] == Rule("*.up", "s0_colpar", 2, 10) and "head" not in placed and "net.h" not in placed
    with pytest.raises(ConfigError, match=r"modules 'net.h.\*': 1 modules for 2 stages"):
        assign(load(STAGED).modules, ["net", "net.h.0", "net.h.0.up"])
    with pytest.raises(ConfigError, match=r"head.up is in no stage, so _colpar means no group there; give 'head' a stage"):
        assign(load(STAGED).modules, ["head", "head.up"])


@pytest.mark.parametrize("compiled, backend, want", [(0, None, "eager"), (1, None, "inductor"), (1, "eager", "eager")])
def test_a_group_that_is_compiled_has_captured_steps_compiled(compiled, backend, want):
    asked = []

    def seal(number: int, schedule: str, backend: str, *rest: object) -> dict:
        asked.append(backend)
        return {"why": "nothing is executed here", "schedule": {}}

    with planned(f"a: {{workers: [0], compile: {str(bool(compiled)).lower()}}}\n", 1) as plan:
        plan.seal = seal
        step, x = gt.compile(lambda x: x * 2 + 1, backend=backend), torch.ones(3)
        for _ in range(3):
            step(x)
    assert asked and set(asked) == {want}


def test_a_hint_compares_few_names_however_alike_they_are(monkeypatch):
    """A client chooses all of the names, and difflib takes longest for the same letters in another order."""
    compared = []
    close = difflib.get_close_matches
    monkeypatch.setattr(difflib, "get_close_matches", lambda word, names, n: compared.append(names) or close(word, names, n))
    draw, letters = random.Random(1), [chr(0x4E00 + n) for n in range(64)]
    word, *names = ("".join(draw.sample(letters, 64)) for _ in range(65))
    hint(word, names)
    assert len(compared[0]) <= MAX_COMPARED_NAMES
    assert hint("stag0_colpar", [*names[:20], "stage0_colpar"]) == "; did you mean 'stage0_colpar'?"
    assert hint("", ["", "a"]) and "did you mean" not in hint("", ["a"])


def test_common_letters_bound_what_difflib_finds():
    draw = random.Random(2)
    assert common_letters("abcbdab", "bdcaba") == 4 and common_letters("", "a") == common_letters("a", "") == 0
    for _ in range(200):
        a, b = ("".join(draw.choices("abcd_", k=draw.randrange(1, 20))) for _ in range(2))
        blocks = difflib.SequenceMatcher(None, a, b).get_matching_blocks()
        assert common_letters(a, b) >= sum(block.size for block in blocks)

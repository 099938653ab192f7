"""`gt plan` against what really happens: bytes between workers, collectives and memory of a run, schedules as captured."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import gt
from gt.client import current_session
from gt.ir.text import parse
from tests.dispatcher.programs.test_compile_memory import ROWS, peak, peaks  # noqa: F401 - a fixture
from tests.helpers import CONFIGS, longer
from tests.helpers.models import accumulating, mini
from tests.helpers.serving import settled

PARTS = 4


def training(steps: int, schedule: str = "", after: Callable[[], None] = lambda: None) -> Any:
    """A model made and trained for so many steps; `after` is called after each."""
    torch.manual_seed(0)
    gt.manual_seed(0)
    model = mini(gt.signal.groups()).to("remote")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    step = accumulating(model, optimizer, PARTS)
    run = gt.compile(step, schedule=schedule) if schedule else step
    for _ in range(steps):
        x, y = torch.randint(64, (2, 8, 16))
        loss = run(x, y) if schedule else run(x.to("remote"), y.to("remote"))
        assert loss.item() >= 0
        after()
    return model, optimizer, loss


def planned(config: str, *args: Any, workers: int = 0) -> dict[str, Any]:
    path = str(CONFIGS / f"{config}.yaml")
    return gt.plan(lambda: training(*args), config=path, workers=workers).body


def steady(session: Callable, config: str) -> None:
    """A session whose batches end where a plan's do: none is cut because the machine was slow, which hides a split from it."""
    session(CONFIGS / f"{config}.yaml")
    current_session.current().session.on_idle = None


def counted(before: dict, after: dict) -> list[dict[str, Any]]:
    """Transfers and collectives of each worker between two calls of gt.stats(), by number of the other worker."""
    found = []
    for a, b in zip(before["workers"], after["workers"], strict=True):
        row: dict[str, Any] = {}
        for way in ("bytes_sent", "bytes_received"):
            moved = {name[1:]: n - a[way].get(name, 0) for name, n in b[way].items()}
            row[way] = {peer: n for peer, n in moved.items() if n}
        calls = {kind: n - a["collectives"].get(kind, 0) for kind, n in b["collectives"].items()}
        row["collectives"] = {kind: n for kind, n in calls.items() if n}
        found.append(row)
    return found


@pytest.mark.parametrize("config", ["tp2", "pp2", "tp2pp2", "dp2pp2"])
def test_planned_bytes_and_collectives_are_those_of_a_run(config: str, session: Callable) -> None:
    plan = planned(config, 4)
    steady(session, config)
    stats: list[dict] = []
    training(4, "", lambda: stats.append(settled()))
    measured = counted(stats[-2], stats[-1])
    assert plan["memory"]
    for row in plan["memory"]:
        real = measured[row["workers"][0]]
        assert {peer: n for peer, n in row["sent"].items() if n} == real["bytes_sent"]
        assert {peer: n for peer, n in row["received"].items() if n} == real["bytes_received"]
        assert row["collectives"] == real["collectives"]


@pytest.mark.parametrize("config", ["tp2", "dp2pp2"])
def test_planned_memory_of_weights_is_what_workers_hold(config: str, session: Callable) -> None:
    plan = planned(config, 3)
    steady(session, config)
    model, optimizer, _ = training(3)
    kinds = {
        "weights": list(model.parameters()),
        "gradients": [p.grad for p in model.parameters()],
        "optimizer": [t for state in optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor)],
    }
    for kind, tensors in kinds.items():
        held: dict[int, int] = {}
        for tensor in tensors:
            for piece in gt.inspect(tensor)["pieces"]:
                held[piece["index"]] = held.get(piece["index"], 0) + piece["bytes"]
        assert {row["workers"][0]: row[kind] for row in plan["memory"]} == {w: held[w] for w in range(len(plan["memory"]))}
    layouts = {row["name"]: parse(row["plan"]).layout for row in plan["weights"]}
    assert layouts == {name: gt.inspect(p)["layout"] for name, p in model.named_parameters()}


def test_every_line_of_the_text_that_is_no_comment_is_of_plan_notation() -> None:
    made = gt.plan(lambda: training(3), config=str(CONFIGS / "tp2pp2.yaml"))
    lines = [line for line in str(made).splitlines() if not line.startswith("#")]
    assert len(lines) > 20 and [str(parse(line)) for line in lines] == lines
    assert json.loads(made.json()) == made.body


@pytest.mark.parametrize(("workers", "followed"), [(2, 2), (64, 3)])
def test_a_captured_step_is_planned_in_its_schedule(workers: int, followed: int) -> None:
    """With many workers one of each kind is followed, and the rest are idle here."""
    body = planned("pp2", 4, "1f1b", workers=workers)
    pipe = body["pipeline"]
    assert body["step"] == "the step that gt.compile captured" and len(body["memory"]) == followed
    rows = [row.removesuffix(f",{n}O") for n, row in enumerate(pipe["rows"].split())]
    assert rows == ["0F0,0F1,0B0,0F2,0B1,0F3,0B2,0B3", "1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3"]
    assert len(pipe["grid"].splitlines()) == 2 and 0 < pipe["idle"] < 1
    assert pipe["choices"]["auto"]["makespan"] <= min(row["makespan"] for row in pipe["choices"].values()) * 1.0001
    first, second = body["memory"][:2]
    assert first["activations_scheduled"] > second["activations_scheduled"] > 0


def test_a_captured_steps_bubble_is_that_of_explain(tmp_path: Path) -> None:
    path, held = tmp_path / "stages.yaml", []
    path.write_text("".join(f"stage{n}: {{workers: [{n}]}}\n" for n in range(3)))

    def program() -> None:
        weights = [torch.nn.Parameter(torch.randn(32, 32, device="remote")) for _ in range(6)]
        optimizer = torch.optim.SGD(weights, 0.1)

        @gt.compile(schedule="zb-h1")
        def step(x: torch.Tensor) -> None:
            for part in gt.microbatches(x, PARTS):
                for n, weight in enumerate(weights):
                    with gt.signal.context(f"stage{n // 2}"):
                        part = torch.tanh(part @ weight)
                part.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(5):
            step(torch.randn(8, 32))
        held.append(step._programs[0].answer["schedule"])

    pipe = gt.plan(program, config=str(path)).body["pipeline"]
    assert [round(bubble, 4) for bubble in pipe["bubble"]] == held[0]["bubble"]
    assert pipe["makespan"] == pytest.approx(held[0]["makespan"]) and pipe["rows"] == held[0]["rows"]


def test_collectives_within_a_stage_are_no_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    from gt.dispatcher.sharding.cost import LINK
    from gt.observe import pipeline_report

    pipes, price = [], pipeline_report.price_pipeline
    monkeypatch.setattr(pipeline_report, "price_pipeline", lambda *args: pipes.append(price(*args)) or pipes[-1])
    transfers = planned("tp2pp2", 3)["transfers"]
    (nbytes,) = {row["bytes"] for row in transfers}
    assert pipes[0].priced.costs.transfer == (pytest.approx(1e6 * nbytes / 2 / LINK),)  # each of two workers sends half


def test_too_few_workers_are_an_error_as_in_a_run() -> None:
    with pytest.raises(gt.ConfigError, match=r"names worker 2, but there are 2"):
        planned("pp4", 3, workers=2)


def test_a_plain_loop_is_shown_as_it_is_written() -> None:
    pipe = planned("pp2", 3)["pipeline"]
    assert pipe["rows"].split()[0] == "0F0,0B0,0F1,0B1,0F2,0B2,0F3,0B3,0O"
    assert pipe["idle"] > pipe["choices"]["gpipe"]["bubble"] > 0.1


def lopsided(width: int, batch: int, layers: tuple[int, ...]) -> None:
    """Stages of so many equal layers, trained twice with SGD."""
    weights = [torch.nn.Parameter(torch.randn(width, width, device="remote")) for _ in range(sum(layers))]
    optimizer = torch.optim.SGD(weights, 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        for part in gt.microbatches(torch.randn(batch, width, device="remote"), PARTS):
            rest = iter(weights)
            for n, depth in enumerate(layers):
                with gt.signal.context(f"stage{n}"):
                    for _ in range(depth):
                        part = part @ next(rest)
                    if n == len(layers) - 1:
                        loss = part.sum()
            loss.backward()
        optimizer.step()


@pytest.fixture
def two(tmp_path: Path) -> str:
    path = tmp_path / "two.yaml"
    path.write_text("stage0: {workers: [0]}\nstage1: {workers: [1]}\n")
    return str(path)


def test_memory_is_what_can_be_counted_by_hand(two: str) -> None:
    """Three layers and one: a worker holds its weights and gradients, and each layer's input for its backward."""
    width, batch = 32, 64
    body = gt.plan(lopsided, width, batch, (3, 1), config=two).body
    square, rows = 4 * width * width, 4 * width * batch // PARTS
    assert [(row["weights"], row["gradients"], row["optimizer"]) for row in body["memory"]] == [
        (3 * square, 3 * square, 0), (square, square, 0),
    ]  # fmt: skip
    first, second = body["memory"]
    assert first["sent"] == {"1": PARTS * rows} and first["received"] == {"1": PARTS * rows}
    assert second["sent"] == {"0": PARTS * rows} and not first["collectives"]
    matmul = 2 * width * width * batch
    assert abs(first["flops"] / (3 * 3 * matmul - matmul) - 1) < 0.15  # nobody asks for the gradient of the input


def test_two_optimizers_that_step_in_turns_are_planned() -> None:
    """The part before the second one's step is the shorter: rows of the longer one are none of it."""

    def train() -> None:
        first, second = (torch.nn.Linear(4, 4).to("remote") for _ in range(2))
        optimizers = [torch.optim.Adam(layer.parameters()) for layer in (first, second)]
        for _ in range(3):
            x = torch.randn(8, 4, device="remote")
            loss = (second(first(x).detach()) + second(x)).square().exp().sin().sum()
            for optimizer in reversed(optimizers):
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                loss = second(first(x)).sum()

    body = gt.plan(train).body
    assert body["memory"][0]["weights"] == 2 * 4 * (4 * 4 + 4)  # of both
    assert body["memory"][0]["peak"] > 0


@pytest.mark.parametrize("critics", [1, 3])
def test_a_plan_of_optimizers_that_step_in_turns_is_of_all_of_them(critics: int) -> None:
    """A GAN's step has so many of the discriminator and one of the generator, whichever of them ends the program."""

    def train(last: str = "", steps: int = 3, both: bool = True) -> None:
        gt.cpu_workers(2, {"gt": {"data_parallel": None}})
        generator, critic = torch.nn.Linear(4, 8).to("remote"), torch.nn.Linear(8, 1).to("remote")
        optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in (generator, critic)]

        def turn(optimizer: torch.optim.Optimizer) -> None:
            optimizer.zero_grad()
            critic(generator(torch.ones(16, 4, device="remote"))).sum().backward()
            optimizer.step()

        for _ in range(steps):
            turns = [optimizers[1]] * critics + [optimizers[0]] * both
            for optimizer in turns if last == "generator" else reversed(turns):
                turn(optimizer)

    alone = gt.plan(train, "critic", 3, False).body
    row = alone["memory"][0]
    for last in ("generator", "critic"):
        body = gt.plan(train, last).body
        found = body["memory"][0]
        assert body["step"] == f"the last {critics + 1} steps of 2 optimizers"
        assert found["weights"] == found["gradients"] == 4 * (4 * 8 + 8 + 8 + 1)
        assert abs(found["flops"] / row["flops"] / (critics + 1) - 1) < 0.01 and found["peak"] >= row["peak"]
        assert found["collectives"]["all_reduce"] == sum(each["count"] for each in body["collectives"])
        assert len({each["plan"] for each in body["weights"]}) == 4


def test_optimizers_of_one_backward_pass_are_one_step(two: str) -> None:
    """As Muon beside AdamW, or one for each stage: the second one's part alone is no pipeline."""

    def train() -> None:
        layers = [torch.nn.Linear(8, 8).to("remote") for _ in range(2)]
        optimizers = [torch.optim.SGD(layer.parameters(), 0.1) for layer in layers]
        for _ in range(3):
            for part in gt.microbatches(torch.ones(16, 8, device="remote"), 4):
                for n, layer in enumerate(layers):
                    with gt.signal.context(f"stage{n}"):
                        part = layer(part).tanh()
                part.sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()

    body = gt.plan(train, config=two).body
    assert body["pipeline"]["stages"] == ["stage0", "stage1"] and body["pipeline"]["micro_batches"] == 4
    assert [row["gradients"] for row in body["memory"]] == [4 * (8 * 8 + 8)] * 2


def test_a_plan_of_no_function_or_of_no_number_of_workers_is_refused() -> None:
    for wrong in (-1, 2.5):
        with pytest.raises((ValueError, TypeError), match=f"the number of workers is {wrong}, want"):
            gt.plan(lambda: gt.ones(2), workers=wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"gt\.plan takes a function .* got int"):
        gt.plan(3)  # type: ignore[arg-type]


def test_an_optimizer_that_steps_no_more_is_no_part_of_the_step() -> None:
    from gt.observe.dry_run import _cycle

    assert _cycle([0]) == _cycle([0, 0]) == _cycle([0, 0, 1, 1, 1]) == _cycle([1, 0, 0]) == 1
    assert _cycle([0, 1]) == _cycle([0, 1, 0, 1]) == 2
    assert _cycle([0, 1, 1, 0]) == _cycle([0, 0, 1, 0, 0, 1]) == _cycle([0, 1, 0, 0, 1, 0]) == 3


def test_the_last_of_several_captured_steps_is_planned_and_the_plan_says_so() -> None:
    def train() -> None:
        weights = [torch.ones(4, device="remote", requires_grad=True) for _ in range(2)]
        optimizers = [torch.optim.SGD([w], 0.1) for w in weights]

        def turn(n: int) -> None:
            optimizers[n].zero_grad()
            weights[n].square().sum().backward()
            optimizers[n].step()

        first, second = gt.compile(lambda: turn(0)), gt.compile(lambda: turn(1))
        for _ in range(4):
            first()
            second()

    body = gt.plan(train).body
    assert body["step"] == "the last of 2 steps that gt.compile captured"
    assert body["memory"][0]["weights"] == body["memory"][0]["gradients"] == 2 * 16


def test_a_better_cut_is_proposed_with_what_it_gains(two: str) -> None:
    pipe = gt.plan(lopsided, 8192, 8192, (3, 1), config=two).body["pipeline"]
    better = pipe["balance"]["better"]
    assert pipe["balance"]["share"][0] > 0.65 and max(better["share"]) < 0.62 and 0.1 < better["gain"] < 0.25
    even = gt.plan(lopsided, 8192, 8192, (2, 2), config=two).body["pipeline"]["balance"]
    assert max(even["share"]) < 0.6


def placed(rules: dict) -> None:
    names = ["front", "up", "down", "head"]
    model = torch.nn.Sequential(OrderedDict((name, torch.nn.Linear(8, 8)) for name in names)).to("remote")
    gt.signal.apply(model, rules)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 8, device="remote")).sum().backward()
        optimizer.step()


def test_each_parameter_is_shown_with_its_rule_and_those_without_are_named() -> None:
    """In the lines of the weights, which stay plan notation, and as data."""
    rules = {"front": "pp_stage0", "u*": {"group": "pp_stage0_colpar", "parts": 2}, "down": "pp_stage0_rowpar"}
    made = gt.plan(placed, rules, config=str(CONFIGS / "tp2.yaml"))
    by_name = {row["name"]: row for row in made.body["weights"]}
    assert by_name["up.bias"]["rule"] == {"pattern": "u*", "group": "pp_stage0_colpar", "parts": 2}
    assert by_name["head.bias"]["rule"] is None and made.body["unplaced"] == ["head.weight", "head.bias"]
    text = str(made)
    assert "256 B down.weight by down in pp_stage0_rowpar\n" in text and "up.bias by u* in pp_stage0_colpar, 2 in one\n" in text
    assert "# no rule for head.weight, head.bias\n" in text and " by " not in str(parse(by_name["head.bias"]["plan"]))
    assert all(str(parse(line)) == line for line in text.splitlines() if not line.startswith("#"))
    assert json.loads(made.json()) == made.body


def test_a_model_without_rules_is_not_told_of_them() -> None:
    made = gt.plan(placed, {}, config=str(CONFIGS / "tp2.yaml"))
    assert made.body["unplaced"] == [] and "no rule" not in str(made) and " by " not in str(made)


def test_a_gather_and_a_large_whole_weight_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "tp.yaml"
    axes = {"": 0, "_colpar": 1, "_rowpar": 0}
    rows = [f"s{end}: {{shard: {{axis: {axis}, workers: [0, 1]}}}}\n" for end, axis in axes.items()]
    path.write_text("".join(rows))

    def program() -> None:
        split, whole = (torch.nn.Parameter(torch.randn(512, 1024, device="remote")) for _ in range(2))
        x = torch.randn(4, 512, device="remote")
        with gt.signal.context("s_colpar"):
            h = x @ split
        with gt.signal.context("s"):
            (torch.sort(h, -1).values @ whole.t()).sum().backward()

    warnings = gt.plan(program, config=str(path)).body["warnings"]
    assert any("test_plan.py" in w and "all_gather over tp" in w for w in warnings), warnings
    assert any("2.0 MiB, is whole on each tp worker" in w for w in warnings), warnings


@pytest.mark.slow
@pytest.mark.parametrize("name", longer(["", "gpipe", "1f1b"], ["1f1b"]))
@pytest.mark.usefixtures("plain_threads")
def test_the_planned_peak_is_that_of_a_replay(name: str, peaks: dict, tmp_path: Path) -> None:  # noqa: F811
    """In bytes held after any instruction."""
    path = tmp_path / "stages.yaml"
    measured = peak(path, peaks, PARTS, name)
    rows = gt.plan(descent, PARTS, name or None, config=str(path)).body["memory"]
    said = sorted(row["peak_scheduled" if name else "peak"] for row in rows)
    assert all(abs(a / b - 1) < 0.05 for a, b in zip(said, measured, strict=True)), (said, measured)


def descent(parts: int, schedule: str | None) -> None:
    """The training that `peak` measures."""
    model = mini(gt.signal.groups()).to("remote")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    step = accumulating(model, optimizer, parts, to_none=False)
    run = gt.compile(step, schedule=schedule)
    for _ in range(5):
        run(*torch.randint(64, (2, parts * ROWS, 16)))


def test_a_plan_captures_a_step_as_soon_as_a_run_does() -> None:
    """The plan's own hook after optimizer steps is no state of the step."""
    explained = []

    def descend() -> None:
        model = torch.nn.Linear(4, 2).to("remote")  # the hook learns names of parameters from modules
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @gt.compile
        def step() -> torch.Tensor:
            optimizer.step()
            return model.weight.sum()

        for _ in range(3):
            step()
        explained.append(step.explain())

    gt.plan(descend, workers=1)
    assert "not kept" not in explained[0] and "1 program" in explained[0], explained[0]


def test_values_read_as_zeros_and_shapes_that_depend_on_them_are_an_error() -> None:
    seen: list[Any] = []

    def program() -> None:
        x = torch.randn(3, device="remote")
        seen.extend([x.sum().item(), (x > 5).any().item(), x.tolist()])
        assert [row["name"] for row in gt.stats()["workers"]] == ["w0"] and gt.stats()["dispatcher"]["ops_planned"]

    body = gt.plan(program).body
    assert seen == [0.0, False, [0.0, 0.0, 0.0]]
    assert any("3 reads of values gave 0" in warning for warning in body["warnings"])
    with pytest.raises(gt.UnsupportedOp, match="a shape depends on values"):
        gt.plan(lambda: torch.nonzero(torch.randn(3, device="remote")))
    with pytest.raises(ValueError, match="nothing was planned"):
        gt.plan(lambda: None)


def test_a_session_goes_on_after_a_plan(session: Callable) -> None:
    session()
    model = torch.nn.Linear(4, 4).to("remote")
    x = torch.randn(2, 4, device="remote")
    before = model(x).sum().item()
    planned("tp2", 2)
    assert model(x).sum().item() == before
    model(x).sum().backward()
    assert model.weight.grad.shape == (4, 4) and (x + 1).sum().item() == x.cpu().add(1).sum().item()


def test_the_command_prints_text_or_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from gt.cli import main

    script = tmp_path / "program.py"
    script.write_text(
        "import sys\nimport torch, gt\n"
        "gt.cpu_workers(2)\n"
        "weight = torch.nn.Parameter(torch.randn(int(sys.argv[1]), 8, device='remote'))\n"
        "(torch.randn(4, 8, device='remote') @ weight.t()).sum().backward()\n"
        "print(weight.grad.sum().item())\n"
        "gt.shutdown()\n"
    )
    assert main(["plan", str(script), "16"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("# plan of program.py on 2 workers") and "0.0" in said.err
    assert main(["plan", "--json", "--workers", "3", str(script), "16"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert body["workers"] == 3 and [row["weights"] for row in body["memory"]] == [512, 0, 0]
    assert main(["plan", str(script), "no number"]) == 1
    assert "invalid literal" in capsys.readouterr().err


def test_configs_are_compared_and_the_fastest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows split over two are half the work, and one sum, which costs more than the work where there are few rows."""
    from gt.cli import compare, main

    script = tmp_path / "program.py"
    script.write_text(
        "import sys\nimport torch, gt\n"
        "weight = torch.nn.Parameter(torch.randn(1024, 1024, device='remote'))\n"
        "with gt.signal.context('g'):\n"
        "    (torch.randn(int(sys.argv[1]), 1024, device='remote') @ weight).sum().backward()\n"
        "print(weight.grad.square().sum().item())\n"
    )
    for name, workers in (("one", [0]), ("two", [0, 1])):
        (tmp_path / f"{name}.yaml").write_text(f"g: {{shard: {{axis: 0, workers: {workers}}}}}\n")
    configs = [part for name in ("one", "two", "none") for part in ("--config", str(tmp_path / f"{name}.yaml"))]
    assert main(["plan", "--json", *configs, str(script), "64"]) == 1
    one, two, none = json.loads(capsys.readouterr().out)
    assert [one["workers"], two["workers"]] == [1, 2] and one["links"] == 0 < two["links"]
    assert one["compute"] > two["compute"] and one["step"] < two["step"] and "cannot be read" in none["failed"]
    two = {**two, "config": "two.yaml", "step": one["step"] / 2}
    rows = {"one": {**one, "config": "one.yaml"}, "two": two}
    monkeypatch.setattr(compare, "_planned", lambda config, *_: rows[config])
    assert main(["plan", "--config", "one", "--config", "two", str(script)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split()[:2] == ["two.yaml", "2"] and "two.yaml is the fastest, 2.00x one.yaml" in lines[-1]


class FactsOfAHost:
    """In place of an agent on a host of a line h0 - h1 - h2, where h0 has a route to h3's network and h3 back."""

    def __init__(self, host: Any, *_: Any) -> None:
        at = int(host.name[1:])
        addresses = {0: ["10.0.1.1"], 1: ["10.0.1.2", "10.0.2.2"], 2: ["10.0.2.3"], 3: ["10.0.9.4"]}[at]
        network = {
            "links": [[address, 24, "eth0", 1000, False] for address in addresses],
            "routes": [["10.0.9.0", 24, "eth0"]] if at == 0 else [["10.0.1.0", 30, "eth0"]],
            "scope": host.name,
        }
        self.facts = {"home": f"home of {host.name}", "gpus": 0, "time": 0.0, "network": network}

    def ask(self, **order: Any) -> dict[str, Any]:
        assert order == {"do": "facts"}
        return dict(self.facts)

    def close(self) -> None:
        pass


def test_a_plan_over_several_hosts_shows_the_way_of_each_pair(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    from gt.cli import hosts, main

    monkeypatch.setattr(hosts, "StartedAgent", FactsOfAHost)
    script, config = tmp_path / "sums.py", tmp_path / "sums.yaml"
    config.write_text("rows: {shard: {axis: 0, workers: [0, 1, 2]}}\n")
    script.write_text(
        "import torch, gt\ngt.connect('elsewhere:1')\nwith gt.signal.context('rows'):\n"
        "    print(torch.ones(6, 2, device='remote').sum().item())\n"
    )
    order = ["plan", "--hosts", "h0:2,h1,h2,h3", "--config", str(config), str(script)]
    assert main(order) == 0
    text = capsys.readouterr().out
    assert "# hosts: h0 has worker 0-1, h1 has worker 2, h2 has worker 3, h3 has worker 4\n" in text
    rows = ("h0 - h1: tcp 10.0.1.1 to 10.0.1.2", "h0 - h2: via h1", "h0 - h3: routed 10.0.1.1 to 10.0.9.4", "h1 - h3: via h0")
    assert all(f"# {row}\n" in text for row in rows), text
    config.write_text("rows: {shard: {axis: 0, workers: [0, 1]}}\n")
    assert main(["plan", "--hosts", "h0,h1", "--json", "--config", str(config), str(script)]) == 0
    assert json.loads(capsys.readouterr().out)["ways"] == [
        {"hosts": ["h0", "h1"], "kind": "tcp", "way": "tcp 10.0.1.1 to 10.0.1.2"}
    ]
    assert main(["plan", "--hosts", "h1,h3", "--config", str(config), str(script)]) == 1
    assert "spans h1 and h3, which no link joins" in capsys.readouterr().err
    assert main(["plan", "--hosts", "h0,h1", "--workers", "2", str(script)]) == 1
    assert "--hosts takes one --config, and no --workers" in capsys.readouterr().err


def test_many_workers_cost_no_more_than_their_kinds(tmp_path: Path) -> None:
    """256 workers in four stages: four are followed, and stand for all."""
    path = tmp_path / "many.yaml"
    stages = [[list(range(n * 64 + row * 8, n * 64 + row * 8 + 8)) for row in range(8)] for n in range(4)]
    path.write_text("".join(f"stage{n}: {{workers: {workers}}}\n" for n, workers in enumerate(stages)))
    body = gt.plan(lopsided, 64, 256, (2, 2, 2, 2), config=str(path)).body
    assert body["workers"] == 256 and len(body["memory"]) == 4
    assert sorted(w for row in body["memory"] for w in row["workers"]) == list(range(256))
    assert all(row["weights"] == 2 * 4 * 64 * 64 for row in body["memory"])


def test_a_plain_loop_has_the_stage_costs_of_its_captured_step(two: str) -> None:
    """One cost model: the same stages cost the same, whether the dispatcher schedules them or a plan only shows them."""

    def program(schedule: str) -> None:
        weights = [torch.nn.Parameter(torch.randn(64, 64, device="remote")) for _ in range(3)]
        optimizer = torch.optim.SGD(weights, 0.1)

        def step(x: torch.Tensor) -> None:
            for part in gt.microbatches(x, PARTS):
                for n, weight in enumerate(weights):
                    with gt.signal.context(f"stage{n // 2}"):
                        part = torch.tanh(part @ weight)
                part.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        run = gt.compile(step, schedule=schedule) if schedule else step
        x = torch.randn(64, 64, device="remote")  # one batch: its creation is no part of a later step
        for _ in range(5):
            run(x)

    plain, captured = (gt.plan(program, name, config=two).body["pipeline"] for name in ("", "gpipe"))
    assert plain["schedule"] == "as written" and captured["schedule"] == "gpipe"
    for row in ("share", "seconds"):
        assert captured["balance"][row] == pytest.approx(plain["balance"][row])
    assert captured["micro_batch"] == plain["micro_batch"] and [*captured["choices"]] == [*plain["choices"]]
    for name, row in plain["choices"].items():
        assert captured["choices"][name] == pytest.approx(row)


def test_micro_batches_with_different_stages_are_no_pipeline_and_the_plan_says_so(two: str) -> None:
    def program() -> None:
        x = torch.randn(8, 8, device="remote")
        for n, part in enumerate(gt.microbatches(x, 2)):
            for stage in (0, 1) if n else (1, 0):
                with gt.signal.context(f"stage{stage}"):
                    part = part @ x

    made = gt.plan(program, config=two)
    assert "stages stage0 (mm at test_plan.py:" in made.body["pipeline"]["why"]
    assert "# not used: micro-batch 1 runs its forward pass" in str(made) and json.loads(made.json()) == made.body


def test_a_program_that_loads_and_saves_is_planned_and_writes_nothing(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    gt.save({"model": torch.nn.Linear(6, 6)}, old)

    def program() -> None:
        model = torch.nn.Linear(6, 6).to("remote")
        gt.load(old, into={"model": model}, device="remote")
        model(torch.ones(2, 6).to("remote")).sum().backward()
        gt.save({"model": model}, new)
        gt.save({"model": model}, new, wait=False).wait()

    plan = gt.plan(program, workers=1).body
    assert sum(row["bytes"] for row in plan["weights"]) == 4 * 42 and not new.exists() and old.exists()


def test_a_plan_amid_a_session_leaves_its_settings_as_they_are(session: Callable) -> None:
    session("gt: {precision: bf16}")
    model, x = torch.nn.Linear(4, 4).to("remote"), torch.ones(2, 4, device="remote")

    def step() -> None:
        torch.nn.Linear(4, 4).to("remote")(torch.ones(2, 4, device="remote"))

    before = model(x)
    gt.plan(step, workers=1)
    assert before.dtype == torch.bfloat16 and torch.equal(model(x).cpu(), before.cpu())

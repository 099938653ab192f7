"""Tables of client, dispatcher and workers are bounded by the tensors in use, however long a program runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import gt
from gt.client import current_session
from gt.client.trace import recorder
from gt.dispatcher.events import PeerLost, Received, Send
from gt.dispatcher.planning import decompose, redistributor
from gt.dispatcher.state import validate
from gt.ir import check
from gt.ir.dataflow import makes
from gt.ir.instr import FIRST, FORGET, Define
from gt.wire.link import hello
from gt.wire.messages import AHEAD, CHUNK, Done, Exit, Fetch, Ops, Piece, Run, UploadProgress, Value, WindowUpdate
from gt.worker.downloads import Downloads
from tests.dispatcher.fairness.test_run_queue import ONES
from tests.helpers.core_bench import CoreBench
from tests.helpers.planned import planned
from tests.helpers.serving import settled

PAIR = """
a: {shard: {axis: 0, workers: [0]}}
b: {shard: {axis: 0, workers: [1]}}
"""
FEW = 32  # templates a client keeps in these tests


@pytest.fixture
def few_templates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_TEMPLATES", FEW)


def of_many_shapes(count: int, group: str = "") -> None:
    """Ops of which no two have one template."""
    with gt.signal.context(group or "none"):
        for n in range(1, count + 1):
            x = torch.zeros(n, device="remote")
            x.add_(x).sum()
    current_session.current().flush()


def test_definitions_go_with_the_templates_they_were_made_for(few_templates):
    with planned("", 1) as plan:
        of_many_shapes(10 * FEW)
        core = plan.core
        assert len(core.sessions[b"client"].context.templates) <= FEW
        assert len(core.cluster.workers[0].known) <= 2 * FEW
        defined = {row[0] for _, run in plan.runs for row in run.defines}
        assert len(defined) >= 20 * FEW


@pytest.mark.parametrize("recording", [False, True])
def test_large_values_that_end_are_freed_before_the_next_is_made(recording):
    with planned("", 1) as plan:

        def chain() -> torch.Tensor:
            x = torch.zeros(1 << 22, device="remote")
            for _ in range(20):
                x = torch.split(x + 1, 1 << 21)[0].repeat(2)
            return x.sum()

        (gt.compile(chain) if recording else chain)()
        current_session.current().flush()
        defines = {row[0]: Define.from_wire(row) for _, run in plan.runs for row in run.defines}
        live, most = set(), 0
        for _, run in plan.runs:
            code, at = run.code, 0
            while at < len(code):
                if code[at] < FIRST:
                    live -= set(code[at + 3 : at + 3 + code[at + 2]])
                    at += 3 + code[at + 2]
                    continue
                define = defines[code[at]]
                end = at + 2 + define.operands
                live.update(makes(define, code[at + 2 : end]))
                most, at = max(most, len(live)), end
        assert len(defines) >= 4 and most <= 8, "of 20 times 4"


def test_a_view_whose_template_is_gone_can_be_made_again(few_templates):
    with planned(PAIR, 2) as plan:
        with gt.signal.context("a"):
            base = torch.zeros(4, 6, device="remote") + 1
            view = base.t()
        of_many_shapes(4 * FEW, "a")
        sent = len(plan.runs)
        with gt.signal.context("b"):
            view + view
        current_session.current().flush()
        made = [row[2]["op"] for _, run in plan.runs[sent:] for row in run.defines if row[1] == "op"]
        assert "aten.t.default" in made


def test_no_run_names_a_definition_after_it_was_forgotten(few_templates):
    with planned(PAIR, 2) as plan:
        for group in ("a", "b", "a"):
            of_many_shapes(3 * FEW, group)
        known: dict[bytes, set[int]] = {}
        for peer, run in plan.runs:
            mine = known.setdefault(peer, set())
            mine.update(row[0] for row in run.defines)
            mine.difference_update(forgotten(run))
        assert [known[w.peer] for w in plan.core.cluster.workers] == [w.known for w in plan.core.cluster.workers]


def forgotten(run: Run) -> list[int]:
    """Definitions that a Run ends with dropping."""
    for at in range(len(run.code) - 2):
        if run.code[at] == FORGET and at + 3 + run.code[at + 2] == len(run.code):
            return run.code[at + 3 :]
    return []


def test_conversions_of_many_shapes_are_not_kept(monkeypatch):
    monkeypatch.setattr(redistributor, "MAX_KEPT_CONVERSIONS", 8)
    with planned(PAIR, 2) as plan:
        for n in range(1, 100):
            with gt.signal.context("a"):
                x = torch.zeros(n, device="remote") + 1
            with gt.signal.context("b"):
                x + x
        current_session.current().flush()
        assert len(plan.core.sessions[b"client"].redistributor._steps) <= 8


def test_tables_of_many_shapes_are_not_remembered(monkeypatch):
    monkeypatch.setattr(decompose, "MAX_KEPT_TABLES", 8)
    with planned(PAIR, 2) as plan, gt.signal.context("a"):
        index = torch.zeros(2, dtype=torch.long, device="remote")
        for n in range(1, 100):
            torch.nn.functional.embedding(index, torch.zeros(n, 4, device="remote"))
        current_session.current().flush()
        shapes = [shape for _, shape in plan.core.sessions[b"client"].planner._decompose._tables]
        assert shapes == [(n, 4) for n in range(92, 100)]


def test_a_session_takes_its_definitions_with_it(session):
    session()
    of_many_shapes(50)
    torch.ones(3, device="remote").sum().item()
    before = gt.stats()["workers"][0]["definitions"]
    assert before >= 100
    gt.shutdown()
    session()
    assert torch.ones(3, device="remote").sum().item() == 3
    assert gt.stats()["workers"][0]["definitions"] < before - 90


def test_tensors_that_ended_are_in_no_table(session):
    session()
    model = torch.nn.Linear(8, 8).to("remote")
    optimizer = torch.optim.AdamW(model.parameters())

    def tables() -> tuple[int, ...]:
        for _ in range(5):
            model(torch.ones(2, 8, device="remote")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        worker = settled()["workers"][0]
        live = current_session.current().live_tensors
        return len(live.all) - len(live.ended), worker["live_tensors"], worker["live_bytes"], worker["definitions"]

    tables()
    assert tables() == tables()


def test_a_large_value_is_passed_on_while_it_comes():
    with planned("", 1) as plan:
        plan.slow = True
        x = torch.zeros(CHUNK, device="remote") + 1  # four frames
        current_session.current().flush()
        core, (worker,) = plan.core, plan.core.cluster.workers
        ahead = worker.runs
        actions = core.handle(Received(b"client", Fetch(7, x._ref.id)))
        (key,) = core.sessions[b"client"].fetches.by_key
        frame = b"\0" * CHUNK
        assert told(actions) == told(core.handle(Received(worker.peer, Piece(key, 0, 4 * CHUNK), (frame,)))) == []
        assert told(core.handle(Received(worker.peer, Done(ahead)))) == [Value, Piece]
        for n in (1, 2, 3):
            assert told(core.handle(Received(worker.peer, Piece(key, n * CHUNK, 4 * CHUNK), (frame,)))) == [Piece]
        assert not core.sessions[b"client"].fetches.open and worker.runs == ahead + 1


def test_a_large_value_is_sent_as_its_client_takes_it_in():
    with planned("", 1) as plan:
        plan.slow = True
        total = AHEAD + 3 * CHUNK
        x = torch.zeros(total // 4, device="remote") + 1
        current_session.current().flush()
        core, (worker,) = plan.core, plan.core.cluster.workers
        client, frame = b"client", b"\0" * CHUNK

        def more(actions: list) -> list[int]:
            return [a.message.upto for a in actions if isinstance(a, Send) and isinstance(a.message, WindowUpdate)]

        core.handle(Received(client, Fetch(7, x._ref.id)))
        core.handle(Received(worker.peer, Done(worker.runs)))
        (key,) = core.sessions[client].fetches.by_key
        for offset in (0, CHUNK):
            core.handle(Received(worker.peer, Piece(key, offset, total), (frame,)))
        assert more(core.handle(Received(client, UploadProgress(key, CHUNK)))) == [AHEAD + CHUNK]
        assert more(core.handle(Received(client, UploadProgress(key + 1, CHUNK)))) == []
        assert more(core.handle(PeerLost(client, "gone"))) == [-1]  # the worker keeps nothing for it
        core.handle(Received(b"other", hello("client")))
        assert told(core.handle(Received(b"other", UploadProgress(key, CHUNK))), b"other") == []
    with planned("", 1) as plan:
        plan.slow = True
        x = torch.zeros(total // 4, device="remote") + 1
        current_session.current().flush()
        plan.core.handle(Received(client, Fetch(7, x._ref.id)))
        (key,) = plan.core.sessions[client].fetches.by_key
        refused = plan.core.handle(Received(client, UploadProgress(key, CHUNK)))
        assert "UploadProgress.upto is" in next(
            a.message.reason for a in refused if isinstance(a, Send) and isinstance(a.message, Exit)
        )


def test_a_piece_is_what_the_tensor_was_when_it_was_asked_for():
    sent: list[tuple[int, bytes]] = []
    downloads = Downloads(lambda message, frames: sent.append((message.offset, bytes(frames[0]))))
    tensor = np.random.default_rng(0).integers(0, 255, AHEAD + 2 * CHUNK + 5, np.uint8)
    before = tensor.tobytes()
    downloads.begin(1, tensor.data, own=False)
    assert len(sent) == AHEAD // CHUNK
    downloads.copy_unsent()
    tensor[:] = 0
    downloads.widen_window(1, AHEAD + CHUNK)
    assert len(sent) == AHEAD // CHUNK + 1
    downloads.widen_window(1, 1 << 40)
    assert b"".join(data for _, data in sent) == before and not downloads.unsent
    assert [offset for offset, _ in sent] == list(range(0, len(before), CHUNK))
    downloads.begin(2, tensor.data, own=True)
    downloads.widen_window(2, -1)
    downloads.widen_window(2, 1 << 40)
    assert not downloads.unsent


def told(actions: list, peer: bytes = b"client") -> list[type]:
    """Kinds of message that the client is sent."""
    return [type(a.message) for a in actions if isinstance(a, Send) and a.peer == peer]


def test_a_list_op_is_planned_once():
    with planned("", 1) as plan:
        some = [torch.zeros(n, device="remote") for n in (2, 3, 4)]
        for _ in range(2):
            torch._foreach_add_(some, 1.0)  # places them
        current_session.current().flush()
        hits, sent = plan.core.sessions[b"client"].planner.hits, len(plan.runs)
        torch._foreach_add_(some, 1.0)
        current_session.current().flush()
        assert plan.core.sessions[b"client"].planner.hits == hits + 1
        assert [run.defines for _, run in plan.runs[sent:]] == [[]]


# ---- what a session may define in all


def origins(names: list[tuple[str, str]]) -> Ops:
    return Ops(0, [], [[n + 1, file, 1, group, False, -1] for n, (file, group) in enumerate(names)], [])


def test_names_of_a_session_are_bounded_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "MAX_ALL_NAME_CHARACTERS", 1000)
    bench = CoreBench()
    bench.give(b"c", origins([("file.py", "")] * 2000))  # the same name again and again costs nothing
    assert b"c" in bench.core.sessions
    names = [("x" * 90 + str(n), "") for n in range(20)]
    assert "names have" in CoreBench().refusal(b"c", origins(names))


def test_groups_within_one_another_are_bounded() -> None:
    assert "groups are within one another, at most 32" in CoreBench().refusal(b"c", origins([("f", "/".join("x" * 40))]))


def test_templates_of_a_session_are_bounded_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "MAX_ALL_TEMPLATE_PARTS", 200)
    rows = [[16 + n, ONES.wire()] for n in range(40)]
    assert "at most 200 are taken" in CoreBench().refusal(b"c", Ops(0, rows, [], []))


def test_a_client_begins_its_templates_again_before_they_are_too_many_in_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of optimizers are long: twenty models of one process were refused together, and the session ended."""
    monkeypatch.setattr(check, "MAX_ALL_TEMPLATE_PARTS", 2000)
    with planned("", 1) as plan:
        for n in range(1, 40):
            lists = [[torch.zeros(n, device="remote") for _ in range(20)] for _ in range(2)]
            torch._foreach_add_(*lists)
        current_session.current().flush()
        assert current_session.current().cleared > 5
        assert len(plan.core.sessions[b"client"].context.templates) < 20
        lists[0][0].add_(lists[1][0])

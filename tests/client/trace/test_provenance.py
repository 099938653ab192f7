"""Provenance of ops: the user's line, the signal group, and both inherited by backward; errors and interrupts."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gt
from gt.client import current_session
from gt.client.groups import group_context
from gt.client.trace import provenance
from tests.helpers.inline_session import InlineSession, inline  # noqa: F401
from tests.helpers.limits import limit
from tests.helpers.serving import serving

pytestmark = pytest.mark.usefixtures("inline", "threads")


@pytest.fixture(params=["one thread", "several threads"], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process where one thread has recorded ops so far, or several have."""
    group_context.stack.thread = 1
    monkeypatch.setattr(group_context.GroupStack, "threads", 1 if request.param == "one thread" else 2)


def origins(session: InlineSession) -> list[tuple[str, str, int, str, bool]]:
    """(op, file, line, group, backward) of everything recorded."""
    gt.stats()
    return [(op, os.path.basename(r[1]), *r[2:]) for op, n in session.log for r in [session.origins[n]]]


def groups(session: InlineSession, op: str) -> list[tuple[str, bool]]:
    return [(o[3], o[4]) for o in origins(session) if op in o[0]]


def test_an_op_has_the_users_line_and_group(inline: InlineSession) -> None:  # noqa: F811
    x = torch.ones(2, 2, device="remote")
    layer = nn.Linear(2, 2).to("remote")
    with gt.signal.context("outer"):
        x + 1
        with gt.signal.context("inner"):
            layer(x)
        x - 1
    line = test_an_op_has_the_users_line_and_group.__code__.co_firstlineno
    seen = {(o[0].split(".")[1], o[1], o[2] - line, o[3]) for o in origins(inline)}
    me = os.path.basename(__file__)
    assert {("add", me, 4, "outer"), ("addmm", me, 6, "outer/inner"), ("sub", me, 7, "outer")} <= seen


def test_a_group_decorates_a_function(inline: InlineSession) -> None:  # noqa: F811
    @gt.signal.context("stage")
    def f(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    f(torch.ones(2, device="remote")), f(torch.ones(2, device="remote"))
    assert groups(inline, "mul") == [("stage", False)] * 2


def test_a_group_is_left_on_error() -> None:
    from gt.client.groups.group_context import stack

    with pytest.raises(ValueError), gt.signal.context("a"):
        raise ValueError
    assert not stack.scope().group
    with pytest.raises(TypeError, match="non-empty string"):
        gt.signal.context("")


def two_stages(x: torch.Tensor, v: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with gt.signal.context("stage0"):
        y = torch.tanh(x @ v)
    with gt.signal.context("stage1"):
        return torch.sigmoid(y @ w).sum()


def parameters() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.ones(2, 3, device="remote")
    return x, nn.Parameter(torch.ones(3, 4).to("remote")), nn.Parameter(torch.ones(4, 2).to("remote"))


def test_backward_inherits_the_group_and_line(inline: InlineSession) -> None:  # noqa: F811
    loss = two_stages(*parameters())
    loss.backward()
    assert groups(inline, "sigmoid_backward") == [("stage1", True)]
    assert groups(inline, "tanh_backward") == [("stage0", True)]
    assert groups(inline, "aten.mm") == [
        ("stage0", False), ("stage1", False), ("stage1", True), ("stage1", True), ("stage0", True),
    ]  # fmt: skip
    line = two_stages.__code__.co_firstlineno
    assert [o[2] - line for o in origins(inline) if "tanh_backward" in o[0]] == [2]


def test_accumulation_goes_to_the_parameters_home(inline: InlineSession) -> None:  # noqa: F811
    x, v, w = parameters()
    for _ in range(2):
        two_stages(x, v, w).backward()
    assert groups(inline, "aten.add") == [("stage1", True), ("stage0", True)]


@pytest.mark.parametrize("outside", [False, True])
def test_backward_inherits_the_micro_batch_wherever_it_is_called(inline: InlineSession, outside: bool) -> None:  # noqa: F811
    _, v, w = parameters()
    losses = []
    for part in gt.microbatches(torch.ones(6, 3, device="remote"), 3):
        losses.append(two_stages(part, v, w))
        if not outside:
            losses[-1].backward()
    for loss in losses if outside else []:
        loss.backward()
    gt.stats()
    found = [(op, inline.origins[n]) for op, n in inline.log]
    backward = [(op, row[-1]) for op, row in found if row[4]]
    assert {micro for _, micro in backward} == {0, 1, 2}, backward
    assert [micro for _, micro in backward] == sorted(micro for _, micro in backward), backward
    assert [micro for op, micro in backward if op.startswith("aten.add")] == [1, 1, 2, 2]


def test_a_result_that_is_used_as_an_alias_only_is_of_its_own_micro_batch(inline: InlineSession) -> None:  # noqa: F811
    """Nothing has marked its node; its parameter, the first of its inputs, knows the first micro-batch only."""
    w = torch.nn.Parameter(torch.ones(3, device="remote"))
    for part in gt.microbatches(torch.ones(6, 3, device="remote", requires_grad=True), 3):
        (w * torch.tanh(part))[:, :].sum().backward()
    gt.stats()
    found = [inline.origins[n] for op, n in inline.log if op == "aten.mul.Tensor"]
    assert [row[-1] for row in found if row[4]] == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_ops_take_the_context_entered_there(inline: InlineSession, reentrant: bool) -> None:  # noqa: F811
    def part(y: torch.Tensor) -> torch.Tensor:
        with gt.signal.context("inside"):
            return torch.tanh(y).sin()

    x = torch.ones(2, device="remote", requires_grad=True)
    checkpoint(part, x * 1, use_reentrant=reentrant).sum().backward()
    assert groups(inline, "aten.tanh.default") == [("inside", False)] * 2
    assert groups(inline, "tanh_backward") == [("inside", True)]
    assert groups(inline, "aten.cos") == [("inside", True)]


class _OneDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


def test_a_gradient_without_a_derivative_is_a_tensor_that_may_be_used(inline: InlineSession) -> None:  # noqa: F811
    """Its node, which raises, has the largest of all sequence numbers."""
    x = torch.ones(3, device="remote", requires_grad=True)
    (grad,) = torch.autograd.grad(_OneDerivative.apply(x).square().sum(), x, create_graph=True)
    total = (grad * grad).sum()
    with pytest.raises(RuntimeError, match="once_differentiable"):
        total.backward()


def test_move_is_recorded_under_its_group_and_comes_back(inline: InlineSession) -> None:  # noqa: F811
    x = torch.ones(2, device="remote", requires_grad=True)
    with gt.signal.context("stage0_to_stage1"):
        y = gt.signal.move(x * 2)
    y.sum().backward()
    assert groups(inline, "gt.move") == [("stage0_to_stage1", False), ("stage0_to_stage1", True)]
    assert x.grad.tolist() == [2.0, 2.0]
    with gt.signal.context("stage0_to_stage1"):
        y = y


def test_apply_and_groups(inline: InlineSession) -> None:  # noqa: F811
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("remote")
    gt.signal.apply(model, {"0": "front", "1": "back"})
    model(torch.ones(1, 2, device="remote")).sum().backward()
    assert groups(inline, "addmm") == [("front", False), ("back", False)]
    assert gt.signal.groups() == []
    assert gt.signal.balance([nn.Linear(2, 2)] * 4, 2, torch.ones(1, 2)) == [(0, 2), (2, 4)]


# ---- errors


ERRORS: dict[str, Any] = {
    "shape": lambda x: x @ x,
    "broadcast": lambda x: x + torch.ones(7, device="remote"),
    "dtype": lambda x: x @ torch.ones(3, 2, dtype=torch.int64, device="remote"),
    "dim": lambda x: x.sum(5),
    "view": lambda x: x.view(5),
    "index": lambda x: x[:, :, 0],
    "in place": lambda x: x.add_(torch.ones(4, 2, 3, device="remote")),
    "cat": lambda x: torch.cat([x, torch.ones(5, device="remote")]),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_mistake_is_torchs_own_error_at_the_users_line(name: str, inline: InlineSession) -> None:  # noqa: F811
    x = torch.ones(2, 3, device="remote")
    with pytest.raises((RuntimeError, IndexError)) as caught:
        ERRORS[name](x)
    assert any(entry.path.name == os.path.basename(__file__) for entry in caught.traceback)
    assert x.sum().item() == 6.0


def test_mixed_operands_say_what_to_do() -> None:
    x, host = torch.ones(2, 3, device="remote"), torch.ones(2, 3)
    for wrong in (lambda: x + host, lambda: host @ x.t(), lambda: torch.cat([x, host]), lambda: nn.Linear(3, 2)(x)):
        with pytest.raises(RuntimeError, match=r"\.to\('remote'\)"):
            wrong()
    q = torch.ones(1, 1, 2, 2, device="remote")
    with pytest.raises(RuntimeError, match=r"\.to\('remote'\)"):
        nn.functional.scaled_dot_product_attention(q, q.cpu(), q)
    with pytest.raises(RuntimeError, match="remote"):
        x.data = host


def test_an_op_without_a_remote_form_says_so() -> None:
    with pytest.raises(NotImplementedError, match="compute it on the CPU"):
        torch.ones(2, 2, device="remote").to_sparse_bsr((1, 1))


def test_exceptions_in_hooks_arrive_a_hundred_times() -> None:
    x = torch.ones(3, device="remote", requires_grad=True)

    class Broken(Exception):
        pass

    def fail(grad: torch.Tensor) -> None:
        raise Broken

    for _ in range(100):
        y = x * 2
        y.register_hook(fail)
        with pytest.raises(Broken):
            y.sum().backward()
    forward = nn.Linear(3, 3).to("remote")
    forward.register_forward_hook(lambda *a: fail(a[0]))
    for _ in range(100):
        with pytest.raises(Broken):
            forward(x)
    (x * 2).sum().backward()
    assert x.grad.tolist() == [2.0] * 3


@pytest.fixture
def no_callbacks_of_collections() -> Iterator[None]:
    """A callback in Python, as hypothesis has one, swallows the exception of a signal that comes in it."""
    kept = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = kept


@pytest.mark.usefixtures("no_callbacks_of_collections")
def test_a_hundred_interrupts_lose_nothing(inline: InlineSession) -> None:  # noqa: F811
    """SIGINT arrives at random points of forward and backward; what is recorded afterwards is still right."""
    x = torch.ones(3, device="remote", requires_grad=True)
    caught, done = 0, threading.Event()

    def interrupt(seconds: float) -> None:
        while not done.wait(seconds):
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            seconds = limit(5.0)  # once more: a finalizer of what another test left swallows the exception of a signal in it

    while caught < 100:
        timer = threading.Thread(target=interrupt, args=(0.002 + caught % 7 * 0.0007,))
        done.clear()
        try:
            timer.start()
            while True:
                y = x
                for _ in range(20):
                    y = y * 1.0 + 0.0
                torch.autograd.grad(y.sum(), x)
        except KeyboardInterrupt:
            caught += 1
        finally:
            done.set()
            timer.join()
    gc.collect()
    assert torch.autograd.grad((x * 3).sum(), x)[0].tolist() == [3.0] * 3
    gt.stats()
    assert len(inline.tensors) < 110  # an interrupted op may leave its output behind, never more


def test_a_stale_buffer_is_flushed_when_idle(inline: InlineSession) -> None:  # noqa: F811
    x = torch.ones(3, device="remote")
    x + 1
    before = inline.batches
    inline.on_idle()
    assert inline.batches == before + 1
    inline.on_idle()
    assert inline.batches == before + 1


def test_the_first_ops_after_a_wait_are_handed_over_soon_and_then_more_of_them_together(
    inline: InlineSession,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until they come workers have nothing to do; once they have, large batches cost less."""
    x = torch.rand(3, device="remote")
    submit = inline.submit
    many: list[int] = []
    monkeypatch.setattr(inline, "submit", lambda *given, **how: (many.append(len(inline.log)), submit(*given, **how)))
    for _ in range(2):
        (x + 1).tolist()
        many.clear()
        before = len(inline.log)
        for _ in range(1200):
            x + 1
        sizes = [b - a for a, b in itertools.pairwise([before, *many[1:], len(inline.log)])]
        assert sizes[0] < 30 and max(sizes) > 8 * sizes[0], sizes
        assert all(b >= a for a, b in itertools.pairwise(sizes)), sizes


def test_ended_tensors_wait_for_the_next_batch_while_an_answer_is_awaited(inline: InlineSession) -> None:  # noqa: F811
    x, y = torch.ones(3, device="remote"), torch.ones(3, device="remote")
    gt.stats()
    before, held = inline.batches, len(inline.tensors)
    del y
    inline.waiting = True
    inline.on_idle()
    assert x.tolist() == [1.0] * 3
    assert (inline.batches, len(inline.tensors)) == (before, held)
    inline.waiting = False
    inline.on_idle()
    assert (inline.batches, len(inline.tensors)) == (before + 1, held - 1)


def test_the_template_table_is_bounded(inline: InlineSession, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    from gt.client.trace import recorder

    monkeypatch.setattr(recorder, "MAX_TEMPLATES", 20)
    for _ in range(2):
        for n in range(1, 60):
            x = torch.ones(n, device="remote")
            assert (x + x).sum().item() == 2.0 * n
    assert len(inline.templates) <= 20


def test_two_threads_record_at_once() -> None:
    found: list[float] = []

    def work(n: int) -> None:
        x = torch.full((2,), float(n), device="remote")
        for _ in range(200):
            x = x + 1
        found.append(x[0].item())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(found) == [200.0, 201.0, 202.0, 203.0]


def one_line(x: torch.Tensor) -> torch.Tensor:
    return x + x


def test_one_line_has_an_origin_for_each_group_and_micro_batch(inline: InlineSession) -> None:  # noqa: F811
    x = torch.ones(2, 2, device="remote")
    for _ in range(2):
        one_line(x)
        for part in gt.microbatches(x, 2):
            one_line(part)
        with gt.signal.context("stage"):
            one_line(x)
    gt.stats()
    rows = [inline.origins[n] for op, n in inline.log if op == "aten.add.Tensor"]
    assert [(row[3], row[5]) for row in rows] == 2 * [("", -1), ("", 0), ("", 1), ("stage", -1)]
    assert {row[2] for row in rows} == {one_line.__code__.co_firstlineno + 1}


def test_a_line_has_an_origin_of_its_own_in_each_session(inline: InlineSession) -> None:  # noqa: F811
    """Sessions number origins independently, also where one is set aside for another."""
    x = torch.ones(2, 2, device="remote")
    one_line(x)
    gt.stats()
    state = current_session.set_aside()
    other = InlineSession()
    current_session.connect(other)
    y = torch.ones(2, 2, device="remote").tanh().exp()
    one_line(y), one_line(y)
    gt.stats()
    current_session.restore(state)
    one_line(x)
    gt.stats()
    line = one_line.__code__.co_firstlineno + 1
    for session, count in ((inline, 2), (other, 2)):
        rows = [session.origins[n] for op, n in session.log if op == "aten.add.Tensor"]
        assert [row[2] for row in rows] == [line] * count


def test_nodes_of_two_threads_with_equal_numbers_keep_their_groups(inline: InlineSession) -> None:  # noqa: F811
    def started_at(number: int, group: str) -> torch.Tensor:
        """A loss whose nodes have the numbers from this one on in their thread."""
        x = torch.ones(3, device="remote", requires_grad=True)
        while torch.autograd._get_sequence_nr() < number:
            x + 1
        with gt.signal.context(group):
            return torch.tanh(torch.sigmoid(x)).prod()

    number = torch.autograd._get_sequence_nr() + 10
    loss = started_at(number, "first")
    assert torch.autograd._get_sequence_nr() == number + 3
    thread = threading.Thread(target=lambda: started_at(number, "second").backward())
    thread.start()
    thread.join()
    loss.backward()
    found = [(op.split(".")[1], group) for op, group in ops_and_groups(inline) if "_backward" in op]
    assert found == [(op, group) for group in ("second", "first") for op in ("tanh_backward", "sigmoid_backward")]


def test_graphs_beyond_the_table_of_nodes_run(inline: InlineSession, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """The oldest nodes give way: their ops in the backward pass are those of the line that called it."""
    monkeypatch.setattr(provenance, "MAX_TAGGED_NODES", 8)
    x = torch.ones(3, device="remote", requires_grad=True)
    with gt.signal.context("group"):
        y = torch.tanh(x)
        for _ in range(6):
            y = torch.sigmoid(y)
    first = y
    for _ in range(20):
        y = y * 2
    y.sum().backward()
    gt.stats()
    del inline.log[:]
    with gt.signal.context("group"):
        torch.tanh(torch.sigmoid(x)).sum().backward()
    assert first.requires_grad and x.grad is not None
    assert {group for op, group in ops_and_groups(inline) if "_backward" in op} == {"group"}


def ops_and_groups(session: InlineSession) -> list[tuple[str, str]]:
    return [(row[0], row[3]) for row in origins(session)]


def test_threads_record_their_own_groups(inline: InlineSession) -> None:  # noqa: F811
    x = torch.ones(2, 2, device="remote")
    one_line(x)

    def in_group() -> None:
        with gt.signal.context("other"):
            one_line(x)

    thread = threading.Thread(target=in_group)
    with gt.signal.context("main"):
        thread.start()
        thread.join()
        one_line(x)
    assert groups(inline, "add") == [("", False), ("other", False), ("main", False)]


def test_a_source_file_may_have_any_name() -> None:
    """Names of files are bytes: those that are no UTF-8 are shown as escapes."""
    name = "/tmp/\udcff\x1b[31m/train.py"
    scope = {"torch": torch, "device": gt.device}
    with serving(1) as server:
        gt.connect(server.address, name=False, config="")
        exec(compile("x = torch.ones(2, device=device) + 1\ntotal = x.sum().item()", name, "exec"), scope)
        assert scope["total"] == 4.0
        gt.shutdown()

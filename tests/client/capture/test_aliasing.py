"""Arguments, results and state that share memory: a captured call changes and returns the tensors that an eager call does."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import register_dataclass

import gt


def rows(device: str, count: int = 6) -> list[torch.Tensor]:
    return [torch.arange(6.0).reshape(2, 3).add(n).to(device) for n in range(count)]


def added_in_place(x: torch.Tensor) -> torch.Tensor:
    x.view(-1).add_(1)
    return x.sum()


def changed_argument(device: str, wrap: Callable) -> Any:
    step, xs = wrap(added_in_place), rows(device)
    return [step(x) for x in xs], xs


def changed_argument_of_a_failing_call(device: str, wrap: Callable) -> Any:
    fails = [False]

    def step(x: torch.Tensor) -> torch.Tensor:
        added_in_place(x)
        if fails[0]:
            raise ValueError("as asked")
        return x * 2

    compiled, xs = wrap(step), rows(device)
    for n, x in enumerate(xs):
        fails[0] = n in (1, 4)
        try:
            compiled(x)
        except ValueError:
            x.mul_(3)
    return xs


def one_tensor_twice(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return (x * y).sum()

    compiled, xs, ys = wrap(step), rows(device, 10), rows(device, 10)
    apart = [compiled(x, y) for x, y in zip(xs[:4], ys, strict=False)]
    together = [compiled(x, x) for x in xs[4:8]]
    views = [compiled(x, x[0]) for x in xs[8:]]
    return apart, together, views, xs


def one_tensor_twice_unchanged(device: str, wrap: Callable) -> Any:
    """The same object in two arguments, then two objects, then the same ones in another order and within containers."""

    def step(x: torch.Tensor, y: torch.Tensor, *more: Any) -> Any:
        same = [x is y, *[other is x for part in more for other in part.values()]]
        return x + 10 * y, x.sum() if x is y else y.sum(), same

    step, xs, ys = wrap(step), rows(device, 12), rows(device, 12)
    found = [step(x, x) for x in xs[:4]] + [step(x, y) for x, y in zip(xs[4:8], ys, strict=False)]
    found += [step(x, y, {"first": x, "second": y}) for x, y in zip(xs[8:], ys[8:], strict=True)]
    found += [step(x, x, {"first": x, "second": y}) for x, y in zip(xs[8:], ys[8:], strict=True)]
    return found + [step(xs[0], xs[0]) for _ in range(4)]


def one_tensor_twice_with_gradients(device: str, wrap: Callable) -> Any:
    step, made = wrap(lambda x, y: (x * x * y).sum()), []
    for x in rows(device, 6):
        x.requires_grad_()
        step(x, x).backward()
        made.append(x.grad)
    weight = torch.ones(3, device=device, requires_grad=True)
    step = wrap(lambda x, y: (x * weight * y).sum())
    for x in rows(device, 6):
        step(x, x).backward()
    return made, weight.grad


def one_leaf_twice_or_two_leaves(device: str, wrap: Callable) -> Any:
    """The function finds whether two arguments that require grad are one object, and each has its gradient."""

    def step(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return x * y * (3 if x is y else 2) + (z if z is x else 2 * z)

    step, leaves, found = wrap(step), [row.requires_grad_() for row in rows(device, 3)], []
    for a, b, c in [(0, 1, 2)] * 4 + [(0, 0, 1)] * 4 + [(0, 0, 0)] * 4 + [(0, 1, 0), (2, 2, 1)] * 3:
        result = step(leaves[a], leaves[b], leaves[c])
        result.sum().backward()
        found.append((result.detach(), *[leaf.grad.clone() for leaf in leaves if leaf.grad is not None]))
    return found


def view_of_an_argument_that_stays(device: str, wrap: Callable) -> Any:
    (x,) = rows(device, 1)
    step = wrap(lambda x: (x.t(), x * 2))
    kept = [step(x)[0] for _ in range(6)]
    x.add_(1)
    kept[5].mul_(2)
    return kept, x


def host_memory_in_two_arguments(device: str, wrap: Callable) -> Any:
    """CPU tensors with the same elements, which are written, and such that share none: by other strides, flags or places."""

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(-1)
        y.add_(1)
        return x + y.sum()

    step, (x, y, z), found = wrap(step), rows("cpu", 3), []
    array = z.numpy()
    for _ in range(4):
        found += [step(x, y), step(x, x), step(x, x.detach()), step(x.t(), x.t()), step(x[0], x[1]), step(x[0], x[0])]
        found += [step(torch.from_numpy(array)[:, 1:], torch.from_numpy(array)[:, 1:])]
    return [each.to(device) for each in (*found, x, y, z)]


def host_memory_in_arguments_of_parts(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.mul_(2 if x.sum() > 3 else 3)
        y.add_(1)
        return x + y

    step, (x,), found = wrap(step), rows("cpu", 1), []
    for _ in range(4):
        found += [step(x, x), step(x[:, 1:], x[:, 1:])]
    return [each.to(device) for each in (*found, x)]


def host_memory_that_is_read_in_two_forms(device: str, wrap: Callable) -> Any:
    """One storage as two arguments, which are uploaded apart; and one tensor, or another of the same elements."""
    step, (x,), found = wrap(lambda x, y: x * 2 if x is y else x + y + 1), rows("cpu", 1), []
    bits = torch.complex(x, x + 1)
    odd = torch.frombuffer(bytearray(33), dtype=torch.float32, offset=1)
    for _ in range(4):
        found += [step(bits, bits.conj()).abs(), step(x[:, :1], x[:, :1].expand(2, 3)), step(odd, odd[:1])]
        found += [step(x, x), step(x, x[:]), step(x[:, 1:], x[:, :2])]
    return [each.to(device) for each in found]


def view_of_a_changed_weight(device: str, wrap: Callable) -> Any:
    (weight,) = rows(device, 1)

    def step(row: torch.Tensor) -> torch.Tensor:
        weight.mul_(2)
        return row.sum()

    compiled = wrap(step)
    return [compiled(weight[n % 2]) for n in range(6)]


def rows_of_a_buffer(device: str, wrap: Callable) -> Any:
    step, buffer = wrap(added_in_place), torch.zeros(6, 3, device=device)
    return [step(buffer[n]) for n in range(6)], buffer


def slices_that_move_on(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor, label: torch.Tensor, keys: torch.Tensor) -> tuple:
        x.add_(label[:, None])
        return x, x.t()[1:], keys, (x @ keys).relu()

    data, labels, keys = torch.arange(96.0).reshape(3, 32).to(device), torch.ones(48, device=device), rows(device, 9)
    compiled, seen = wrap(step), []
    for n in range(9):
        got = compiled(data[:, 3 * n + 1 : 3 * n + 4], labels[5 * n : 5 * n + 3], keys[n].T[:, n % 2 :])
        got[0].mul_(2)
        got[1].sub_(1)
        got[2].mul_(3)
        seen.append(got)
    return seen, data, labels, keys


def returned_argument(device: str, wrap: Callable) -> Any:
    step, xs = wrap(lambda x: (x, x.sum())), rows(device)
    for x in xs:
        step(x)[0].add_(1)
    return xs


def returned_views_of_an_argument(device: str, wrap: Callable) -> Any:
    step, xs = wrap(lambda x: (x[1], x.t()[::2], x * 2)), [x.repeat(2, 2)[:, 1:] for x in rows(device)]
    for x in xs:
        row, turned, _ = step(x)
        row.add_(1)
        turned.mul_(2)
    return xs


def returned_view_of_state(device: str, wrap: Callable) -> Any:
    (state,) = rows(device, 1)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.add_(x)
        return state[0]

    compiled, views = wrap(step), []
    for x in rows(device):
        views.append(compiled(x))
        views[-1].mul_(2)
    return views, state


def returned_state_of_before(device: str, wrap: Callable) -> Any:
    held = {"state": rows(device, 1)[0]}

    def step(x: torch.Tensor) -> tuple:
        before = held["state"]
        held["state"] = before + x
        return before[0], held["state"][1]

    compiled = wrap(step)
    return [compiled(x) for x in rows(device)]


def result_returned_twice(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor) -> tuple:
        y = x * 2
        return y, {"again": y}

    compiled, results = wrap(step), []
    for x in rows(device):
        results.append(compiled(x))
        results[-1][0].add_(1)
    return results


def results_that_are_views_of_one_another(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor) -> tuple:
        doubled = x * 2
        loss = doubled.sum()
        return loss, loss.view(1), doubled, doubled[1], doubled.t()[:, 1:], doubled[:, :2], doubled[:, 1:].square()

    compiled, seen = wrap(step), []
    for x in rows(device):
        loss, same, whole, row, _, left, apart = results = compiled(x)
        loss.add_(1)
        row.mul_(-1)
        left[0] = 7
        apart.zero_()
        whole[0, 2] += 100
        seen.append([*results, same.item()])
    return seen


def parts_that_share_elements(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor) -> tuple:
        flat = (x + 1).view(-1)
        return flat[1:4], flat[2:6], flat[:0]

    compiled, seen = wrap(step), []
    for x in rows(device):
        first, second, _ = results = compiled(x)
        first.neg_()
        second.add_(0.5)
        seen.append(results)
    return seen


def one_memory_in_several_dtypes(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor) -> tuple:
        pairs, doubled = torch.complex(x, x), x * 2
        return pairs, torch.view_as_real(pairs), doubled.view(torch.int32), doubled[1:], pairs.conj()

    compiled, seen = wrap(step), []
    for x in rows(device):
        pairs, parts, _, last, mirrored = results = compiled(x)
        pairs.add_(1)
        parts[0] = 5
        last.add_(3)
        seen.append([torch.view_as_real(pairs), *results[1:4], (mirrored * 2j).real])
    return seen


def changed_containers(device: str, wrap: Callable) -> Any:
    def step(batch: dict, seen: list) -> torch.Tensor:
        x = batch.pop("x")
        batch["inner"][0] = batch["double"] = x * 2
        seen.append(batch["pair"][1])
        return x.sum()

    compiled, pair, kept, batches = wrap(step), rows(device, 2), [], []
    for x in rows(device, 12):
        batches.append({"x": x, "inner": [x, x], "pair": (x, pair[1])})
        inner = batches[-1]["inner"]
        compiled(batches[-1], kept)
        assert inner is batches[-1]["inner"] and kept[-1] is pair[1]
    return batches, kept


def rebound_argument(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.unsqueeze_(0)
        y.data = x * 2
        return x.sum()

    compiled, xs, ys = wrap(step), rows(device, 9), rows(device, 9)
    return [compiled(x, y) for x, y in zip(xs, ys, strict=True)], xs, ys


def argument_that_begins_to_require_grad(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        loss = x.square().sum()
        loss.backward()
        return loss.detach()

    compiled, xs = wrap(step), rows(device, 9)
    return [compiled(x) for x in xs], [x.grad for x in xs]


def assigned_gradient(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.grad = torch.ones_like(x)
        return x * 2

    compiled, xs = wrap(step), rows(device)
    return [compiled(x) for x in xs], [x.grad for x in xs]


def changed_gradient(device: str, wrap: Callable) -> Any:
    def step(x: torch.Tensor) -> torch.Tensor:
        x.grad.add_(x)
        return x + x.grad

    compiled, xs = wrap(step), rows(device)
    for x in xs:
        x.grad = torch.zeros_like(x)
    return [compiled(x) for x in xs], [x.grad for x in xs]


def returned_aliases_of_an_argument(device: str, wrap: Callable) -> Any:
    """Aliases are other objects in the argument's memory: what begins to require grad is not the argument."""
    made = []
    for alias in (torch.Tensor.detach, lambda x: x.data, lambda x: x.detach().requires_grad_(), nn.Parameter):
        compiled, xs = wrap(lambda x, alias=alias: (alias(x), x * 2)), rows(device)
        for x in xs:
            result = compiled(x)[0]
            x.mul_(3)
            made.append((result.detach(), result is x, result.requires_grad, x.requires_grad, isinstance(result, nn.Parameter)))
            result.requires_grad_()
            assert not x.requires_grad
    return made


def returned_views_in_another_dtype(device: str, wrap: Callable) -> Any:
    """The caller's argument changes with a view of its bits, of its parts, and of its conjugate, and these with it."""
    made = []
    for view in (
        lambda x: x.view(torch.int32), lambda x: torch.view_as_complex(x[:, :2])[1:].real, lambda x: x[:, 1:].view(torch.int16),
        lambda x: torch.view_as_complex(x[:, :2]).conj()[1:], lambda x: torch.view_as_complex(x[:, :2]).conj().imag * 1,
        lambda x: torch.view_as_real(torch.view_as_complex(x[:, :2])).mT,
    ):  # fmt: skip
        compiled = wrap(lambda x, view=view: (view(x), x * 2))
        for n in range(6):
            base = torch.arange(24.0).reshape(4, 6).add(n).to(device)
            x = base[:2] if n < 3 else base[1:3]  # at another place of its memory
            result = compiled(x[:, :4])[0]
            base.mul_(2)
            made.append(result.clone())
            result.zero_()
            made.append(base)
    return torch.utils._pytree.tree_map(lambda x: torch.view_as_real(x.resolve_conj()) if x.is_complex() else x, made)


def returned_views_in_larger_elements(device: str, wrap: Callable) -> Any:
    """The argument may have more elements than larger ones have room for, or none."""
    made = []
    for view, shape in (
        (lambda x: x[:4].view(torch.int64), (5,)), (lambda x: x[0].view(torch.complex64), (3, 2)),
        (lambda x: x.view(torch.int64), (0,)),
    ):  # fmt: skip
        compiled = wrap(lambda x, view=view: (view(x), x * 2))
        for n in range(6):
            base = torch.arange(15.0).add(n).to(device)
            x = base[:5] if shape == (5,) else base.view(3, 5)[:, :2] if shape == (3, 2) else base[:0]
            result = compiled(x)[0]
            base.mul_(2)
            made.append(torch.view_as_real(result) if result.is_complex() else result.clone())
    return made


def returned_twice(device: str, wrap: Callable) -> Any:
    """A leaf and another object of its memory are two results, in either order; each is what the function returned."""
    made = []
    for leaf, both in (
        (True, lambda t: (t, t.detach())), (True, lambda t: (t.detach(), t)), (False, lambda t: (t, t.detach(), t)),
        (True, lambda t: (nn.Parameter(t.detach()), t.detach(), t)),
    ):  # fmt: skip
        compiled = wrap(lambda x, leaf=leaf, both=both: both((x * 2).detach().requires_grad_(leaf)))
        for x in rows(device):
            results = compiled(x)
            made.append([(r.requires_grad, isinstance(r, nn.Parameter)) for r in results])
            made.append([a is b for a in results for b in results])
            results[-1].detach().mul_(5)
            made += [r.detach().clone() for r in results]
    return made


def returned_flat_argument(device: str, wrap: Callable) -> Any:
    compiled, xs = wrap(lambda x: (x.view(-1), x.flatten()[2:5], x * 2)), rows(device)
    made = [compiled(x) for x in xs]
    for x in xs:
        x.mul_(3)
    return made


def returned_conjugate_of_an_argument(device: str, wrap: Callable) -> Any:
    compiled, made = wrap(lambda x: (x.conj(), x.mH, x.sum())), []
    for x in rows(device):
        x = torch.complex(x, x + 1)
        results = compiled(x)
        x.mul_(2)
        made += [torch.view_as_real(result.resolve_conj()) for result in (*results, x)]
    return made


def returned_leaves(device: str, wrap: Callable) -> Any:
    """A result that is a leaf requires grad in each call; the caller computes with it."""
    made = []
    for leaf in (lambda x: (x * 2).requires_grad_(), lambda x: nn.Parameter(x * 2), lambda x: nn.Parameter(x * 2, False)):
        compiled = wrap(leaf)
        for x in rows(device):
            result = compiled(x)
            made.append((result.detach(), result.requires_grad, result.is_leaf, isinstance(result, nn.Parameter)))
            if result.requires_grad:
                result.square().sum().backward()
                made.append(result.grad)
    return made


PROGRAMS = (
    changed_argument, changed_argument_of_a_failing_call, one_tensor_twice, view_of_a_changed_weight,
    one_tensor_twice_unchanged, one_tensor_twice_with_gradients, one_leaf_twice_or_two_leaves,
    rows_of_a_buffer, slices_that_move_on, returned_argument, returned_views_of_an_argument, returned_view_of_state,
    returned_state_of_before, result_returned_twice, results_that_are_views_of_one_another, parts_that_share_elements,
    one_memory_in_several_dtypes, changed_containers, rebound_argument,
    argument_that_begins_to_require_grad, assigned_gradient, changed_gradient, view_of_an_argument_that_stays,
    host_memory_in_two_arguments, host_memory_in_arguments_of_parts, host_memory_that_is_read_in_two_forms,
    returned_aliases_of_an_argument, returned_views_in_another_dtype, returned_conjugate_of_an_argument, returned_leaves,
    returned_flat_argument, returned_views_in_larger_elements, returned_twice,
)  # fmt: skip


def values(result: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.cpu().tolist() if isinstance(x, torch.Tensor) else x, result)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_a_captured_call_shares_the_memory_that_an_eager_one_does(program: Callable, one: None) -> None:
    assert values(program("remote", gt.compile)) == values(program("cpu", lambda step: step))


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_it_does_so_data_parallel(program: Callable, session: Callable[..., None]) -> None:
    session("data: {workers: [0, 1]}\n")
    with gt.signal.context("data"):
        shared = values(program("remote", gt.compile))
    assert shared == values(program("cpu", lambda step: step))


def test_slices_of_one_batch_are_replayed_where_nothing_changes_them(one: None) -> None:
    step = gt.compile(lambda x, y: (x * y).sum())
    batches = rows("remote", 8)
    losses = [step(batch[:, :-1], batch[:, 1:]).item() for batch in batches]
    assert losses == [(batch[:, :-1] * batch[:, 1:]).sum().item() for batch in rows("cpu", 8)]
    assert "6 replays" in step.explain()


def test_a_batch_that_is_also_the_labels_is_a_program_from_the_second_call_on(one: None) -> None:
    step = gt.compile(lambda input_ids, labels: (input_ids * 2 - labels.roll(1)).sum())
    losses = [step(input_ids=batch, labels=batch).item() for batch in rows("remote", 6)]
    assert losses == [(batch * 2 - batch.roll(1)).sum().item() for batch in rows("cpu", 6)]
    assert "4 replays" in step.explain()
    assert "was not kept" not in step.explain()


def test_slices_at_other_places_of_the_data_are_replayed(one: None) -> None:
    data, labels = torch.randn(64, 40), torch.randn(64)
    there, wanted = (data.to("remote"), labels.to("remote")), []
    weight = torch.randn(40, device="remote", requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        loss = (x @ weight - label).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    losses, parameter = [], weight.detach().cpu()
    compiled = gt.compile(step)
    for n in range(0, 64, 8):
        losses.append(compiled(there[0][n : n + 8], there[1][n : n + 8]))
        x, label = data[n : n + 8], labels[n : n + 8]
        wanted.append((x @ parameter - label).square().mean())
        parameter = parameter - 0.1 * 2 / 8 * (x @ parameter - label) @ x
    torch.testing.assert_close(torch.stack(losses).cpu(), torch.stack(wanted))
    columns = gt.compile(lambda x: x.sum(0))
    for n in range(8):
        assert torch.allclose(columns(there[0][:, n : n + 3]).cpu(), data[:, n : n + 3].sum(0))
    for function in (compiled, columns):
        assert ": 1 program" in function.explain() and re.search("[56] replays", function.explain()), function.explain()


@pytest.mark.parametrize("place", ["cpu", "remote"])
def test_a_step_whose_input_begins_to_require_grad_is_a_program(place: str, one: None) -> None:
    def step(x: torch.Tensor) -> tuple:
        x.requires_grad_()
        x.square().sum().backward()
        return x, x.grad.sign()

    compiled, plain = gt.compile(step), rows("cpu", 8)
    for n, x in enumerate(rows(place, 8)):
        got, wanted = compiled(x), step(plain[n])
        assert torch.equal(got[1].cpu(), wanted[1])
        if place == "remote":
            assert x.requires_grad and torch.equal(x.grad.cpu(), plain[n].grad) and (n < 2 or got[0] is x)
    assert compiled._programs[0].replays == 6, compiled.explain()


def test_gradients_of_an_argument_that_is_a_leaf_add_up_in_a_program(one: None) -> None:
    def train(device: str, wrap: Callable) -> tuple:
        x, step = rows("cpu")[0].to(device).requires_grad_(), wrap(lambda x: x.square().sum().backward())
        seen = []
        for _ in range(8):
            step(x)
            seen.append(x.grad.tolist())
        return step, seen

    compiled, seen = train("remote", gt.compile)
    assert seen == train("cpu", lambda step: step)[1]
    assert compiled._programs[0].replays == 5, compiled.explain()


def test_a_view_that_torch_calls_ambiguous_may_be_captured_and_printed(one: None) -> None:
    """A view made under no_grad, whose base has changed since: torch refuses to say whether it is a leaf."""

    def train(device: str, wrap: Callable) -> Any:
        weight = torch.ones(4, device=device, requires_grad=True)
        with torch.no_grad():
            view = weight[1:3]

        def step(x: torch.Tensor) -> torch.Tensor:
            torch.nn.init.constant_(view, 2)
            return x * view.detach()

        compiled = wrap(step)
        results = [compiled(x[0, :2]) for x in rows(device)]
        return results, weight.detach(), "grad_fn=<Invalid>" in repr(view)

    assert values(train("remote", gt.compile)) == values(train("cpu", lambda step: step))


@dataclass
class Batch:
    """An argument of a registered class, which the step may change."""

    x: torch.Tensor
    loss: torch.Tensor | None = None
    seen: int = 0
    parts: list = field(default_factory=list)


register_dataclass(Batch)


@pytest.mark.usefixtures("one")
def test_fields_of_a_registered_class_are_arguments() -> None:
    w = torch.ones(4, device="remote")
    step = gt.compile(lambda batch: (batch.x * w).sum() + batch.parts[0].sum())
    for n in range(8):
        x = torch.full((4,), float(n))
        assert step(Batch(x, parts=[x])).item() == 8.0 * n
    assert sum(program.replays for program in step._programs) >= 5


@pytest.mark.usefixtures("one")
def test_what_a_step_writes_to_an_object_of_a_registered_class_is_not_lost() -> None:
    w = torch.ones(4, device="remote")

    @gt.compile
    def step(batch: Batch) -> None:
        batch.loss = (batch.x * w).sum()
        batch.seen += 1
        batch.parts.append(batch.x)

    for n in range(8):
        x = torch.full((4,), float(n), device="remote" if n % 2 else "cpu")
        batch = Batch(x)
        step(batch)
        assert batch.loss is not None and batch.loss.item() == 4.0 * n
        assert batch.seen == 1 and batch.x is x and batch.parts[0] is x
    assert "changes a list, dictionary or object that it gets" in step.explain()

"""A session in this process, which executes the op stream with torch on the CPU at once. For tests of the client alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import gt  # noqa: F401 - registers the device
from gt.client import current_session
from gt.ir.instr import FREE, PARAM
from gt.ir.spec import Spec
from gt.ir.template import Const, T, Template, V
from gt.worker.engine.torch.layers import recurrent


class InlineSession:
    """The interface of gt.client.session.Session without processes. `log` has (op, origin) of each op."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.templates: dict[int, Template] = {}
        self.origins: dict[int, list] = {}
        self.params: list[int] = []
        self.kept: dict[int, Any] = {}
        self.log: list[tuple[str, int]] = []
        self.workers, self.groups, self.failure, self.on_idle = ["worker0"], [], None, None
        self.batches, self.waiting = 0, False

    def submit(self, templates: list, origins: list, code: list, frames: list, asks: bool = False) -> None:
        self.batches += 1
        for number, wire in templates:
            self.templates[number] = Template.from_wire(wire)
        for row in origins:
            self.origins[row[0]] = row
        # in a thread of its own: torch's dispatch state here is that of the op that filled the buffer
        threads = torch.get_num_threads()  # a new thread has the number that some thread set last
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as pool:
            state = torch.get_rng_state()  # the program's, which is in this process too
            try:
                pool.submit(self._run, iter(code), frames).result()
            finally:
                torch.set_rng_state(state)

    @torch.no_grad()
    def _run(self, code: Any, frames: list) -> None:
        for number in code:
            if number == FREE:
                for _ in range(next(code)):
                    del self.tensors[next(code)]
                continue
            if number == PARAM:
                self.params.append(next(code))
                continue
            template, origin = self.templates[number], next(code)
            assert origin in self.origins
            ids = [next(code) for _ in template.ins]
            values = [next(code) for _ in range(template.values)]
            new = [next(code) for _ in range(template.results)]
            self.log.append((template.op, origin))
            self._op(template, ids, values, new, frames)

    def _op(self, template: Template, ids: list[int], values: list, new: list[int], frames: list) -> None:
        ins = [self.tensors[i] for i in ids]
        for tensor, spec in zip(ins, template.ins, strict=True):
            assert tuple(tensor.shape) == spec.shape, (template.op, tensor.shape, spec)
            assert str(tensor.dtype)[6:] == spec.dtype, (template.op, tensor.dtype, spec)
        if template.op == "gt.upload.default":
            found: Any = self._upload(template.outs[0].spec, values[0], new[0], frames)
        elif template.op.startswith("gt."):
            found = GT[template.op](template, ins, values)
        else:
            found = self._aten(template, ins, values)
        flat = _flat(found)
        names = iter(new)
        for k, out in enumerate(template.outs):
            if out.kind not in ("new", "view"):
                continue
            tensor = flat[k]
            if out.spec is not None:
                assert tuple(tensor.shape) == out.spec.shape, (template, tensor.shape)
                assert str(tensor.dtype)[6:] == out.spec.dtype, (template, tensor.dtype)
                dense = tensor.numel() > 1 and out.kind == "new"
                if dense and tensor.stride() != out.spec.stride:
                    tensor = torch.empty_strided(out.spec.shape, out.spec.stride, dtype=tensor.dtype).copy_(tensor)
            self.tensors[next(names)] = tensor

    def _upload(self, spec: Spec, frame: int, number: int, frames: list) -> torch.Tensor:
        data = bytearray(frames[frame] if frame >= 0 else bytes(self.kept.pop(number)))
        dtype = getattr(torch, spec.dtype)
        return torch.frombuffer(data, dtype=dtype).reshape(spec.shape) if data else torch.empty(spec.shape, dtype=dtype)

    def _aten(self, template: Template, ins: list, values: list) -> Any:
        space, packet, overload = template.op.split(".")
        func = getattr(getattr(getattr(torch.ops, space), packet), overload)

        def fill(a: Any) -> Any:
            if isinstance(a, T):
                return ins[a.index]
            if isinstance(a, V):
                return values[a.index]
            if isinstance(a, Const):
                return CONSTANTS[a.kind](a.value)
            return [fill(x) for x in a] if isinstance(a, (list, tuple)) else a

        if packet == "view_as_real":
            ins = [t.resolve_conj() for t in ins]
        args, kwargs = fill(template.args), {k: fill(v) for k, v in template.kwargs}
        if any(a.name == "generator" for a in func._schema.arguments) and "generator" not in kwargs:
            seed = hash(tuple(values[-2:])) & 0xFFFFFFFF
            kwargs["generator"] = torch.Generator().manual_seed(seed)
        if template.op in ("aten.native_dropout.default", "aten.randperm.default"):
            _seed(values)
        return func(*args, **kwargs)

    def fetch(self, tensor: int, nbytes: int = 0) -> tuple[tuple, str, bytearray]:
        found = self.tensors[tensor].resolve_conj().resolve_neg()
        flat = found.reshape(-1).clone(memory_format=torch.contiguous_format)  # stride 1, also of one element
        data = flat.view(torch.uint8).numpy().tobytes() if found.numel() else b""
        return tuple(found.shape), str(found.dtype)[6:], bytearray(data)

    def synchronize(self) -> None:
        """Return at once: every op is complete when it is submitted."""

    def describe(self, ids: list[int]) -> list[Spec]:
        found = [self.tensors[i] for i in ids]
        return [Spec(tuple(t.shape), t.stride(), t.storage_offset(), str(t.dtype)[6:]) for t in found]

    def keep(self, tensor: int, array: Any) -> int:
        self.kept[tensor] = array.copy(order="C")
        return -1

    def crowded(self, nbytes: int) -> bool:
        return False

    def inspect(self, tensor: int) -> dict:
        return {"shape": list(self.tensors[tensor].shape)}

    def stats(self) -> dict:
        return {"client": {}, "dispatcher": {}, "workers": []}

    def close(self) -> None:
        self.tensors.clear()


CONSTANTS = {
    "dtype": lambda v: getattr(torch, v),
    "memory_format": lambda v: getattr(torch, v),
    "layout": lambda v: getattr(torch, v),
    "device": lambda v: torch.device("cpu"),
    "complex": lambda v: complex(*v),
}


def _flat(found: Any) -> list:
    return [x for f in found for x in _flat(f)] if isinstance(found, (list, tuple)) else [found]


def _seed(values: list) -> None:
    torch.default_generator.manual_seed(hash(tuple(values[-2:])) & 0xFFFFFFFF)


def _fill(template: Template, ins: list, values: list) -> list:
    def filled(a: Any) -> Any:
        if isinstance(a, (list, tuple)):
            return list(map(filled, a))
        return ins[a.index] if isinstance(a, T) else values[a.index] if isinstance(a, V) else a

    return list(map(filled, template.args))


def _flash(q: Any, mask: Any, p: float, causal: bool, gqa: bool) -> bool:
    return q.dim() == 4 and p == 0 and not gqa and (mask is None or not causal)


def _mask(mask: Any, dtype: torch.dtype) -> Any:
    return (
        torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
        if mask is not None and mask.dtype is torch.bool
        else mask
    )


def _sdpa(template: Template, ins: list, values: list) -> tuple:
    q, k, v, mask, p, causal, scale, gqa = _fill(template, ins, values)
    if _flash(q, mask, p, causal, gqa):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q, k, v, p, causal, attn_mask=_mask(mask, q.dtype), scale=scale)[:2]
    _seed(values)
    math = torch.ops.aten._scaled_dot_product_attention_math
    out = math(q, k, v, _mask(mask, q.dtype), p, causal, scale=scale, enable_gqa=gqa)[0]
    return out, torch.zeros(out.shape[:-1])


def _sdpa_backward(template: Template, ins: list, values: list) -> tuple:
    grad, q, k, v, mask, out, logsumexp, p, causal, scale, gqa = _fill(template, ins, values)
    if _flash(q, mask, p, causal, gqa):
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        return flash(grad, q, k, v, out, logsumexp, p, causal, attn_mask=_mask(mask, q.dtype), scale=scale)
    _seed(values)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        math = torch.ops.aten._scaled_dot_product_attention_math
        result = math(*leaves, _mask(mask, q.dtype), p, causal, scale=scale, enable_gqa=gqa)[0]
        return torch.autograd.grad(result, leaves, grad)


def _sdpa_biased(template: Template, ins: list, values: list) -> tuple:
    q, k, v, mask, p, causal, scale, gqa = _fill(template, ins, values)
    _seed(values)
    out = torch.ops.aten._scaled_dot_product_attention_math(q, k, v, mask, p, causal, scale=scale, enable_gqa=gqa)[0]
    return out, torch.zeros(out.shape[:-1])


def _sdpa_biased_backward(template: Template, ins: list, values: list) -> tuple:
    grad, q, k, v, mask, _, _, p, causal, scale, gqa = _fill(template, ins, values)
    _seed(values)
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (q, k, v, mask)]
        result = torch.ops.aten._scaled_dot_product_attention_math(*leaves, p, causal, scale=scale, enable_gqa=gqa)[0]
        return torch.autograd.grad(result, leaves, grad)


GT = {
    "gt.sdpa.default": _sdpa,
    "gt.sdpa_backward.default": _sdpa_backward,
    "gt.sdpa_biased.default": _sdpa_biased,
    "gt.sdpa_biased_backward.default": _sdpa_biased_backward,
    **{name: lambda template, ins, values, run=run: run(*_fill(template, ins, values)) for name, run in recurrent.OPS.items()},
    "gt.move.default": lambda template, ins, values: ins[0].clone(),
    "gt.lend.default": lambda template, ins, values: ins[0],
}


@pytest.fixture
def inline() -> Iterator[InlineSession]:
    """This process records into a session that executes at once; every tensor is freed by the end."""
    session = InlineSession()
    current_session.connect(session)
    yield session
    current_session.disconnect()

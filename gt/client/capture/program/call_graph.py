"""The graph of one call of a captured function: what autograd saves in it, where it ends, and whether it can be cut there."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from gt.client.capture.program.recomputation import RecomputationPlan, SavedValues
from gt.client.capture.recording import CallRecording
from gt.client.device.remote_tensor import RemoteTensor, memory_id
from gt.client.trace.custom_ops import lend, may_lend
from gt.client.values.fingerprints import is_named, is_scalar_like


@dataclass(eq=False)
class Cut:
    """Facts of a forward pass that hold for each replay of its program.

    places: leaves of the result that have a graph. arguments: leaves of the arguments that autograd has saved. reads: tensors
    from before the call that it has saved. writes: whether the call may change tensors from before it. stale: whether it has
    changed a tensor after autograd had saved it. outputs: those of `places` that it has saved, by their order. shares: whether
    results share memory with saved tensors on workers.
    """

    places: list[int]
    parameters: list[torch.Tensor]
    reads: list[torch.Tensor]
    writes: bool
    stale: bool
    arguments: list[int]
    outputs: list[int]
    shares: bool


@dataclass(eq=False)
class Graph:
    """The graph of one call whose Python ran: its results, and the leaves that stand for arguments."""

    results: list[torch.Tensor]
    inputs: list[torch.Tensor]
    saves: Pack | None = None


class AliasOf(torch.autograd.Function):
    """Another tensor of the same memory, which autograd takes for no view."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient


class Pack:
    """Hooks for what autograd saves in one call. tensors: those that the call has made; reads: those from before it.

    plan: how those are made again that are not kept; None while all are.
    """

    def __init__(self, first: int, given: set[int]) -> None:
        self._first, self._given = first, given
        self.places: dict[int, int] = {}  # by id
        self.tensors: list[RemoteTensor] = []
        self.reads: list[torch.Tensor] = []
        self.source: Sequence[torch.Tensor] | SavedValues = self.tensors  # where a backward pass finds them
        self.plan: RecomputationPlan | None = None
        self._uses: Counter[int] = Counter()  # how often a place is saved
        self.memories: set[int] = set()  # of these tensors
        self._versions: list[tuple[torch.Tensor, int]] = []
        self.arguments: set[int] = set()  # memory of arguments that are saved
        self.shared: list[int] = []  # places among what is kept of tensors that share memory with results

    def __call__(self, tensor: torch.Tensor) -> Any:
        if not isinstance(tensor, RemoteTensor) or isinstance(tensor, torch.nn.Parameter):
            return self._before(tensor)
        number, memory = tensor._ref.id, memory_id(tensor)
        if number in self.places:
            self._uses[self.places[number]] += 1
            return self.places[number]
        if memory in self._given:
            self.arguments.add(memory)
            saved = tensor.detach().clone()  # the next call's arguments come to the same memory
        elif number < self._first:
            return self._before(tensor)
        else:
            saved = tensor.detach()
        self.places[number] = len(self.tensors)
        self._uses[len(self.tensors)] = 1
        self.memories.add(memory_id(saved))
        self._versions.append((saved, saved._version))
        self.tensors.append(saved)
        return self.places[number]

    def _before(self, tensor: torch.Tensor) -> torch.Tensor:
        self.reads.append(tensor)
        self._versions.append((tensor, tensor._version))
        return tensor

    def part_from(self, results: list[RemoteTensor], fixed: Set[int]) -> None:
        """Have other tensors for what is kept in the memory of results, which a caller may change in place.

        They share the memory of large ones on workers. fixed: ids of saved tensors that may not.
        """
        theirs = set(map(memory_id, results))
        for place, tensor in enumerate(self.tensors):
            if memory_id(tensor) in theirs:
                number = tensor._ref.id
                if may_lend(tensor._ref.meta) and number == memory_id(tensor) and number not in fixed:
                    self.tensors[place] = lend(tensor)
                    self.shared.append(place)
                else:
                    self.tensors[place] = tensor.clone()

    def numbers(self) -> set[int]:
        """Ids of the tensors that are kept."""
        return {tensor._ref.id for tensor in self.tensors}

    def copy_shared(self) -> None:
        """Have copies of the tensors that share memory with results: these go to the caller as they are."""
        for place in self.shared:
            self.tensors[place] = self.tensors[place].clone()

    def keep(self, plan: RecomputationPlan | None, results: Sequence[torch.Tensor]) -> None:
        """Keep what a plan says, and no more. results: of the call, those with a graph."""
        if plan is not None:
            self.plan, self.tensors = plan, plan.tensors_to_keep(self.tensors, results)
            self.memories = {memory_id(tensor) for tensor in self.tensors}
            self._versions.clear()  # asked before
        self.begin(self.tensors)

    def begin(self, tensors: list) -> None:
        """A backward pass begins that finds these tensors, or the call's own, for those that are kept."""
        self.source = tensors if self.plan is None else SavedValues(self.plan, tensors, self.reads, self._uses)

    def stale(self) -> bool:
        """True if a tensor has been changed since autograd saved it, which torch finds out only without such hooks."""
        return any(tensor._version != version for tensor, version in self._versions)

    def unpack(self, packed: Any) -> torch.Tensor:
        return self.source[packed] if isinstance(packed, int) else packed


def once(tensor: torch.Tensor, expanded: torch.Tensor) -> torch.Tensor:
    """A view with each element of an expanded tensor once, of that one or of a copy."""
    for dim, stride in enumerate(expanded.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def differentiable(graph: Graph, gradients: tuple) -> tuple[list, list]:
    """The results that have a gradient, and these."""
    pairs = [pair for pair in zip(graph.results, gradients, strict=True) if pair[1] is not None]
    return [result for result, _ in pairs], [gradient for _, gradient in pairs]


def join(inputs: list[torch.Tensor], arguments: list[torch.Tensor], name: str) -> None:
    """Pass the gradients of a graph's inputs on to the caller's arguments, for which these stand, as its end is not known."""
    for leaf, argument in zip(inputs, arguments, strict=True):
        if argument.grad_fn is not None:
            raise RuntimeError(
                f"this call of {name} changes a list or dictionary that it gets, as no earlier one did, and the graph of an "
                "argument goes on: return what it adds, or call it again, as the next calls keep their graph"
            )
        leaf.register_post_accumulate_grad_hook(functools.partial(_pass_on, argument))


def _pass_on(argument: torch.Tensor, leaf: torch.Tensor) -> None:
    assert leaf.grad is not None
    argument.backward(leaf.grad)
    leaf.grad = None


def add_gradients(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give each parameter its earlier gradient, with the new one added in place, as autograd does without create_graph."""
    with torch.no_grad():
        for parameter, gradient in pairs:
            new = parameter.grad
            parameter.grad = None
            if new is None:
                parameter.grad = gradient
            elif gradient.is_sparse or new.is_sparse:
                parameter.grad = gradient + new
            else:
                parameter.grad = gradient.add_(new)


def sequence_number() -> int:
    """The number of the next autograd node of this thread."""
    with torch.enable_grad():
        node = torch.zeros((), device="cpu", requires_grad=True).view(()).grad_fn
    assert node is not None
    return node._sequence_nr()


def find_parameters(graph: Graph, since: int, given: list) -> tuple[list[torch.Tensor], str]:
    """The leaves that the graph leads to, but those given; and the reason why it cannot be cut at these, or "".

    since: number of the first node of the call.
    """
    ends, nodes, found, why = set(map(id, given)), {t.grad_fn for t in given} - {None}, dict[int, torch.Tensor](), ""
    queue, seen = [result.grad_fn for result in graph.results], set()
    while queue:
        node: Any = queue.pop()
        if node is None or node in seen or node in nodes:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and not node.next_functions:
            if not isinstance(leaf, RemoteTensor):
                why = "it uses a parameter that is not on remote"
            elif leaf._backward_hooks or _hooks_of_user(leaf):
                why = "a parameter has a hook, which gets the sum of its gradients"
            if id(leaf) not in ends:
                found[id(leaf)] = leaf
        elif node._sequence_nr() < since:
            why = "it uses a tensor from before the call that has a graph of its own: pass it as an argument"
        queue += [following for following, _ in node.next_functions]
    return [*found.values()], why


def leads_to(graph: Graph, cut: Cut, since: int) -> bool:
    """True if a graph has the leaves of a cut. In a call that runs again, another parameter may be in the place of one."""
    return set(map(id, find_parameters(graph, since, graph.inputs)[0])) == set(map(id, cut.parameters))


def _hooks_of_user(leaf: torch.Tensor) -> bool:
    """True if a leaf has post-accumulate hooks besides GT's own."""
    hooks = leaf._post_accumulate_grad_hooks
    return bool(hooks) and any(not str(hook.__module__).startswith("gt.") for hook in hooks.values())


def strange_result(results: list, given: list) -> str:
    """The reason why results cannot be results of one node, or "". given: arguments that require grad."""
    memories = {memory_id(tensor): tensor for tensor in given}
    for leaf in results:
        if not isinstance(leaf, torch.Tensor):
            if not is_scalar_like(leaf) and not is_named(leaf):
                return f"it returns an object of {type(leaf).__name__}, in which its graph may go on"
        elif isinstance(leaf, RemoteTensor) and leaf.grad_fn is not None:
            other = memories.setdefault(memory_id(leaf), leaf)
            if other is not leaf:
                return "a result shares memory with another one, or with an argument that requires grad: return a clone()"
    return ""


def nodes_of(roots: Sequence[torch.Tensor]) -> Iterator[Any]:
    """The nodes of a graph."""
    queue, seen = [root.grad_fn for root in roots], set()
    while queue:
        node: Any = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            queue += [following for following, _ in node.next_functions]


def held_by_functions(graph: Graph) -> list[RemoteTensor]:
    """Tensors that the user's autograd functions have kept, whose backward() may change them in place."""
    found: list = []
    for node in nodes_of(graph.results):
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            found += tree_leaves([*vars(node).values()])
            with suppress(RuntimeError):  # a backward pass of the call itself has been here
                found += node.saved_tensors
    return [tensor for tensor in found if isinstance(tensor, RemoteTensor)]


def may_write(tape: Any, first: int) -> bool:
    """True if a call may have changed tensors from before it. Only a recording can tell."""
    if not isinstance(tape, CallRecording):
        return True
    tape.recorder.flush()
    own: set[int] = set()
    for op in tape.ops:
        if not op.template.outs:  # as of lists: it may change any operand
            return True
        results = iter(op.outs)
        for out in op.template.outs:
            if out.kind == "none" or (out.kind == "same" and op.ins[out.of] not in own):
                return True
            if out.kind == "new" or (out.kind == "view" and op.ins[out.of] in own):
                own.add(next(results))
            elif out.kind == "view":
                next(results)
    return False

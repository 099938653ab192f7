"""Functions whose results keep their graph, as `gt.compile(model)`: the backward pass becomes a program of its own.

The forward program leaves what autograd saves as state in fixed memory, and the backward program reads it there. Each is an
ordinary compiled function. In the caller's graph one node stands for the whole function. torch.compile's AOTAutograd cuts a
step at the same places; here each half is recorded where it runs.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from gt.client import current_session
from gt.client.capture.aliasing import Containers, containers_of, copy_attributes, flatten_call, one_of, same_on_remote
from gt.client.capture.boundary import detached, modes, observer, prepare_inputs
from gt.client.capture.program.call_graph import (
    AliasOf,
    Cut,
    Graph,
    Pack,
    add_gradients,
    differentiable,
    find_parameters,
    held_by_functions,
    join,
    leads_to,
    may_write,
    sequence_number,
    strange_result,
)
from gt.client.capture.program.captured_program import CapturedProgram
from gt.client.capture.program.made_objects import closed, makes_objects, opened
from gt.client.capture.program.pending_calls import Call, Given, Saved, versions_of
from gt.client.capture.program.recomputation import Chooser, RecomputationPlan
from gt.client.capture.program.settings import Part
from gt.client.capture.recording import CallRecording
from gt.client.capture.watches.node_hooks import hooks_of_nodes
from gt.client.capture.watches.saving_hooks import SavingHooks
from gt.client.device import random
from gt.client.device.remote_tensor import RemoteTensor, is_leaf, memory_id
from gt.client.values.fingerprints import is_scalar_like

MAX_IDLE_CALLS = 3  # calls that nobody differentiates; the forward program then serves without a backward one
GRAPHS_AFTER_MISS_CALLS = 4  # calls that run their Python after a backward pass that no program had
_INSTEAD = "; capture the whole step, backward() included, or call the function without gt.compile"
OWN_GRAPH = "the graph of its results leads to a CPU tensor, or passes hooks that are active"
CHANGES = "it changes a list or dictionary that it gets, in which its graph may go on"
TRANSFORMS = "it uses torch.func's transforms, whose saved tensors no program has"
PARTED = "results have a backward pass each, without retain_graph=True: add them, or pass it"
DRAWS = "its backward pass draws random numbers of its own"
SECOND_DERIVATIVES = "second derivatives of its results are asked for, by create_graph=True"
CHANGED = "has been changed in place between a call of {} and its backward pass: do that after backward()"
STALE = "one of the variables needed for gradient computation has been modified by an inplace operation in {}"
NO_GRAPH = (
    "no program has this backward pass of {}, and its forward pass cannot be computed again, since {}. Call it again: the next "
    "calls keep their graph" + _INSTEAD
)


class _Boundary(torch.autograd.Function):
    """The function in the caller's graph. Its inputs are parameters, then arguments that require grad."""

    @staticmethod
    def forward(ctx: Any, owner: TwoPrograms, call: Call, *inputs: torch.Tensor) -> tuple:
        ctx.owner, ctx.call = owner, call
        ctx.set_materialize_grads(False)
        results, call.results = call.results, ()
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple:  # type: ignore[override]
        return None, None, *ctx.owner.differentiate(ctx.call, gradients)


def weakly(method: Callable) -> Callable:
    """A function that calls a method, and keeps its object only while that runs."""
    found = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        bound = found()
        assert bound is not None
        return bound(*args, **kwargs)

    return call


class TwoPrograms:
    """The forward and the backward pass of one function, of which the arguments at `places` require grad.

    own: those of `places` whose arguments are leaves. repeats: place of an argument -> one of `places` with that very tensor.
    make: makes a compiled function of a function and its Part.
    """

    def __init__(
        self, fn: Callable, places: tuple[int, ...], own: frozenset[int], repeats: dict[int, int], make: Callable[..., Any]
    ) -> None:
        self._own = own
        self.fn, self.places, self._repeats, self._make = fn, places, repeats, make
        self.refused = ""  # the reason why results keep torch's graph
        self.runs = False  # whether the function itself runs
        self._unseen = bool(places)
        self._opens = False  # whether objects are among the results
        self._copies = False  # whether no result shares memory with what is saved, since a caller has written to one
        self._open: weakref.WeakSet[Call] = weakref.WeakSet()  # calls with such results
        self._lock = threading.RLock()
        self._name = getattr(fn, "__qualname__", type(fn).__name__)
        self._next = self._new([])  # for the program of the next recording
        self._lacking_one: Saved | None = None  # of the program whose forward pass runs for its graph
        me = weakref.ref(self)
        roots = lambda: {"": fn, "saved": me()._next.tensors}  # type: ignore[union-attr]  # noqa: E731
        self.forward = make(weakly(self._forward), Part(f"forward pass of {self._name}", roots, True))
        self._programs: weakref.WeakKeyDictionary[CapturedProgram, tuple[Saved, Cut | None]] = weakref.WeakKeyDictionary()
        # Of a call whose Python ran: its graph, and its results as the function gave them
        self._ran: tuple[Graph, Cut | None, list] | None = None
        self._last: tuple[weakref.ref[Call], Saved] | None = None
        self._differentiated: Call | None = None  # while its backward pass runs
        self._keeps = False  # whether that pass keeps the graph

    def _new(self, tensors: list) -> Saved:
        saved = Saved(None, tensors)
        fn, tensors, me = self.fn, saved.tensors, weakref.ref(self)
        draws = lambda: me()._differentiated.given.random  # type: ignore[union-attr]  # noqa: E731
        part = Part(f"backward pass of {self._name}", lambda: {"": fn, "saved": tensors}, False, draws)
        saved.backward = self._make(weakly(self._backward_of_program), part)
        return saved

    def parts(self) -> Iterator[Any]:
        """The compiled functions, for explain()."""
        yield self.forward
        yield from [saved.backward for saved, _ in self._programs.values()] or [self._next.backward]

    def lines(self) -> Iterator[str]:
        """Lines for explain() besides those of its parts."""
        for saved, _ in self._programs.values():
            if saved.plan is not None:
                yield f"  {saved.plan.text()}"

    # ---- a call

    def __call__(self, args: tuple, kwargs: dict, leaves: list) -> Any:
        """The results. Those that require grad have a graph of one node."""
        with self._lock:
            if self._unseen:
                self._unseen = False
                return self._look(args, kwargs, leaves)
            return self._call(args, kwargs, leaves)

    def _look(self, args: tuple, kwargs: dict, leaves: list) -> Any:
        """A first call, with torch's graph: whether it can be cut at arguments shows before any is."""
        since, versions = sequence_number(), [leaves[place]._version for place in self.places]
        results = self._plainly(args, kwargs)[0]
        given, flat = [leaves[place] for place in self.places], tree_leaves(results)
        graph = Graph([leaf for leaf in flat if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None], [])
        self.refused = find_parameters(graph, since, given)[1] or strange_result(flat, given)
        if versions != [tensor._version for tensor in given]:
            self.refused = "it changes an argument that requires grad in place"
        after = flatten_call(args, kwargs)[0]
        if len(after) != len(leaves) or not all(map(operator.is_, after, leaves)):
            self.refused = CHANGES
        return closed(results)

    def _plainly(self, args: tuple, kwargs: dict) -> tuple[Any, list]:
        """The results of the function, called with its arguments on remote; and their leaves, with lists that it gets whole."""
        leaves, tree = flatten_call(args, kwargs)
        given = prepare_inputs(leaves, None)[0] if any(map(_on_host, leaves)) else leaves
        results = opened(self._apart(self.fn, args, kwargs, (leaves, given, None if given is leaves else tree)), leaves)
        return results, tree_leaves(results, is_leaf=one_of(containers_of(args, kwargs)))

    def _put(self, leaves: list, tensors: list) -> None:
        """Put a tensor at each place of the arguments, and where the same argument is given again."""
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        for place, earlier in self._repeats.items():
            leaves[place] = leaves[earlier]

    @staticmethod
    def _detached(leaf: torch.Tensor) -> torch.Tensor:
        plain = leaf.detach()
        copy_attributes(plain, leaf)
        return plain

    def _stand_ins(self, leaves: list) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Leaves at which the graph of a call ends, and what the function gets, which looks as the caller's arguments do."""
        inputs = [leaves[place].detach().requires_grad_() for place in self.places]
        # A function may change an argument in place if the caller's is no leaf
        given = [leaf if place in self._own else AliasOf.apply(leaf) for place, leaf in zip(self.places, inputs, strict=True)]
        for place, tensor in zip(self.places, given, strict=True):
            copy_attributes(tensor, leaves[place])
        return inputs, given

    def _call(self, args: tuple, kwargs: dict, leaves: list) -> Any:
        self._count_idle()
        random_state = random.initial_seed(), random._State.counter
        given, tree = flatten_call(args, kwargs) if self.places else (leaves, None)
        if self.places:
            self._put(given, [self._detached(leaves[place]) for place in self.places])
        self._ran = None
        for program in [program for program in self.forward.programs() if program not in self._programs]:
            self.forward.forget(program)  # an exception came between its recording and here, as by Ctrl-C
        saved = self._lacking(given)
        if saved is not None and any(map(_on_host, given)):
            given, tree = prepare_inputs(given, None)[0], flatten_call(args, kwargs)[1]
        self._lacking_one = saved
        self._let_lend()
        if saved is None:
            self._next.let_go()
        results = self._apart(self.forward if saved is None else self._forward, args, kwargs, (leaves, given, tree))
        self._lacking_one = None
        own = {id(given[place]): leaves[place] for place in self.places}  # a returned argument is the caller's
        flat, tree = tree_flatten(results, is_leaf=one_of(containers_of(args, kwargs)))
        flat = [own.get(id(leaf), leaf) for leaf in flat] if own else flat
        if self._ran is None:
            graph, (saved, cut) = None, self._programs[self.forward.newest]
            tensors = [*saved.tensors]
        else:
            graph, cut, original = self._ran
            self._ran = None
            if cut is not None and cut.shares and (self.forward.newest is None or self.forward.newest in self._programs):
                graph.saves.copy_shared()  # type: ignore[union-attr]
            self.refused = self.refused or self.forward.halves.refused
            tensors, saved = graph.saves.tensors, saved or self._bound(cut)  # type: ignore[union-attr]
            if self.refused == CHANGES:
                join(graph.inputs, [leaves[place] for place in self.places], self._name)
            if self.refused and (not self.places or self.refused == CHANGES):
                return self._whole(_but_callers(original, flat, leaves), tree)
        if cut is None:  # nothing requires grad
            return self._whole(flat, tree)
        seen = [leaf for leaf in map(leaves.__getitem__, cut.arguments) if isinstance(leaf, RemoteTensor)]
        versions = [(tensor, tensor._version) for tensor in (*cut.reads, *seen) if not tensor.is_inference()]
        facts = Given(*flatten_call(args, kwargs), random_state, modes(), versions_of(leaves))
        if graph is None:
            facts.keep(self.forward.newest)
        call = Call(saved, cut, tensors, graph, facts, versions)
        self._last = weakref.ref(call), saved
        call.results = tuple([flat[place] for place in cut.places])
        call.values = [result.detach() for result in call.results] if graph is None else []
        attached = _Boundary.apply(self, call, *_inputs(cut.parameters), *[leaves[place] for place in self.places])
        for place, result in zip(cut.places, attached, strict=True):
            flat[place] = result
        if cut.shares and graph is None:
            self._follow(call)
        call.outputs = [(weakref.ref(attached[k]), attached[k]._version) for k in cut.outputs]
        return self._whole(flat, tree)

    def _whole(self, flat: list, tree: Any) -> Any:
        results = tree_unflatten(flat, tree)
        return closed(results) if self._opens else results

    def _let_lend(self) -> None:
        """Say which programs may give out results in the memory of saved tensors, without a copy.

        The backward pass of an earlier call copies its own tensors there. And that of a call whose caller has written to a
        result computes the forward pass again.
        """
        alone = all(call.over for call in self._open)
        for program in self.forward.programs():
            cut = self._programs[program][1] if program in self._programs else None
            again = program.host_draws is None and not program.guard.counts
            program.lends = cut is None or not cut.shares or (alone and again)

    def _follow(self, call: Call) -> None:
        """Note what a replay has lent to the caller."""
        program = self.forward.newest
        lent = [value._ref.id for value in call.values] if program is not None and program.lends else []
        call.lent = call.saved.lent = current_session.current().follow_lent(lent) if lent else None
        self._open.add(call)

    @staticmethod
    def _apart(fn: Callable, args: tuple, kwargs: dict, other: tuple[list, list, Any]) -> Any:
        """The results of a function that gets other leaves of its arguments. Lists of these stay the caller's.

        other: the leaves, those that it gets, and their structure, None if they are the same.
        """
        leaves, given, tree = other
        if tree is None:
            return fn(*args, **kwargs)
        containers = Containers((args, kwargs), tree, leaves, given)
        try:
            return containers.originals(fn(*containers.args, **containers.kwargs))
        finally:
            containers.give_back()

    def _count_idle(self) -> None:
        """The last call has ended without a backward pass if nobody holds its graph any more."""
        if self._last is not None and self._last[0]() is None:
            self._last[1].idle += 1
            self._last = None

    def _lacking(self, given: list) -> Saved | None:
        """Tensors of a program that could serve this call, if a backward pass has to be recorded first."""
        for program in self.forward.programs():
            saved, cut = self._programs[program]
            if cut is None or not self._lacks(saved):
                continue
            with program.host_draws.undone() if program.host_draws is not None else nullcontext():
                serves = self.forward.serves(program, given)
            if serves:
                saved.graphs = max(0, saved.graphs - 1)
                return saved
        return None

    def _lacks(self, saved: Saved) -> bool:
        """True if a call has to keep its graph, since a backward pass may come that no program has."""
        return saved.graphs > 0 or (saved.idle < MAX_IDLE_CALLS and not saved.differentiable())

    def _bound(self, cut: Cut | None) -> Saved:
        """Tensors that the recorded call has left. A program that the call has become keeps them."""
        saved, program = self._next, self.forward.newest
        if program is not None and program not in self._programs:
            saved.program = weakref.ref(program)
            if saved.backward.newest is not None:  # which reads what an earlier recording has saved
                saved.backward = self._new(saved.tensors).backward
            self._programs[program] = saved, cut
            # Each place has a tensor, so that the next recording adds none. The program's would be copied for their holder
            stands = [torch.empty(0, device=tensor.device) for tensor in saved.tensors[:1]]
            self._next = self._new(stands * len(saved.tensors))
        return saved

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; return its results without their graph. Autograd saves tensors in `_next`."""
        recorder = current_session.current()
        recorder.flush()
        first, tape, since = recorder.new_id(), recorder.tape, sequence_number()
        leaves, tree = flatten_call(args, kwargs)
        prepared, (inputs, stand_ins) = [*leaves], self._stand_ins(leaves)
        self._put(leaves, stand_ins)
        pack = Pack(first, {memory_id(leaf) for leaf in leaves if isinstance(leaf, RemoteTensor)})
        whole = containers_of(args, kwargs)
        self.runs = True
        try:
            with SavingHooks(pack, pack.unpack) as hooks, torch.enable_grad():
                results = self._apart(self.fn, args, kwargs, (prepared, leaves, tree if inputs else None))
        finally:
            self.runs = False
        if tape is None or isinstance(tape, CallRecording):  # a look for who has an object takes as long as a call in parts
            self._opens |= makes_objects(results := opened(results, leaves))
        flat, tree = tree_flatten(results, is_leaf=one_of(whole))
        originals = {id(leaf): prepared[place] for place, leaf in zip(self.places, stand_ins, strict=True)}
        flat = [originals.get(id(leaf), leaf) for leaf in flat]  # an argument that is returned is the caller's
        results = tree_unflatten(flat, tree) if originals else results
        places = [k for k, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        graph = Graph([flat[place] for place in places], inputs, pack)
        stale = pack.stale()
        outputs = [k for k, result in enumerate(graph.results) if memory_id(result) in pack.memories]
        held = held_by_functions(graph)  # before a plan, by which a look at them computes them again
        pack.keep(self._plan(tape, pack, graph, held), graph.results)
        writes = may_write(tape, first)
        fixed = pack.numbers() if writes or self._copies else {tensor._ref.id for tensor in held}
        pack.part_from([leaf for leaf in flat if isinstance(leaf, RemoteTensor)], fixed)
        self._next.tensors[:] = pack.tensors
        parameters, why = find_parameters(graph, since, inputs)
        after = flatten_call(args, kwargs)[0]
        if len(after) != len(leaves) or not all(map(operator.is_, after, prepared)):
            why = CHANGES
        elif hooks.transforms:
            why = TRANSFORMS
        self.refused = self.refused or why or strange_result([leaf for leaf in flat if id(leaf) not in whole], inputs)
        saved = [k for k, leaf in enumerate(leaves) if isinstance(leaf, RemoteTensor) and memory_id(leaf) in pack.arguments]
        shares = bool(pack.shared)
        cut = Cut(places, parameters, pack.reads, writes, stale, saved, outputs, shares) if places else None
        self._ran = graph, cut, flat
        return detached(results, whole=dict.fromkeys(whole))

    def _plan(self, tape: Any, pack: Pack, graph: Graph, held: list[RemoteTensor]) -> RecomputationPlan | None:
        """The program's plan, or that which is chosen by the ops of the recorded call. held: by functions of the user."""
        mode = self.forward.settings.recompute_mode
        if self._lacking_one is not None:
            return self._lacking_one.plan
        self._next.plan = None
        if mode and isinstance(tape, CallRecording):
            tape.recorder.flush()
            self._next.plan = Chooser(tape.ops, pack.tensors, pack.reads, graph.results, held, mode > 1).choose()
        return self._next.plan

    # ---- its backward pass

    def differentiate(self, call: Call, gradients: tuple) -> list:
        """Gradients of the inputs of `_Boundary`. Those of parameters are accumulated here, and None stands for them.

        gradients: of the results that have a graph, None for one that does not matter. Raises RuntimeError where torch does.
        """
        if call.over:
            raise RuntimeError(
                f"backward through a call of {self._name} a second time: pass retain_graph=True to the first backward()"
            )
        if call.cut.stale:
            raise RuntimeError(STALE.format(self._name))
        if what := call.changed():
            raise RuntimeError(f"{what} {CHANGED.format(self._name)}")
        with self._lock:
            return self._differentiate(call, gradients)

    def _differentiate(self, call: Call, gradients: tuple) -> list:
        call.saved.idle, self._last = 0, None
        if call.parted:
            self.refused = PARTED
        if call.result_written():
            self._copy_from_now(call)
        if call.graph is not None and (saves := call.graph.saves) is not None:
            saves.begin(saves.tensors)
        self._differentiated, self._keeps = call, torch._C._autograd._get_current_graph_task_keep_graph()
        try:
            if torch.is_grad_enabled() or not torch.autograd._is_checkpoint_valid():
                return self._asked(call, gradients)
            return [*[None] * len(_inputs(call.cut.parameters)), *self._accumulate(call, gradients)]
        finally:
            self._differentiated = None
            if not self._keeps:
                call.tensors = []
                # Another result may have a backward pass of its own. Torch's graph knows which parts of it are over
                again = call.graph is not None or not call.cut.writes
                call.parted = again and any(gradient is None for gradient in gradients)
                if not call.parted:
                    call.over, call.graph, call.values, call.given = True, None, [], None

    def _copy_from_now(self, call: Call) -> None:
        """A caller writes to results in the memory of saved tensors: the next recording leaves it copies."""
        self._copies = True
        program = call.saved.program() if call.saved.program is not None else None
        if program is not None and program in self.forward.programs():
            self.forward.forget(program)

    def _accumulate(self, call: Call, gradients: tuple) -> Any:
        """Add to the parameters' gradients, as the nodes do that accumulate them; return those of arguments."""
        parameters = call.cut.parameters
        held = [parameter.grad for parameter in parameters]
        # The program finds none, whatever the caller has: one program serves each step of an accumulation
        for parameter in parameters if any(gradient is not None for gradient in held) else ():
            parameter.grad = None
        try:
            # Without room in the program's memory autograd itself computes, from the call's tensors
            if call.parted or call.result_written() or call.saved.load(call.tensors):
                found = self._backward(*gradients)
            else:
                call.tensors = []  # a replay copies what somebody beside the program holds
                found = call.saved.backward(*gradients)
                call.tensors = [*call.saved.tensors] if self._keeps else []
        finally:
            add_gradients([(p, gradient) for p, gradient in zip(parameters, held, strict=True) if gradient is not None])
        return found

    def _backward_of_program(self, *gradients: torch.Tensor | None) -> tuple:
        """The backward pass of the call, which reads what it has saved by the names that a program has for it."""
        call = self._differentiated
        assert call is not None
        if call.graph is None or (saves := call.graph.saves) is None:
            return self._backward(*gradients)
        saves.begin(call.saved.tensors)
        try:
            return self._backward(*gradients)
        finally:
            saves.begin(saves.tensors)

    def _backward(self, *gradients: torch.Tensor | None) -> tuple:
        """Run autograd's own backward pass of the call; return the gradients of arguments."""
        call = self._differentiated
        assert call is not None
        graph = call.graph or self._again(call)
        roots, given = differentiable(graph, gradients)
        counter = random._State.counter
        torch.autograd.backward(roots, given, retain_graph=self._keeps)
        if random._State.counter != counter:
            self.refused = DRAWS
        found = tuple([leaf.grad for leaf in graph.inputs])
        for leaf in graph.inputs:
            leaf.grad = None
        return found

    def _asked(self, call: Call, gradients: tuple) -> list:
        """The gradients for torch.autograd.grad, or for backward(inputs=...): nothing is accumulated here.

        With create_graph=True they have a graph of their own, which leads to the caller's arguments.
        """
        again = torch.is_grad_enabled()
        if again:
            self.refused = SECOND_DERIVATIVES
        graph = self._again(call, True) if again else call.graph or self._again(call)
        roots, given = differentiable(graph, gradients)
        parameters = _inputs(call.cut.parameters)
        wanted = [*(parameters if parameters == call.cut.parameters else ()), *graph.inputs]
        found = torch.autograd.grad(roots, wanted, given, retain_graph=self._keeps, create_graph=again, allow_unused=True)
        return [*[None] * (len(parameters) + len(graph.inputs) - len(found)), *found]

    def _again(self, call: Call, caller: bool = False) -> Graph:
        """The graph of a replayed call, by its forward pass once more. RuntimeError if that would not be the same.

        caller: whether the graph leads to the caller's own arguments.
        """
        call.saved.graphs = GRAPHS_AFTER_MISS_CALLS
        if why := call.changed_since():
            raise RuntimeError(NO_GRAPH.format(self._name, why))
        given = call.given
        assert given is not None
        doubt = given.doubt()
        leaves, tree = [*given.leaves], given.tree
        inputs, given_leaves = ([leaves[place] for place in self.places],) * 2 if caller else self._stand_ins(leaves)
        self._put(leaves, given_leaves)
        args, kwargs = tree_unflatten(leaves, tree)
        state, now = random._State, (random._State.seed, random._State.counter)
        state.seed, state.counter = given.random
        since = sequence_number()
        try:
            with torch.enable_grad(), given.autocast():
                flat = self._plainly(args, kwargs)[1]
        finally:
            state.seed, state.counter = now
        graph = Graph([flat[place] for place in call.cut.places], inputs)
        if doubt and not (leads_to(graph, call.cut, since) and all(map(torch.equal, graph.results, call.values))):
            raise RuntimeError(NO_GRAPH.format(self._name, doubt))
        return graph


def _but_callers(original: list, results: list, leaves: list) -> list:
    """Leaves of a function's own results, but for the caller's arguments and their lists, which it had copies of."""
    callers = set(map(id, leaves))
    return [
        result if id(result) in callers or not (isinstance(own, torch.Tensor) or is_scalar_like(own)) else own
        for own, result in zip(original, results, strict=True)
    ]


def _on_host(leaf: Any) -> bool:
    """True for a CPU tensor."""
    return isinstance(leaf, torch.Tensor) and not isinstance(leaf, RemoteTensor)


def _inputs(parameters: list[torch.Tensor]) -> list[torch.Tensor]:
    """The parameters as inputs of `_Boundary`, so that torch.autograd.grad reaches them.

    One with hooks is none: autograd would call these for the node, and the backward pass does itself. In their place stands a
    leaf without meaning.
    """
    if hooks_of_nodes() or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in parameters):
        return [torch.zeros((), device="cpu", requires_grad=True)]
    return parameters or [torch.zeros((), device="cpu", requires_grad=True)]


def in_functorch() -> bool:
    """True within torch.func's transforms, whose tensors no program takes."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class Halves:
    """The pairs of programs of one compiled function, by the places of arguments that require grad.

    wanted: whether results have left a call with a graph that no backward pass had used. refused: the reason why there can be
    no pair, or "".
    """

    def __init__(self, fn: Callable, make: Callable[..., Any]) -> None:
        self._fn, self._make = fn, make
        self.wanted, self.refused = isinstance(fn, torch.nn.Module), ""
        self._by_places: dict[tuple, TwoPrograms] = {}  # by the places, and those where one is given again
        self._recorder: Any = None  # of the session of these

    def of_call(self, leaves: list) -> TwoPrograms | None:
        """The pair for a call with these leaves of its arguments; None if it has none."""
        if not self.wanted or self.refused or not torch.is_grad_enabled() or observer() or in_functorch():
            return None
        places = tuple([place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad])
        if not all(isinstance(leaves[place], RemoteTensor) for place in places):
            return None
        if self._recorder is not (recorder := current_session.current()):
            self._recorder = recorder
            self._by_places.clear()  # their tensors have ended with their session
        repeats = {place: earlier for place, earlier in same_on_remote(leaves).items() if place in places} if places else {}
        own = frozenset([place for place in places if is_leaf(leaves[place])])
        if (key := (places, own, *repeats.items())) not in self._by_places:
            apart = tuple([place for place in places if place not in repeats])
            self._by_places[key] = TwoPrograms(self._fn, apart, own, repeats, self._make)
        found = self._by_places[key]
        return None if found.refused or found.runs else found

    def obstacle(self) -> str:
        """The reason why a call whose results have a graph is in no pair, or ""."""
        if not self.wanted or not torch.is_grad_enabled():
            return ""
        return self.refused or next((pair.refused for pair in self._by_places.values() if pair.refused), OWN_GRAPH)

    def lines(self) -> list[str]:
        """Lines for explain()."""
        lines = [line for part in self._parts() for line in str(part.explain()).splitlines()]
        lines += [line for pair in self._by_places.values() for line in pair.lines()]
        # A first recording finds no list of what is saved: that is no reason that anybody could act on
        return [f"  {line}" for line in lines if "`saved`" not in line]

    def count(self) -> int:
        """Number of programs."""
        return sum(len(part.programs()) for part in self._parts())

    def _parts(self) -> Iterator[Any]:
        for pair in self._by_places.values():
            yield from pair.parts()

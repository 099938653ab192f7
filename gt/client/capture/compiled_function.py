"""`gt.compile`: records calls of a function until two agree, and replays them from then on as one message.

Python does not run in a replay. Everything that could change the outcome of a call is therefore a guard (state_walk.py).
A side effect outside of tensors, or a read of a value, prevents a program. Then Python runs at each call, and the ops between
two reads are programs (fragment_tape.py). Python cannot resume in the middle of a function, so this cuts a step at a read
without rewriting bytecode. Such ops need no guards, since they are matched; but each call issues all of them again.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import re
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from gt.client import current_session
from gt.client.capture import explain
from gt.client.capture.aliasing import (
    ContainerArgument,
    Containers,
    argument_view,
    call_memory,
    flatten_call,
    identities,
    in_arguments,
    one_of,
    sharing_arguments,
    write_back,
    written_inputs,
)
from gt.client.capture.boundary import (
    DETACHED,
    OUTSIDE,
    TORCH_GENERATOR,
    HostRngState,
    RecordedCall,
    changed_on_cpu,
    detached,
    gradients,
    hint,
    key_of,
    leaf_arguments,
    loop_carried,
    make_capturable,
    modes,
    names_of,
    optimizer_settings,
    prepare_inputs,
    recorded_results,
    returned_objects,
    schedules_rates,
    seems_to_read,
    side_effect,
    why_key_differs,
)
from gt.client.capture.captured_program import CapturedProgram, ProgramResult
from gt.client.capture.constants import argument_values
from gt.client.capture.fragment_tape import FragmentTape, end_fragments
from gt.client.capture.gradients import (
    VIEWED,
    DifferentiatedArguments,
    LeafGradients,
    find_memory,
    grad_arguments,
    leave_entries,
    take_made,
)
from gt.client.capture.guards import Guard
from gt.client.capture.host_draws import LEADS_ELSEWHERE, UPLOADED, HostDraws
from gt.client.capture.output_watch import OutputWatch
from gt.client.capture.recording import SAME, CallRecording, Difference, difference, reads_differ
from gt.client.capture.state_walk import StateSnapshot, snapshot
from gt.client.device import random
from gt.client.device.remote_tensor import RemoteTensor, make, memory_id
from gt.client.reports import progress, spans
from gt.client.reports.html import TextReport
from gt.client.trace.recorder import Recorder
from gt.client.trace.uploads import upload
from gt.client.values.learning_rates import LearningRates
from gt.client.values.uploaded_values import UploadedValues
from gt.ir.instr import BACKENDS, DISCARD, FREE, RECORD
from gt.ir.schedules import asked
from gt.wire.process_settings import cycles_collected

log = logging.getLogger("gt")
ARGUMENTS_DIFFER = "the function reads a value of its arguments, which differs from the call before"
REBOUND = "the function changes memory, shape, requires_grad, hooks or .grad of argument"
CHANGED = "the function changes a list, dictionary or object that it gets"
OTHER_ARGUMENTS = "no two calls in a row have had the same kind of arguments; the last differed in "
BESIDE = "a call of another thread was recorded or run in parts at that time: that is done to one call at a time"
_CHANGE = re.compile(r" from \S+ to \S+|; the last differed in .*")
_NUMBER = re.compile(r"-?\d[\d.e+-]*")

MAX_PROGRAMS_PER_FUNCTION = 8  # the least recently used one is dropped beyond that
MAX_FUTILE_CALLS = 4  # recorded calls in a row without a program; the function then runs eagerly for some calls
MAX_EAGER_CALLS = 64  # calls that run eagerly before the next recording; the number doubles up to this
MAX_REASONS = 20  # that explain() shows of one function
MAX_WARNINGS_PER_FUNCTION = 100
_numbers, _slots = itertools.count(1), itertools.count(1)


P = ParamSpec("P")
R = TypeVar("R")


@overload
def compile(
    fn: Callable[P, R], *, schedule: str | None = ..., backend: str | None = ..., recompute: bool | None = ...
) -> CompiledFunction[P, R]: ...
@overload
def compile(
    fn: None = None, *, schedule: str | None = ..., backend: str | None = ..., recompute: bool | None = ...
) -> Callable[[Callable[P, R]], CompiledFunction[P, R]]: ...
def compile(
    fn: Callable | None = None, *, schedule: str | None = None, backend: str | None = None, recompute: bool | None = None
) -> Any:
    """Return a function that computes the same as `fn`. A call costs one message once two recorded calls have agreed.

    CPU tensors among the arguments are uploaded at each call; remote tensors are read in place. Every other value that `fn`
    depends on is a guard: another value needs another program. Results are remote tensors, detached from autograd: call
    backward() in `fn`. `.explain()` of the result tells which programs exist, and why calls had none.

    fn: the function to capture, of any arguments.
    schedule: name of a pipeline schedule, such as "1f1b", or "1f1b:2GiB" with a limit of memory; None for the config's.
    backend: the way in which workers execute a program.
        "eager": op by op, with the bits of the same calls without gt.compile. The default, unless a group has `compile: true`.
        "inductor": each distinct run of ops between two communications is compiled once, after the first replay.
        "cudagraphs": as "inductor", and a GPU replays them as CUDA graphs.
        A part that a backend cannot execute falls back to the backend before it in this list; `.explain()` says why.
    recompute: whether the backward pass computes cheap values (activations, norms, casts) again, where that lowers the peak
        of memory. None: "cudagraphs" recomputes those that save much memory for their time, other backends none.

    A function that reads values, prints or logs runs its Python at each call; runs of ops between two reads are programs then.

    Raises TypeError if fn is not callable, ValueError for an unknown schedule or backend.
    """
    if fn is None:
        return functools.partial(compile, schedule=schedule, backend=backend, recompute=recompute)
    if not callable(fn):
        raise TypeError(f"gt.compile takes a function, got {type(fn).__name__}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known: want one of {', '.join(BACKENDS)}")
    if schedule is not None:
        asked(schedule)  # raises a ValueError for an unknown one
    return CompiledFunction(fn, schedule or "", backend or "", recompute)


class CompiledFunction(Generic[P, R]):
    """The result of gt.compile: a callable that owns the captured programs of one function."""

    def __init__(self, fn: Callable[P, R], schedule: str = "", backend: str = "", recompute: bool | None = None) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.schedule, self.backend, self.recompute = fn, schedule, backend, recompute
        self._programs: list[CapturedProgram] = []  # most recently used first
        self._last: RecordedCall | None = None
        self._slot = next(_slots)
        self._reasons: list[str] = []  # why calls were not replayed, newest last
        self._warned: set[str] = set()
        self._futile_calls, self._eager_calls = 0, 0  # recorded in a row without a program; left that are not recorded
        self._next_eager_calls = MAX_FUTILE_CALLS
        self._why = "the first call"
        self._strict = False  # True if libraries are told that values cannot be read
        UploadedValues.wanted = True
        self._sealed, self._recorded = 0, False  # programs made so far; whether a call has been recorded
        self._draws_on_host = False  # True once a call has drawn random numbers on the CPU
        self._drawn: HostDraws | None = None  # the last call's draws, if it uploads them
        self._cpu_state: list[torch.Tensor] = []  # small CPU tensors that calls have changed in place
        self._fragment_calls = 0
        self._differentiated, self._rates = DifferentiatedArguments(), LearningRates()
        self._returns_state = False  # True once a call has returned a list or dictionary that Python state holds
        self._cuts: Counter[tuple[str, str]] = Counter()  # (where a run of ops ended, why) -> how often, in these calls

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if self._rates.active:
                self._rates.place()
            return self._call(args, kwargs)
        finally:
            self._rates.remove()

    def _call(self, args: tuple, kwargs: dict) -> Any:
        recorder = current_session.current()
        leaves, tree = flatten_call(args, kwargs)
        if recorder.tape is not None:
            return self._run_within(recorder, leaves, tree, (args, kwargs))
        key = (tree, *map(key_of, leaves), *modes())
        mismatch = viewed = ""
        with recorder.turns:
            # Another thread may have begun a tape before this one had its turn: no replay within a recording
            for place, program in enumerate(self._programs if recorder.tape is None else ()):
                if program.recorder is not recorder or program.key != key:
                    continue
                mismatch = program.mismatch(leaves)
                if mismatch.startswith(VIEWED):
                    viewed = mismatch
                if not mismatch:
                    if place:
                        self._programs.insert(0, self._programs.pop(place))
                    if spans.current is None:
                        return program.replay(leaves, (args, kwargs))
                    with spans.span(f"replay {self._name}", program=program.number):
                        return program.replay(leaves, (args, kwargs))
        if self._programs:
            self._why = mismatch or why_key_differs(self._programs[0].key, key)
        # One call is recorded at a time: a second thread's would be mixed into the tape
        if not recorder.capturing.acquire(blocking=False):
            return self._run_within(recorder, leaves, tree, (args, kwargs))
        try:
            in_parts = viewed or key[-1] or self._differentiated.obstacle(leaves)  # key[-1]: observer()
            if in_parts:
                self._last = None
                self._add_reason(in_parts)
                if not viewed:
                    self._warn(f"runs in parts: {in_parts}")
            if in_parts or self._eager_calls:
                self._eager_calls -= bool(self._eager_calls)
                with spans.span(f"call {self._name}"):
                    return self._run_in_fragments(recorder, leaves, tree, (args, kwargs))
            with spans.span(f"record {self._name}", why=self._why):
                return self._record(recorder, key, leaves, tree, (args, kwargs))
        finally:
            recorder.capturing.release()

    @property
    def _name(self) -> str:
        return getattr(self.fn, "__qualname__", "function")

    def explain(self) -> TextReport:
        """Describe the captured programs as text: why each was recorded, its schedule and backend, and why calls had none.

        Waits until the workers have executed what was submitted, if a program has another backend than "eager".
        """
        name = self._name
        count = len(self._programs)
        parts: list[str] = []
        if self._fragment_calls and current_session.Current.recorder is not None:
            session = current_session.Current.recorder.session
            more, parts = explain.fragment_lines(session, self._slot, self._fragment_calls, self._cuts)
            count += more
        lines = [f"{name}: {count} program{'' if count == 1 else 's'}", *parts]
        for program in self._programs:
            lines += explain.program_lines(program)
        label = "an earlier call was not kept" if self._programs else "a call was not kept"
        for reason in self._reasons:
            lines.append(f"  {label}: {reason.replace(OUTSIDE, '').replace(SAME, '') if self._programs else reason}")
        return TextReport("\n".join(lines))

    # ---- calls whose Python runs

    def _run_within(self, recorder: Recorder, leaves: list, tree: TreeSpec, given: tuple) -> Any:
        """Call the function while a call is recorded: one of this thread, of which its ops are a part, or another's."""
        prepared = prepare_inputs(leaves, None)[0]
        containers = Containers(given, tree, leaves, prepared)
        own = recorder.own_tape() is not None
        if not own:
            self._add_reason(BESIDE)
        try:
            results = self.fn(*containers.args, **containers.kwargs)
            return containers.originals(results if own else self._without_graph(results, leaves, containers))
        finally:
            containers.give_back()

    def _run_in_fragments(self, recorder: Recorder, leaves: list, tree: TreeSpec, given: tuple) -> Any:
        """Call the function. Runs of its ops become programs; the rest of it is as in an eager call."""
        prepared = prepare_inputs(leaves, None)[0]
        containers = Containers(given, tree, leaves, prepared)
        backend = BACKENDS.index(self._chosen_backend())
        recorder.pass_on()  # the fragment begins behind it
        self._fragment_calls += 1
        tape = FragmentTape(recorder, current_session.Current.origins, self._slot, self._fragment_calls, backend, self._cuts)
        try:
            try:
                with recorder.turns:
                    recorder.tape = tape
                results = self.fn(*containers.args, **containers.kwargs)
                return containers.originals(self._without_graph(results, leaves, containers))
            finally:
                end_fragments(recorder, containers)
        finally:  # Ctrl-C may end a call at its first line, but prevents no assignment
            recorder.ended_tape, recorder.tape = recorder.tape, None

    def _without_graph(self, results: Any, leaves: list, containers: Containers) -> Any:
        """Results of a call that is not recorded, detached where no graph leads to the caller and they may be copied."""
        return results if self._returns_state or grad_arguments(leaves) else detached(results, whole=containers.paths)

    # ---- recording

    def _record(self, recorder: Recorder, key: tuple, leaves: list, tree: TreeSpec, given: tuple) -> Any:
        plain = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        roots = {"": self.fn, "arguments": plain, "loss scale": current_session.Current.loss_scale, **leaf_arguments(leaves)}
        entry, last = self._enter(recorder, key, roots)
        values = argument_values(leaves, recorder)
        prepared, inputs = prepare_inputs(leaves, last)
        draws = self._host_draws()
        # The tensors that a replay fills: copies of arguments, uploads, and values drawn on the CPU
        filled = [*inputs.values(), *(draws.inputs if draws else ())]
        names = names_of(entry, prepared, filled[len(inputs) :])
        recorder.flush()
        deferral, rng, kept, memory = self._deferral(), HostRngState(), False, None
        containers, before = Containers(given, tree, leaves, prepared), identities(prepared)
        known = {prepared[k]._ref.id: (k, value) for k, value in values.items()}
        tape = CallRecording(
            recorder, current_session.Current.origins, random.initial_seed(), random._State.counter, deferral > 0, self._strict,
            known=known, host_draws=draws,
        )  # fmt: skip
        try:
            with recorder.turns:
                recorder.code.extend((RECORD, self._slot, deferral, len(filled), *[t._ref.id for t in filled]))
                recorder.flush()
                recorder.tape = tape
            with cycles_collected(), self._bar() as tape.tick, OutputWatch() as watch, draws or contextlib.nullcontext():
                results = self.fn(*containers.args, **containers.kwargs)
                whole = returned_objects(results, entry, roots, containers, tape)
                results = recorded_results(results, tape, whole, leaves, last is None)
            recorder.flush()
            tape.finish()
            memory = call_memory(tape, entry, prepared, before)
            tape.prevents += [Difference("", f"{CHANGED}{OUTSIDE}")] if containers.give_back() else []
            self._end_draws(draws)
            if watch.place:
                self._note_output(tape, watch)
            recorder.tape = None
            # Two calls that agree make a program; a first one is kept for the comparison with the next
            now = RecordedCall(tape, key, leaves, names, inputs, optimizer_settings(entry), draws, memory, whole)
            leaving = snapshot(roots)
            now.compare_states(entry, leaving)
            program = self._seal(last, now, entry, leaving, results, rng)
            kept = program is not None
            self._count(kept, tape.cut)
            self._last = None if kept or self._eager_calls else now.kept()
        except Exception:  # what the call has changed until here stays
            recorder.flush()
            memory = memory or call_memory(tape, entry, prepared, before)
            containers.give_back()
            raise
        finally:
            recorder.tape = None
            self._strict |= tape.strict_next
            if not kept:
                recorder.code.extend((DISCARD,))
            if freed := tape.take_deferred():
                recorder.code.extend((FREE, len(freed), *freed))
            if memory is not None:
                write_back(leaves, inputs, written_inputs(leaves, inputs, memory), memory.required)
        if program is not None:
            return program.copy_results(leaves, given)
        return containers.originals(in_arguments(results, leaves, inputs, memory, whole))

    def _bar(self) -> AbstractContextManager[progress.Tick]:
        return progress.bar(f"recording {self._name}", unit=" ops")

    def _enter(self, recorder: Recorder, key: tuple, roots: dict) -> tuple[StateSnapshot, RecordedCall | None]:
        """The Python state before a recorded call, and the last call if this one may be compared with it."""
        entry = snapshot(roots)
        # Where values are read the first call decides whether Python has to run; capturable optimizers have other last bits
        wait = not self._recorded and seems_to_read(entry)
        if not wait and any([make_capturable(optimizer, self._recorded) for optimizer in entry.optimizers]):
            entry = snapshot(roots)
        if not schedules_rates(entry) and self._rates.changed(entry.optimizers, entry.names):
            self._programs.clear()  # each had one number for its rate
            entry = snapshot(roots)
        self._recorded = True
        last, self._last = self._last, None
        if last is not None and (last.key != key or last.tape.recorder is not recorder or last.ended()):
            self._add_reason(OTHER_ARGUMENTS + why_key_differs(last.key, key))
            last = None
        if last is not None and last.made:
            if why := leave_entries(entry, last.made):
                self._add_reason(why)
                last = None
            entry = snapshot(roots)
        return entry, last

    def _host_draws(self) -> HostDraws | None:
        """The tape for a call that may draw on the CPU. What it will probably upload is uploaded here."""
        if not self._draws_on_host and not self._cpu_state:
            return None
        predicted = [] if self._drawn is None else self._drawn.prediction()
        return HostDraws([upload(value) for value in predicted], predicted, state=tuple(self._cpu_state))

    def _end_draws(self, draws: HostDraws | None) -> None:
        """The call is over: the next one begins with what this one would upload again."""
        if draws is not None:
            draws.finish()
            self._drawn = draws if draws.uploads and not draws.obstacle else None

    def _note_output(self, tape: CallRecording, watch: OutputWatch) -> None:
        """The call has made output. With a schedule it is captured all the same, since a part of it could not have one."""
        schedule = self.schedule or current_session.Current.schedule
        if schedule:
            self._warn(f"{watch.place}: the function {watch.what}, and a replay in schedule {schedule} does not: do it outside")
        else:
            tape.cut = True
            tape.prevents.append(Difference(watch.place, f"the function {watch.what}"))

    def _chosen_backend(self) -> str:
        """The backend of programs. Graphs of steps with offloaded state have not run on a GPU, so these are compiled alone."""
        backend = self.backend or current_session.Current.backend
        return "inductor" if backend == "cudagraphs" and current_session.Current.offloads else backend

    def _recompute_mode(self) -> int:
        """Value of messages.FinishCapture.recompute for this function."""
        graphs = self._chosen_backend() == "cudagraphs"
        return int(graphs) if self.recompute is None else 2 * self.recompute

    def _deferral(self) -> int:
        """Value of ir.instr.RECORD for this function.

        No deferral with a schedule, which needs times of single ops, nor with offload: state leaves the device as it is made.
        """
        live = current_session.Current
        deferred = self._chosen_backend() == "cudagraphs" and not (self.schedule or live.schedule or live.offloads)
        return 1 + self._recompute_mode() if deferred else 0

    def _seal(
        self,
        last: RecordedCall | None,
        now: RecordedCall,
        entry: StateSnapshot,
        leaving: StateSnapshot,
        results: Any,
        rng: HostRngState,
    ) -> CapturedProgram | None:
        """Make a program of this call, if it agrees with the call before and nothing prevents it.

        entry, leaving: the state before and after the call. rng: the host's random state before it.
        """
        self._returns_state |= any(type(place) is not ContainerArgument for place in now.whole.values())
        places = grad_arguments(now.leaves)
        if now.tape.loses_graph() and not places:
            self._warn(DETACHED)
        obstacle = self._obstacle(now, entry, leaving, rng)
        if obstacle is None and last is None:
            return None
        if obstacle is None and last is not None and reads_differ(last.tape, now.tape):
            now.tape.strict_next = True
            obstacle = Difference("", ARGUMENTS_DIFFER)
        if obstacle is None and last is not None:
            obstacle = difference(last.tape, now.tape, last.names, now.names) or self._varies(last, now)
            if obstacle is not None:
                obstacle.what += hint(last, now)
            elif (last.draws and last.draws.identity()) != (now.draws and now.draws.identity()):
                obstacle = Difference("", LEADS_ELSEWHERE)
        if obstacle is None:
            carried, obstacle = loop_carried(now, entry, leaving)
        if obstacle is not None:
            self._add_reason(str(obstacle))
            return None
        tape, recorder = now.tape, now.tape.recorder
        number = next(_numbers)
        schedule, backend = self.schedule or current_session.Current.schedule, self._chosen_backend()
        pairs = [list(pair) for pair in carried]
        answer = recorder.session.seal(number, schedule, backend, pairs, tape.seed, tape.counter, self._recompute_mode())
        if answer["why"]:
            self._add_reason(answer["why"])
            return None
        order, answer["backend"] = answer["schedule"], backend
        if order and order["why"] and (self.schedule or order["pipeline"]):  # the config's is for steps that can have it
            self._warn(f"schedule {order['name']} is not used: {order['why']}")
        program = self._program(number, now, entry, leaving, results, (answer, carried))
        self._programs.insert(0, program)
        del self._programs[MAX_PROGRAMS_PER_FUNCTION:]
        self._sealed += 1
        if self._sealed == MAX_PROGRAMS_PER_FUNCTION:
            advice = (
                "; with lr=torch.tensor(..., device='remote') one program serves all rates" if "['lr']" in self._why else ""
            )
            cost = "each at the cost of two eager calls"
            self._warn(f"{self._sealed} programs were recorded, {cost}; the last for: {self._why}{advice}")
        return program

    def _varies(self, last: RecordedCall, now: RecordedCall) -> Difference | None:
        """The reason why no program can serve the next call: an argument differs at each call, and no copy can replace it."""
        for place in sorted(now.memory.required - now.inputs.keys()):
            return Difference("", f"{REBOUND} {place}{OUTSIDE}")
        for place in sorted(sharing_arguments(now.leaves, now.memory) - now.inputs.keys()):
            if not last.had(place, now.leaves[place]):
                what = "shares memory that the function changes, and is another tensor at each call"
                return Difference("", f"argument {place} {what}; pass a clone()")
        return None

    def _program(
        self, number: int, now: RecordedCall, entry: StateSnapshot, leaving: StateSnapshot, results: Any, sealed: tuple
    ) -> CapturedProgram:
        """The client's side of a program. sealed: the dispatcher's answer, and ids of loop-carried tensors, read and made."""
        answer, carried = sealed
        tape = now.tape
        reads, first = tape.reads(), tape.first
        leaves, tree = tree_flatten(results, is_leaf=one_of(now.whole))
        inputs = {tensor._ref.id for tensor in [*now.inputs.values(), *(now.draws.inputs if now.draws else ())]}
        lasting = {memory_id(tensor) for _, tensor in entry.tensors()} - {old for old, _ in carried}
        copied: dict[int, ProgramResult] = {}  # by id: a tensor that is returned twice is one tensor

        def result(leaf: Any) -> Any:
            if id(leaf) in now.whole:
                return now.whole[id(leaf)]
            if view := argument_view(leaf, now.leaves, now.inputs, now.memory):
                return view
            if not isinstance(leaf, RemoteTensor) or (leaf._ref.id < first and leaf._ref.id not in inputs):
                return leaf
            lasts = now.memory.owner(leaf) in lasting
            source = find_memory(leaf) or (leaf if lasts else make(leaf._ref.meta, leaf._ref))
            return copied.setdefault(leaf._ref.id, ProgramResult(source, lasts))

        keep = [t for state in (entry, leaving) for _, t in state.tensors() if t._ref.id in reads or t._ref.id >= first]
        grads, made = gradients(entry, leaving, reads), take_made(leaving, first)
        leaving.grads.clear()  # nothing else of GT holds the objects of such memory
        return CapturedProgram(
            number=number,
            recorder=tape.recorder,
            key=now.key,
            guard=Guard(leaving, tape.counts, now.draws.state if now.draws else ()),
            inputs=now.inputs,
            same={k: (t, t._ref.id) for k, t in enumerate(now.leaves) if isinstance(t, RemoteTensor) and k not in now.inputs},
            grads=LeafGradients(grads),
            made=made,
            results=list(map(result, leaves)),
            tree=tree,
            draws=tape.draws(),
            host_draws=now.draws if now.draws and now.draws.rows else None,
            argument_reads=tape.argument_reads,
            why=self._why,
            answer=answer,
            written=written_inputs(now.leaves, now.inputs, now.memory),
            memory=now.memory,
            keep=[find_memory(t) or t for t in keep],
        )

    def _obstacle(
        self, now: RecordedCall, entry: StateSnapshot, leaving: StateSnapshot, rng: HostRngState
    ) -> Difference | None:
        """The reason why this call alone can be no program: it did something that a replay would not do, or could not see."""
        tape, drawn = now.tape, rng.changed()
        self._cpu_state += [t for t in changed_on_cpu(entry, leaving) if not any(t is known for known in self._cpu_state)]
        self._draws_on_host |= drawn == TORCH_GENERATOR
        if not tape.ops:
            return Difference("", "the function does nothing with remote tensors")
        if self._drawn is not None and not self._drawn.fills_inputs:
            return Difference("", UPLOADED)
        if tape.prevents:
            return tape.prevents[0]
        for k in sorted(now.memory.rebound):
            return Difference("", f"{REBOUND} {k}{OUTSIDE}")
        if entry.overflow or leaving.overflow:
            return Difference("", "the function reaches too many Python objects to compare at each call; have it use fewer")
        if entry.opaque or leaving.opaque:
            return Difference("", f"{(entry.opaque or leaving.opaque)[0]}; pass the part that is needed as an argument")
        if drawn:
            if drawn != TORCH_GENERATOR or now.draws is None:
                return Difference("", f"the function draws random numbers from {drawn}{OUTSIDE}")
            if now.draws.obstacle:
                return Difference("", now.draws.obstacle)
        for tensor, n in tape.reads().items():
            if tensor not in now.names:
                op = tape.ops[n]
                text = f"{op.name} uses a tensor that is not in arguments, closure or globals; pass it as an argument"
                return Difference(tape.origins.where(op.origin), text)
        return side_effect(entry, leaving, tape.first, now.draws)

    def _count(self, kept: bool, cut: bool) -> None:
        """Count recorded calls without a program; after some in a row say why, and record again only later.

        cut: the call reads a value or prints, and so will the next ones.
        """
        if kept:
            self._futile_calls, self._next_eager_calls = 0, MAX_FUTILE_CALLS
            return
        self._futile_calls += 1
        if cut:
            self._futile_calls, self._next_eager_calls = MAX_FUTILE_CALLS, MAX_EAGER_CALLS
        if self._futile_calls < MAX_FUTILE_CALLS:
            return
        # After the pause two more calls are recorded, enough to agree, before the next pause, twice as long
        self._futile_calls, self._eager_calls = MAX_FUTILE_CALLS - 2, self._next_eager_calls
        self._next_eager_calls = min(2 * self._next_eager_calls, MAX_EAGER_CALLS)
        reason = self._reasons[-1] if self._reasons else "no two calls agreed"
        self._warn(f"runs in parts: {reason}")

    def _warn(self, text: str) -> None:
        kind = _NUMBER.sub("#", text)  # a learning rate that changes is one reason, not one a step
        if kind not in self._warned and len(self._warned) < MAX_WARNINGS_PER_FUNCTION:
            self._warned.add(kind)
            log.warning("%s: %s", getattr(self.fn, "__qualname__", "a compiled function"), text)

    def _add_reason(self, reason: str) -> None:
        """Keep a reason, the newest last. Changes of one value are one reason, not one a step."""
        kind = _CHANGE.sub("", reason)
        others = [text for text in self._reasons if _CHANGE.sub("", text) != kind]
        self._reasons = [*others[1 - MAX_REASONS :], reason]

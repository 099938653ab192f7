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
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch.utils._pytree import TreeSpec

from gt.client import current_session
from gt.client.capture.aliasing import (
    ContainerArgument,
    Containers,
    call_memory,
    flatten_call,
    identities,
    keys_of,
    write_back,
    write_uploaded_back,
    written_inputs,
)
from gt.client.capture.boundary import (
    OUTSIDE,
    TORCH_GENERATOR,
    HostRngState,
    RecordedCall,
    changed_on_cpu,
    counts_on_device,
    detached,
    leaf_arguments,
    loop_carried,
    make_capturable,
    modes,
    names_of,
    optimizer_settings,
    prepare_inputs,
    recorded_results,
    returned_objects,
    seems_to_read,
    why_key_differs,
)
from gt.client.capture.constants import argument_values
from gt.client.capture.fragment_tape import FragmentTape, end_fragments
from gt.client.capture.futile_calls import MAX_FUTILE_CALLS, Reasons, RecordingPauses, WaitingCalls
from gt.client.capture.gradients import (
    VIEWED,
    DifferentiatedArguments,
    grad_arguments,
    has_graph,
    leave_entries,
    optimized_ids,
    path_with_graph,
)
from gt.client.capture.host_draws import UPLOADED, HostDraws
from gt.client.capture.program import explain
from gt.client.capture.program.argument_views import in_arguments
from gt.client.capture.program.captured_program import CapturedProgram
from gt.client.capture.program.compiled_module import captured_module
from gt.client.capture.program.made_objects import closed, opened
from gt.client.capture.program.sealing import SealedCall, captured_program, disagreement, own_obstacle
from gt.client.capture.program.settings import Part, ProgramSettings
from gt.client.capture.program.state_reads import StateReads
from gt.client.capture.program.state_writes import unguarded_state
from gt.client.capture.program.two_programs import Halves, in_functorch
from gt.client.capture.recording import CallRecording, Difference
from gt.client.capture.state_walk import StateSnapshot, snapshot
from gt.client.capture.watches.code_watch import CodeWatch
from gt.client.capture.watches.function_caches import held_on_cpu, name_cached
from gt.client.capture.watches.moved_arguments import MovedArguments
from gt.client.capture.watches.output_watch import WARNS, OutputWatch
from gt.client.capture.watches.scheduler_watch import SchedulerWatch, holds_groups, may_make_schedulers, names_beside
from gt.client.capture.watches.unread_state import UnreadState
from gt.client.device import random
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.reports import progress, spans
from gt.client.reports.html import TextReport
from gt.client.trace.recorder import Recorder
from gt.client.trace.uploads import upload
from gt.client.values.learning_rates import LearningRates
from gt.client.values.uploaded_values import UploadedValues
from gt.ir.instr import BACKENDS, COMPILED_LATER, DISCARD, FREE, RECORD
from gt.ir.schedules import asked
from gt.wire.process_settings import cycles_collected

WRITTEN_ON_HOST = (
    "is a CPU tensor that the function changes, so each call waits until it has the new values: change a clone() of it"
)
CHANGED = "the function changes a list, dictionary or object that it gets"
OTHER_ARGUMENTS = "no earlier call that was recorded had the same kind of arguments; the last differed in "
BESIDE = "a call of another thread was recorded or run in parts at that time: that is done to one call at a time"

MAX_PROGRAMS_PER_FUNCTION = 8  # the least recently used one is dropped beyond that
_numbers, _slots = itertools.count(1), itertools.count(1)


P = ParamSpec("P")
R = TypeVar("R")
M = TypeVar("M", bound=torch.nn.Module)


@overload
def compile(fn: M, *, schedule: str | None = ..., backend: str | None = ..., recompute: bool | None = ...) -> M: ...
@overload
def compile(  # type: ignore[overload-cannot-match]  # where torch has no types, each thing is a module
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
    depends on is a guard: another value needs another program. Where `fn` calls backward(), its results are detached. Where it
    does not, as in a model's forward(), they have a graph, and their backward pass is a second program. `.explain()` of the
    result tells which programs exist, and why calls had none.

    fn: the function to capture, of any arguments; or a module. Of a module the result is a module of the same class, which
        shares its state and has `.explain()` besides.
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
    compiled = CompiledFunction(fn, ProgramSettings(schedule or "", backend or "", recompute))
    if isinstance(fn, torch.nn.Module):
        return captured_module(
            fn, compiled, functools.partial(compile, schedule=schedule, backend=backend, recompute=recompute)
        )
    return compiled


def _make_part(settings: ProgramSettings, fn: Callable, part: Part) -> CompiledFunction:
    """A compiled function of a half of another one, to which it has no reference: programs end with their function."""
    return CompiledFunction(fn, settings, part)


class CompiledFunction(Generic[P, R]):
    """The result of gt.compile: a callable that owns the captured programs of one function."""

    def __init__(self, fn: Callable[P, R], settings: ProgramSettings, part: Part | None = None) -> None:
        functools.update_wrapper(self, fn, updated=() if isinstance(fn, torch.nn.Module) else ("__dict__",))
        self.fn, self.settings = fn, settings
        self._part = part
        self._name = part.name if part else getattr(fn, "__qualname__", type(fn).__name__)
        self.halves = Halves(fn, functools.partial(_make_part, settings))
        self._programs: list[CapturedProgram] = []  # most recently used first
        self._waiting = WaitingCalls()
        self._slot = next(_slots)
        self._reasons = Reasons(self._name)
        self._pauses = RecordingPauses()
        self._why = "the first call"
        self._strict = False  # True if libraries are told that values cannot be read
        self._sealed = 0  # programs made so far
        UploadedValues.wanted = True
        self._losses = 0  # of workers of the session, when a call was made last
        self._recorded = False  # whether a call has been
        self._draws_on_host = False  # True once a call has drawn random numbers on the CPU
        self._drawn: HostDraws | None = None  # the last call's draws, if it uploads them
        self._cpu_state: list[torch.Tensor] = []  # CPU tensors that calls have changed in place or uploaded
        self._fragment_calls = 0
        self._differentiated, self._rates = DifferentiatedArguments(), LearningRates()
        self._schedules = self._makes_schedulers = False  # True once a call has stepped a scheduler, or made one
        self._numbers_in_parts = False  # whether rates are numbers in calls that run in parts
        self._followed: tuple[set[str], set[str]] | None = None  # names of the last snapshot: see StateSnapshot
        self._returns_state = False  # True once a call has returned a list or dictionary that Python state holds
        self._code, self._unread, self._state_reads = CodeWatch(), UnreadState(), StateReads()
        self._cuts: Counter[tuple[str, str]] = Counter()  # (where a run of ops ended, why) -> how often, in these calls

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if in_functorch():
            return self.fn(*args, **kwargs)
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
        if (halves := self.halves.of_call(leaves)) is not None:
            return halves(args, kwargs, leaves)
        key = (tree, *keys_of(leaves), *modes())
        program, results, mismatch, viewed = self._replayed(recorder, key, leaves, (args, kwargs))
        if program is not None:
            self._rates.remove()  # schedulers compute with numbers
            for step in program.steps:
                step.run()
            return results
        if self._programs:
            self._why = mismatch or why_key_differs(self._programs[0].key, key)
        # One call is recorded at a time: a second thread's would be mixed into the tape
        if not recorder.capturing.acquire(blocking=False):
            return self._run_within(recorder, leaves, tree, (args, kwargs))
        try:
            in_parts = viewed or key[-1] or self.halves.obstacle() or self._differentiated.obstacle(leaves)  # observer()
            if in_parts:
                self._waiting.clear()
                self._reasons.add(in_parts)
            if in_parts or self._pauses.holds(key):
                self._pauses.take(key)
                known = self.halves.wanted
                with spans.span(f"call {self._name}"):
                    results = self._run_in_fragments(recorder, leaves, tree, (args, kwargs))
                # The first call may tell that the next ones have two programs
                if in_parts and not viewed and known is self.halves.wanted:
                    self._reasons.warn(f"runs in parts: {in_parts}")
                return results
            with spans.span(f"record {self._name}", why=self._why):
                return self._record(recorder, key, leaves, tree, (args, kwargs))
        finally:
            recorder.capturing.release()

    def _replayed(self, recorder: Recorder, key: tuple, leaves: list, given: tuple) -> tuple[Any, Any, str, str]:
        """Replay a program that serves this call. Returns it and its results; else None, and why not: a mismatch, a view."""
        mismatch = viewed = ""
        with recorder.turns:
            if self._losses != (losses := getattr(recorder.session, "losses", 0)):
                self._losses = losses
                self._programs.clear()  # a lost worker had a part of them
                self._waiting.clear()
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
                    return program, self._replay(program, leaves, given), "", ""
        return None, None, mismatch, viewed

    def _replay(self, program: CapturedProgram, leaves: list, given: tuple) -> Any:
        if spans.current is None:
            return program.replay(leaves, given)
        with spans.span(f"replay {self._name}", program=program.number):
            return program.replay(leaves, given)

    @property
    def newest(self) -> CapturedProgram | None:
        """The program that was made or replayed last."""
        return self._programs[0] if self._programs else None

    def programs(self) -> list[CapturedProgram]:
        """The programs that there are, the one that was used last first."""
        return [*self._programs]

    def forget(self, program: CapturedProgram) -> None:
        """Serve no more calls with a program."""
        self._programs.remove(program)

    def serves(self, program: CapturedProgram, leaves: list) -> bool:
        """True if a program, which draws nothing on the CPU, could serve a call with these leaves of its arguments."""
        key = (program.key[0], *keys_of(leaves), *modes())
        return program.recorder is current_session.current() and program.key == key and not program.mismatch(leaves)

    def explain(self) -> TextReport:
        """Describe the captured programs as text: why each was recorded, its schedule and backend, and why calls had none.

        Waits until the workers have executed what was submitted, if a program has another backend than "eager".
        """
        name = self._name
        count = len(self._programs) + self.halves.count()
        parts: list[str] = []
        if self._fragment_calls and current_session.Current.recorder is not None:
            session = current_session.Current.recorder.session
            more, parts = explain.fragment_lines(session, self._slot, self._fragment_calls, self._cuts)
            count += more
        lines = [f"{name}: {count} program{'' if count == 1 else 's'}", *parts]
        for program in self._programs:
            lines += explain.program_lines(program)
        lines += explain.unread_lines(self._unread.paths())
        lines += self._reasons.lines(bool(self._programs))
        lines += self.halves.lines()
        return TextReport("\n".join(lines))

    # ---- calls whose Python runs

    def _run_within(self, recorder: Recorder, leaves: list, tree: TreeSpec, given: tuple) -> Any:
        """Call the function while a call is recorded: one of this thread, of which its ops are a part, or another's."""
        prepared = prepare_inputs(leaves, None)[0]
        containers = Containers(given, tree, leaves, prepared)
        own = recorder.own_tape() is not None
        if not own:
            self._reasons.add(BESIDE)
        try:
            with MovedArguments(leaves, prepared, True):
                results = self.fn(*containers.args, **containers.kwargs)
            return containers.originals(results if own else self._without_graph(results, leaves, containers))
        finally:
            containers.give_back()
            write_uploaded_back(leaves, prepared)

    def _run_in_fragments(self, recorder: Recorder, leaves: list, tree: TreeSpec, given: tuple) -> Any:
        """Call the function. Runs of its ops become programs; the rest of it is as in an eager call."""
        if self._numbers_in_parts:
            self._rates.remove()  # schedulers compute with numbers
        prepared = prepare_inputs(leaves, None)[0]
        containers = Containers(given, tree, leaves, prepared)
        backend = BACKENDS.index(self.settings.backend)
        recorder.pass_on()  # the fragment begins behind it
        self._fragment_calls += 1
        tape = FragmentTape(recorder, current_session.Current.origins, self._slot, self._fragment_calls, backend, self._cuts)
        try:
            try:
                with recorder.turns:
                    recorder.tape = tape
                with MovedArguments(leaves, prepared, True):
                    results = self.fn(*containers.args, **containers.kwargs)
                return containers.originals(self._without_graph(results, leaves, containers))
            finally:
                end_fragments(recorder, containers)
        finally:  # Ctrl-C may end a call at its first line, but prevents no assignment
            recorder.ended_tape, recorder.tape = recorder.tape, None
            write_uploaded_back(leaves, prepared)

    def _without_graph(self, results: Any, leaves: list, containers: Containers) -> Any:
        """Results of a call that is not recorded, detached where no graph leads to the caller and they may be copied."""
        self.halves.wanted |= self._part is None and has_graph(results)
        if self.halves.wanted or self._returns_state or grad_arguments(leaves):
            return results
        return detached(results, whole=containers.paths)

    # ---- recording

    def _random(self) -> tuple[int, int]:
        """Seed and counter from which random ops of a call count."""
        if self._part is not None and self._part.random is not None:
            return self._part.random()
        return random.initial_seed(), random._State.counter

    def _record(self, recorder: Recorder, key: tuple, leaves: list, tree: TreeSpec, given: tuple) -> Any:
        roots = self._roots(leaves)
        entry, last = self._enter(recorder, key, roots)
        values = argument_values(leaves, recorder)
        prepared, inputs = prepare_inputs(leaves, last)
        draws = self._host_draws()
        drawn = draws.inputs if draws else []
        ids = [t._ref.id for t in (*prepared, *drawn) if isinstance(t, RemoteTensor)]  # the next copies lie alike
        names = names_of(entry, prepared, drawn)
        recorder.flush()
        how, rng, kept, memory = self.settings.how_to_record, HostRngState(), False, None
        containers, before = Containers(given, tree, leaves, prepared), identities(prepared)
        state = self._state_reads.before(entry, names, prepared, recorder, values)
        tape = CallRecording(
            recorder, current_session.Current.origins, *self._random(), 0 < how < COMPILED_LATER,
            self._strict, known=state.known, state=state, host_draws=draws, optimized=optimized_ids(entry),
        )  # fmt: skip
        try:
            with recorder.turns:
                recorder.code.extend((RECORD, self._slot, how, len(ids), *ids))
                recorder.flush()
                recorder.tape = tape
            schedulers = SchedulerWatch(entry, tape, self._rates)
            with cycles_collected(), self._watched(tape, draws):
                with schedulers, self._unread, MovedArguments(leaves, prepared, last is None or last.apart) as moved:
                    results = opened(self.fn(*containers.args, **containers.kwargs), leaves)
                whole = returned_objects(results, entry, roots, containers, tape)
                results = recorded_results(results, tape, whole, leaves, last is None)
            recorder.flush()
            tape.finish()
            memory = call_memory(tape, entry, prepared, before)
            tape.prevents += [Difference("", f"{CHANGED}{OUTSIDE}")] if containers.give_back() else []
            self._end_draws(draws)
            recorder.tape = None
            # Two calls that agree make a program; a first one is kept for the comparison with the next
            now = RecordedCall(tape, key, leaves, names, inputs, optimizer_settings(entry), draws, memory, whole)
            now.apart = moved.settle(tape, memory, last is None)
            leaving = self._snapshot(roots)
            self._end_watches(schedulers, tape, entry, leaving)
            name_cached(tape, names, entry, leaving)
            now.compare_states(entry, leaving)
            program = self._seal(last, now, entry, leaving, results, rng)
            self._note_outcome(now, kept := program is not None)
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
            recorder.code.extend((FREE, len(freed), *freed) if (freed := tape.take_deferred()) else ())
            if memory is not None:
                write_back(leaves, inputs, written_inputs(inputs, memory), memory.required)
        if program is not None:
            return program.copy_results(leaves, given)
        results = containers.originals(in_arguments(results, leaves, inputs, memory, whole))
        return closed(results) if self._part is None else results

    def _end_watches(
        self, schedulers: SchedulerWatch, tape: CallRecording, entry: StateSnapshot, leaving: StateSnapshot
    ) -> None:
        self._code.note_unknown(tape, entry.codes | leaving.codes)
        self._unread.finish(self._code.ran, tape, leaving)
        self._schedules |= schedulers.finish(leaving)
        self._makes_schedulers |= schedulers.makes
        schedulers.end()

    def _note_outcome(self, now: RecordedCall, kept: bool) -> None:
        """A recorded call is over: it waits for another one, and a pause may begin. kept: it gave a program."""
        for place in sorted(written_inputs(now.inputs, now.memory)):
            if not isinstance(now.leaves[place], RemoteTensor):
                self._reasons.warn(f"argument {place} {WRITTEN_ON_HOST}")
        if not kept and not now.tape.cut:
            self._waiting.add(now.kept())
        newest = self._programs[:MAX_FUTILE_CALLS]
        if kept and len(newest) == MAX_FUTILE_CALLS and not any(program.replays for program in newest):
            self._reasons.add(f"programs were recorded that no call could replay, the last for: {self._why}")
            kept = False
        if self._pauses.count(now.key, kept, now.tape.cut):
            self._reasons.warn(f"runs in parts: {self._reasons.last}")

    def _roots(self, leaves: list) -> dict[str, Any]:
        """The objects from which everything is reached that the function may depend on, by name."""
        plain = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
        loss_scale = current_session.Current.loss_scale
        roots = {"": self.fn, "arguments": plain, "loss scale": loss_scale, **leaf_arguments(leaves)}
        roots |= self._part.roots() if self._part else {}
        return roots | self._code.roots()

    def _snapshot(self, roots: dict[str, Any]) -> StateSnapshot:
        """The Python state below the roots."""
        state = snapshot(roots, self._followed, self._unread.names())
        self._followed = state.followed
        return state

    @contextlib.contextmanager
    def _watched(self, tape: CallRecording, draws: HostDraws | None) -> Iterator[None]:
        """Inside, the function runs: its ops are counted for the user; output, draws on the CPU and code are noted."""
        bar = progress.bar(f"recording {self._name}", unit=" ops")
        with bar as tape.tick, OutputWatch() as output, draws or contextlib.nullcontext(), self._code.reporting_to(output):
            yield
        if output.place:
            self._note_output(tape, output)

    def _enter(self, recorder: Recorder, key: tuple, roots: dict) -> tuple[StateSnapshot, RecordedCall | None]:
        """The Python state before a recorded call, and the last call if this one may be compared with it."""
        self._unread.begin(program.guard for program in self._programs if program.key == key)
        entry = self._snapshot(roots)
        # Where values are read the first call decides whether Python has to run; capturable optimizers have other last bits
        wait = (not self._recorded or self._state_reads.pending) and seems_to_read(entry)
        begun = [optimizer for optimizer in entry.optimizers if not wait or counts_on_device(optimizer)]
        if any([make_capturable(optimizer, self._recorded) for optimizer in begun]):
            entry = self._snapshot(roots)
        self._numbers_in_parts = self._schedules or may_make_schedulers(entry)
        names, held = names_beside(entry), holds_groups(entry)
        if not self._makes_schedulers and self._rates.changed(entry.optimizers, names, self._schedules, held):
            self._programs.clear()  # each had one number for its rate
            entry = self._snapshot(roots)
        self._recorded = True
        last, newest = self._waiting.take(recorder, key, entry.kind()), self._waiting.newest
        if last is None and newest not in (None, key):
            self._reasons.add(OTHER_ARGUMENTS + why_key_differs(newest, key))
        if last is not None and (last.made or last.rebound):
            if why := leave_entries(entry, last.made, last.rebound):
                self._reasons.add(why)
                last = None
            entry = self._snapshot(roots)
        if last is not None:
            entry.rebindable = {id(tensor): tensor._ref for tensor, _ in entry.identities.values() if not tensor.requires_grad}
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
        schedule = self.settings.schedule
        if schedule:
            what = f"the function {watch.what}, and a replay in schedule {schedule} does not: do it outside"
            self._reasons.warn(f"{watch.place}: {what}")
        else:
            tape.cut |= watch.what != WARNS  # a warning is mostly shown once
            tape.prevents.append(Difference(watch.place, f"the function {watch.what}"))

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
        self.halves.wanted |= now.tape.keeps_graph
        obstacle = self._obstacle(now, entry, leaving, rng)
        if obstacle is None:
            if last is None:
                return None
            obstacle = disagreement(last, now)
        if obstacle is None:
            carried, obstacle = loop_carried(now, entry, leaving, results)
            obstacle = obstacle or unguarded_state(now, carried, leaving, self._part is not None)
        if obstacle is not None:
            self._reasons.add(str(obstacle))
            return None
        tape, recorder = now.tape, now.tape.recorder
        number = next(_numbers)
        schedule, backend = self.settings.schedule, self.settings.backend
        pairs = [list(pair) for pair in carried]
        answer = recorder.session.seal(number, schedule, backend, pairs, tape.seed, tape.counter, self.settings.recompute_mode)
        if answer["why"]:
            self._reasons.add(answer["why"])
            return None
        order, answer["backend"] = answer["schedule"], backend
        # The config's is for steps that can have it
        if order and order["why"] and (self.settings.own_schedule or order["pipeline"]):
            self._reasons.warn(f"schedule {order['name']} is not used: {order['why']}")
        sealed = SealedCall(number, answer, carried, self._why, self._part)
        program = captured_program(sealed, now, entry, leaving, results)
        self._programs.insert(0, program)
        del self._programs[MAX_PROGRAMS_PER_FUNCTION:]
        self._sealed += 1
        if self._sealed == MAX_PROGRAMS_PER_FUNCTION:
            advice = (
                "; with lr=torch.tensor(..., device='remote') one program serves all rates" if "['lr']" in self._why else ""
            )
            cost = "each at the cost of two eager calls"
            self._reasons.warn(f"{self._sealed} programs were recorded, {cost}; the last for: {self._why}{advice}")
        return program

    def _obstacle(
        self, now: RecordedCall, entry: StateSnapshot, leaving: StateSnapshot, rng: HostRngState
    ) -> Difference | None:
        """The reason why this call alone can be no program."""
        drawn = rng.changed()
        for tensor in [*changed_on_cpu(entry, leaving), *held_on_cpu(now.tape, entry)]:
            if not any(tensor is known for known in self._cpu_state):
                self._cpu_state.append(tensor)
        self._draws_on_host |= drawn == TORCH_GENERATOR
        if not now.tape.ops:
            return Difference("", "the function does nothing with remote tensors")
        if self._drawn is not None and not self._drawn.fills_inputs:
            return Difference("", UPLOADED)
        if (self._part is not None or now.tape.keeps_graph) and (path := path_with_graph(leaving, now.tape.first)):
            self.halves.refused = f"{path} holds a tensor with a graph, as its results have: return it instead"
            return Difference("", self.halves.refused)
        return own_obstacle(now, entry, leaving, drawn)

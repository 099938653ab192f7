"""`gt.compile`: a step that is recorded until two calls agree, and from then on is one message.

While a program fits, its Python does not run. So everything that could make the step come out otherwise is a guard (see
state_walk.py), and whatever the step does beside tensors prevents a program, with a reason that `explain()` gives.
"""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

from gt.client import current_session
from gt.client.capture import explain as backends
from gt.client.capture.boundary import (
    OUTSIDE,
    Draws,
    RecordedCall,
    carried,
    cure,
    detached,
    given,
    grads_of,
    key_of,
    make_capturable,
    modes,
    other,
    settings,
    side_effect,
)
from gt.client.capture.captured_program import CapturedProgram, ProgramResult
from gt.client.capture.guards import Guard
from gt.client.capture.recording import SAME, CallRecording, Difference, difference
from gt.client.capture.state_walk import Reach, reach
from gt.client.device import random
from gt.client.device.remote_tensor import RemoteTensor
from gt.client.trace.recorder import Recorder
from gt.ir.instr import BACKENDS, DISCARD, FREE, RECORD
from gt.ir.schedules import asked

log = logging.getLogger("gt")
_NUMBER = re.compile(r"-?\d[\d.e+-]*")

MOST = 8  # programs of one function
PATIENCE = 4  # recorded calls in a row that came to nothing; then a function runs eagerly for a while
RESTS = 64  # calls of the longest while
_numbers, _slots = itertools.count(1), itertools.count(1)
_PLAIN = frozenset({RemoteTensor, torch.Tensor, int, float, bool, str})  # types that are leaves
_trees: dict[int, TreeSpec] = {}  # of so many


def compile(
    fn: Callable | None = None, *, schedule: str | None = None, backend: str | None = None, recompute: bool | None = None
) -> Any:
    """A function that does what `fn` does, at the cost of one message once two calls have been found to agree.

    CPU tensors among the arguments are uploaded at each call; remote ones are read where they are; everything else is a guard:
    another value is another program. Results are remote tensors, detached. Decorator or call. `.explain()` says what became
    of it. CaptureError if a value is read inside.

    backend: "eager" carries ops out one by one, to the bit as without gt.compile: the default, unless a group of the YAML says
    `compile: true`. "inductor" compiles what lies between communications, after the first replay, each distinct piece once;
    "cudagraphs" has a GPU replay that as CUDA graphs. What cannot be done so is done as the one before would, and `.explain()`
    says why.

    recompute: whether values that are cheap to make (activations, norms, casts) are made again for the backward pass rather
    than kept, where that lowers the peak of memory; None: with "cudagraphs" those that save much for their time.
    """
    if fn is None:
        return functools.partial(compile, schedule=schedule, backend=backend, recompute=recompute)
    if not callable(fn):
        raise TypeError(f"gt.compile takes a function, got {type(fn).__name__}")
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend {backend!r} is not known: want one of {', '.join(BACKENDS)}")
    if schedule is not None:
        asked(schedule)  # or a ValueError
    return CompiledFunction(fn, schedule or "", backend or "", recompute)


def _flat(args: tuple, kwargs: dict) -> tuple[list, TreeSpec]:
    """tree_flatten((args, kwargs)), at less cost where it is a few tensors and numbers."""
    if kwargs or not _PLAIN.issuperset(map(type, args)):
        return tree_flatten((args, kwargs))
    count = len(args)
    if count not in _trees:
        _trees[count] = tree_flatten((args, {}))[1]
    return list(args), _trees[count]


class CompiledFunction:
    """What gt.compile gives."""

    def __init__(self, fn: Callable, schedule: str = "", backend: str = "", recompute: bool | None = None) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.schedule, self.backend, self.recompute = fn, schedule, backend, recompute
        self._programs: list[CapturedProgram] = []  # the one used last comes first
        self._last: RecordedCall | None = None
        self._slot = next(_slots)
        self._reasons: list[str] = []  # why calls were not replayed, newest last
        self._said: set[str] = set()
        self._futile = self._rest = 0  # recorded calls in a row without a program, and calls that are not recorded
        self._rests = PATIENCE
        self._why = "the first call"
        self._strict = False  # whether libraries are told that values cannot be read
        self._made = 0  # programs

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        recorder = current_session.current()
        if recorder.tape is not None:  # within another's recording: part of that
            return self.fn(*args, **kwargs)
        leaves, tree = _flat(args, kwargs)
        key = (tree, *map(key_of, leaves), *modes())
        found = ""
        for n, program in enumerate(self._programs):
            if program.recorder is not recorder or program.key != key:
                continue
            why = program.misfit(leaves)
            if not why:
                if n:
                    self._programs.insert(0, self._programs.pop(n))
                return program.replay(leaves)
            found = why
        if self._programs:
            self._why = found or other(self._programs[0].key, key)
        if self._rest:
            self._rest -= 1
            args, kwargs = tree_unflatten(given(leaves, None)[0], tree)
            return tree_map(detached, self.fn(*args, **kwargs))
        return self._record(recorder, key, leaves, tree)

    def explain(self) -> str:
        """What became of the function: its programs, why each was made, and what prevented or ended one."""
        name = getattr(self.fn, "__qualname__", "function")
        lines = [f"{name}: {len(self._programs)} program{'' if len(self._programs) == 1 else 's'}"]
        for program in self._programs:
            ops, order = program.answer["ops"], program.answer["schedule"]
            lines.append(f"  program {program.number}: {ops} ops, {program.replays} replays; recorded for: {program.why}")
            if order:
                lines.append(f"    schedule {order['name']}: {order['why'] or _bubbles(order)}")
                lines += [f"    {line}" for line in order.get("said", ())]
            lines += [f"    {line}" for line in backends.saved(program.answer["recomputed"])]
            if program.answer["backend"] != "eager":
                told = backends.lines(program.recorder.session, program.number, program.answer["backend"])
                lines += [f"    {line}" for line in told]
        label = "an earlier call was not kept" if self._programs else "a call was not kept"
        for reason in self._reasons:
            lines.append(f"  {label}: {reason.replace(OUTSIDE, '').replace(SAME, '') if self._programs else reason}")
        return "\n".join(lines)

    # ---- recording

    def _record(self, recorder: Recorder, key: tuple, leaves: list, tree: TreeSpec) -> Any:
        roots = {"": self.fn, "arguments": [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]}
        entry = reach(roots)
        if any([make_capturable(optimizer) for optimizer in entry.optimizers]):
            entry = reach(roots)
        last = self._last if self._last is not None and self._last.key == key and self._last.tape.recorder is recorder else None
        self._last = None
        taken, inputs = given(leaves, last)
        names: dict[int, Any] = {tensor._ref.id: path for path, tensor in reversed(list(entry.tensors()))}
        names.update({t._ref.id: f"argument {k}" for k, t in enumerate(taken) if isinstance(t, RemoteTensor)})
        recorder.flush()
        how, draws, kept = self._how(), Draws(), False
        recorder.code.extend((RECORD, self._slot, how, len(inputs), *[t._ref.id for t in inputs.values()]))
        recorder.flush()
        tape = CallRecording(
            recorder, current_session.Live.origins, random.initial_seed(), random._State.counter, how > 0, self._strict
        )
        try:
            recorder.tape = tape
            args, kwargs = tree_unflatten(taken, tree)
            results = tree_map(detached, self.fn(*args, **kwargs))
            del args, kwargs
            gc.collect()  # what is in cycles ends now, or it would seem to be kept
            recorder.flush()
            tape.finish()
            recorder.tape = None
            now = RecordedCall(tape, key, leaves, names, inputs, settings(entry))
            program = self._seal(last, now, entry, reach(roots), results, draws)
            kept = program is not None
            self._last = None if kept else now  # what it holds is no longer needed
            self._count(kept)
        finally:
            recorder.tape = None
            self._strict |= tape.strict_next
            if not kept:
                recorder.code.extend((DISCARD,))
            ended = tape.take_deferred()
            if ended:
                recorder.code.extend((FREE, len(ended), *ended))
        return results if program is None else program.take()

    def _again(self) -> int:
        """Which cheap values are made again: see FinishCapture.recompute."""
        graphs = (self.backend or current_session.Live.backend) == "cudagraphs"
        return int(graphs) if self.recompute is None else 2 * self.recompute

    def _how(self) -> int:
        """How a call is carried out that is recorded: see ir.instr.RECORD. What a schedule needs is measured op by op."""
        live = current_session.Live
        late = (self.backend or live.backend) == "cudagraphs" and not (self.schedule or live.schedule)
        return 1 + self._again() if late else 0

    def _seal(
        self, last: RecordedCall | None, now: RecordedCall, entry: Reach, leaving: Reach, results: Any, draws: Draws
    ) -> CapturedProgram | None:
        """The program of this call, if it agrees with the one before and nothing prevents it."""
        found = self._prevented(now, entry, leaving, draws)
        if found is None and last is None:
            return None
        if found is None and last is not None:
            found = difference(last.tape, now.tape, last.names, now.names)
            if found is not None:
                found.what += cure(last, now)
        if found is not None:
            self._say(str(found))
            return None
        moved, found = carried(now, entry, leaving)
        if found is not None:
            self._say(str(found))
            return None
        tape, recorder = now.tape, now.tape.recorder
        number = next(_numbers)
        pairs = [list(pair) for pair in moved]
        name, backend = self.schedule or current_session.Live.schedule, self.backend or current_session.Live.backend
        answer = recorder.session.seal(number, name, backend, pairs, tape.seed, tape.counter, self._again())
        if answer["why"]:
            self._say(answer["why"])
            return None
        order, answer["backend"] = answer["schedule"], backend
        if order and order["why"] and (self.schedule or order["pipeline"]):  # the config's is for steps that can have it
            self._warn(f"schedule {order['name']} is not used: {order['why']}")
        read = tape.read()
        leaves, tree = tree_flatten(results)
        made = tape.first
        own = {t._ref.id for t in now.inputs.values()}
        program = CapturedProgram(
            number, recorder, now.key, Guard(leaving), now.inputs,
            {k: t for k, t in enumerate(now.leaves) if isinstance(t, RemoteTensor) and k not in now.inputs},
            grads_of(entry, leaving, read),
            [ProgramResult(r) if isinstance(r, RemoteTensor) and (r._ref.id >= made or r._ref.id in own) else r for r in leaves],
            tree, tape.draws(), self._why, answer,
            [t for walk in (entry, leaving) for _, t in walk.tensors() if t._ref.id in read or t._ref.id >= made],
        )  # fmt: skip
        self._programs.insert(0, program)
        del self._programs[MOST:]
        self._made += 1
        if self._made == MOST:
            hint = "; with lr=torch.tensor(..., device='remote') one program serves all rates" if "['lr']" in self._why else ""
            self._warn(f"{MOST} programs were recorded, each at the cost of two eager calls; the last for: {self._why}{hint}")
        return program

    def _prevented(self, now: RecordedCall, entry: Reach, leaving: Reach, draws: Draws) -> Difference | None:
        """What this call did that a replay would not do, or could not see."""
        tape = now.tape
        if not tape.ops:
            return Difference("", "the function does nothing with remote tensors")
        if tape.prevents:
            return tape.prevents[0]
        if entry.overflow or leaving.overflow:
            return Difference("", "the function reaches too many Python objects to compare at each call; have it use fewer")
        if entry.opaque or leaving.opaque:
            return Difference("", f"{(entry.opaque or leaving.opaque)[0]}; pass the part that is needed as an argument")
        if draws.found():
            return Difference("", f"the function draws random numbers from {draws.found()}{OUTSIDE}")
        for tensor, n in tape.read().items():
            if tensor not in now.names:
                op = tape.ops[n]
                text = f"{op.name} uses a tensor that is not in arguments, closure or globals; pass it as an argument"
                return Difference(tape.origins.where(op.origin), text)
        return side_effect(entry, leaving, tape.first)

    def _count(self, kept: bool) -> None:
        """After some calls in a row that came to nothing, say why, and try again only later."""
        if kept:
            self._futile, self._rests = 0, PATIENCE
            return
        self._futile += 1
        if self._futile < PATIENCE:
            return
        self._futile, self._rest, self._rests = PATIENCE - 2, self._rests, min(2 * self._rests, RESTS)
        reason = self._reasons[-1] if self._reasons else "no two calls agreed"
        self._warn(f"runs eagerly: {reason}")

    def _warn(self, text: str) -> None:
        kind = _NUMBER.sub("#", text)  # a learning rate that changes is one reason, not one a step
        if kind not in self._said and len(self._said) < 100:
            self._said.add(kind)
            log.warning("%s: %s", getattr(self.fn, "__qualname__", "a compiled function"), text)

    def _say(self, reason: str) -> None:
        """Keep a reason, the newest last."""
        self._reasons = [*[r for r in self._reasons if r != reason][-19:], reason]


def _bubbles(order: dict) -> str:
    idle = ", ".join(f"{100 * part:.1f}%" for part in order["bubble"])
    return f"{order['stages']} stages, {order['micro_batches']} micro-batches; bubble by simulation {idle}"

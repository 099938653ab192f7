"""The run: cases of each part in turn, beside honest programs, and a look at everything after each case."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gt.ir.instr import FREE
from gt.ir.spec import Spec
from gt.ir.template import Out, T, Template
from gt.wire import codec
from gt.wire.messages import Describe, Described, Failed, Fetch, Message, Observe, Ops, Value
from tests.attacks import mutate, operators, stranger
from tests.attacks.beside import PLACES, STALL, START, Holder, Trainers
from tests.attacks.case import Case, Player
from tests.attacks.ground import Ground, Sign
from tests.attacks.honest import CONFIGS
from tests.attacks.peer import INTERNAL, Leaks
from tests.attacks.record import load
from tests.attacks.report import CRASH, Counts, Findings, at
from tests.attacks.watcher import Watcher, lies
from tests.helpers.limits import limit

# Cases of one part in a turn of the engine
EACH = {"strangers": 3, "messages": 20, "puppets": 6, "observers": 4, "costs": 3, "ops": 60}
BESIDE = 10  # cases between two looks at the honest
LONG = limit(5)  # seconds that one op may take before its worker is taken for stuck
NEWCOMERS = 3  # honest clients that come during one stranger's attack
BUSY = 0.05  # seconds of the dispatcher's CPU that one message may cost
SESSION = 40  # ops that one attacker's session tries
LARGEST = 4 << 20  # bytes of a value that is fetched
EMPTY = ("empty", "resize")
SAID = [target for target in mutate.TARGETS if target[0] != "worker"]  # puppets say the others
OBSERVED = [(Observe(0, 500), ()), (Observe(1, 500), ()), (Observe(1, 60_000), ())]


@dataclass
class Engine:
    folder: Path
    seed: int = 0
    backend: str = "torch"
    parts: tuple[str, ...] = tuple(EACH)
    modes: tuple[str, ...] = ("eager", "captured", "pipelined")
    only: str = ""  # part of the names of ops
    counts: Counts = field(default_factory=Counts)
    begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.findings = Findings(self.folder)
        self.ground = Ground(self.folder, self.backend)
        self.trainers = Trainers(self.folder, self.modes)
        self.holder = Holder()
        self.watcher = Watcher()
        self.leaks = Leaks(self.holder.secret[:16], self.holder.secret.hex().encode())
        self.recordings: dict[str, list] = {}
        self.canary = self.folder / "canary"
        self._died = 0.0  # when a worker died last
        self._leaked = self._told = 0
        self._case: Case = Case("", "")
        self._numbers = dict.fromkeys(EACH, 0)
        self._order: list[str] = []
        self._next_op = 0
        self._player: Player | None = None
        self._op: OpSession | None = None

    # ---- the whole

    def run(self, cases: int = 1 << 62, seconds: float = float("inf")) -> None:
        """So many cases, or for so long once all are up; whatever is found is in `findings`."""
        self.ground.start()
        self.trainers.start()
        try:
            self._alone()
            self.begin, done = time.monotonic(), 0
            until = self.begin + seconds
            for part in itertools.cycle(self.parts):
                for _ in range(EACH[part]):
                    if done >= cases or time.monotonic() > until:
                        return
                    self.one(part)
                    done += 1
                self._end_session()
                self._beside(wait=True)
        finally:
            self._end_session()
            with contextlib.suppress(Exception):
                self._beside(wait=True)
            self.watcher.stop()
            self.holder.stop()
            self.trainers.stop()
            for sign in self.ground.stop():
                self.add(sign)

    def _alone(self) -> None:
        """Two rounds before anything happens: recordings, and the losses that all others have to have."""
        for _ in range(2):
            self.trainers.ask(self.ground)
            for sign in [*self.trainers.collect(START, START), *self.holder.turn(self.ground)]:
                raise AssertionError(f"before any attack: {sign}")
        for mode in self.modes:
            self.recordings[mode] = load(self.folder / f"{mode}.traffic")

    def one(self, part: str) -> None:
        """One case and a look at what came of it."""
        self._numbers[part] += 1
        self.counts.cases[part] += 1
        name = f"{self.seed}:{part}:{self._numbers[part]}"
        if part != "ops":
            self._end_session()
            self._case = Case(part, name, backend=self.backend)
        getattr(self, f"_{part}")(random.Random(name), name)
        self.look()
        if sum(self.counts.cases.values()) % BESIDE == 0 and part != "costs":
            self._beside()

    def look(self) -> None:
        """Look for signs in the processes and in the answers to attackers."""
        signs = self.ground.look()
        if self.leaks.seen > self._leaked:
            self._leaked = self.leaks.seen
            signs.append(Sign("secret read", self._case.part, "an attacker was sent bytes of another session"))
        if len(self.leaks.texts) > self._told and not any(sign.kind == "internal error" for sign in signs):
            text = self.leaks.texts[self._told]
            signs.append(Sign("internal error", text.partition(INTERNAL)[2].strip(": ").split("'")[0][:90], text))
        self._told = len(self.leaks.texts)
        if self.canary.exists():
            self.canary.unlink()
            signs.append(Sign("file written", self._case.text.partition("(")[0], self._case.text))
        died = [sign for sign in signs if sign.kind == "process died"]
        for sign in signs:
            if sign in died and self._case.part == "ops" and sign.cause == "gt.worker":
                sign = Sign(CRASH, self._case.text.partition("(")[0], f"{self._case.text}: {sign.text}")
            self.add(sign)
        if died or not self.ground.whole:
            self._died = time.monotonic()
            self._end_session()
            self.ground.heal()

    def add(self, sign: Sign) -> None:
        self.findings.add(sign, self._case, time.monotonic() - self.begin)

    def _beside(self, wait: bool = False) -> None:
        """A round of the honest, whose errors are right where a worker has just died."""
        deaths = time.monotonic() - self._died < 15
        signs = self.trainers.collect(0.0, deaths=deaths)
        signs += self.holder.turn(self.ground, deaths)
        signs += self.watcher.look(self.ground, deaths)
        self.trainers.ask(self.ground)
        if wait:
            signs += self.trainers.collect(30.0, deaths=time.monotonic() - self._died < 15)
        for sign in signs:
            self.add(sign)

    def _end_session(self) -> None:
        if self._player is not None:
            self._player.close()
            self._player = self._op = None

    def _new_player(self) -> Player:
        self._end_session()
        self._player = Player(self.ground.address, self.ground.token, self.leaks, self._case)
        return self._player

    # ---- parts

    def _strangers(self, rng: random.Random, name: str) -> None:
        how = rng.choice(stranger.HOWS)
        self._case.text = f"a stranger: {how}"
        player = self._new_player()
        attack = threading.Thread(target=player.play, args=({"do": "tcp", "seed": name, "how": how},), daemon=True)
        attack.start()
        for _ in range(NEWCOMERS):  # who comes while strangers come and go
            for sign in self.holder.turn(self.ground, newcomer=True):
                self.add(sign)
        attack.join(STALL)

    def _messages(self, rng: random.Random, name: str) -> None:
        role, cls, field = SAID[(self._numbers["messages"] - 1) % len(SAID)]
        mode = rng.choice(self.modes)
        recording = self.recordings[mode] if role == "client" else OBSERVED
        steps, self._case.text = mutate.sequence(rng, recording, role, (cls, field))
        self.converse(rng, steps, CONFIGS[mode] if role == "client" else "", role)

    def converse(self, rng: random.Random, steps: list[mutate.Step], config: str, role: str = "client") -> None:
        """A session, or an observer, that says these."""
        player = self._new_player()
        changed = None
        if rng.random() < 0.08:
            changed = self._wrong_hello(rng, config, role)
        player.connect(config=config, workers=2 if role == "client" else 0, changed=changed, role=role)
        keys: dict[int, int] = {}  # of the recording -> how many were asked for before it
        for body, frames, what in steps:
            self.counts.mutations[what] += bool(what)
            if not what and body[1:2] == HOST:
                need = keys.setdefault(codec.unpack(body).key, len(keys))
                parts = [_text(f) for f in frames]
                player.play({"do": "host", "as": "client", "body": _text(body), "frames": parts, "need": need})
            else:
                player.send(body, frames)
            if player.peers["client"].lost:
                break
        if rng.random() < 0.15:
            player.play({"do": "leave", "as": "client"})  # in the middle of it
        else:
            player.settle(seconds=0.5)  # what waits for what never comes is left

    def _wrong_hello(self, rng: random.Random, config: str, role: str) -> bytes:
        from gt.wire.link import hello

        message: Message = hello(role, config, "attack.yaml", switches={"workers": 2} if role == "client" else {})
        if rng.random() < 0.3:
            return mutate.bytes_changed(rng, codec.pack(message))
        new, name = mutate.field_changed(rng, message)
        self.counts.mutations[f"Hello.{name}"] += 1
        self._case.text += f", Hello.{name}"
        return mutate._flat((new, (), ""))[0]

    def _puppets(self, rng: random.Random, name: str) -> None:
        """A worker that lies, and a client of the attacker's own that uses it."""
        player = self._new_player()
        puppet = player.play({"do": "puppet", "as": "worker", "seed": name})
        index = puppet.index
        self._case.text = f"a worker that lies, with index {index}"
        if index >= self.ground.workers:
            config = f"p: {{shard: {{axis: 0, workers: [0, {index}]}}}}\nq: {{shard: {{axis: 0, workers: [{index}]}}}}\n"
            mode = rng.choice([m for m in self.modes if m != "pipelined"])
            player.connect(config=config)
            for message, frames in self.recordings[mode][:40]:
                if isinstance(message, Ops):
                    message = Ops(message.seq, message.templates, _regrouped(rng, message.origins), message.code)
                player.send(message, frames)
            player.settle(seconds=1.0)
        player.play({"do": "lie", "as": "worker", "target": self._numbers["puppets"] - 1})
        for what in puppet.changed:
            self.counts.mutations[what] += 1
        self._end_session()

    def _observers(self, rng: random.Random, name: str) -> None:
        """An observer that lies, or a client that asks for traces."""
        greeting, bodies, changed = lies(rng)
        self._case.text = f"an observer or a trace: {', '.join(changed)}"
        player = self._new_player()
        player.connect(changed=greeting)
        for body in bodies:
            player.send(body)
            if player.peers["client"].lost:
                break
        for what in changed:
            self.counts.mutations[what] += 1
        player.settle(seconds=0.5)

    def _costs(self, rng: random.Random, name: str) -> None:
        """One message that is as large as it may be, with nobody beside: what it costs the dispatcher."""
        from tests.attacks.costs import heavy

        hello, steps, text = heavy(rng, self.recordings[self.modes[0]])
        self._case.text = text
        self.trainers.collect(30.0)
        self.holder.turn(self.ground)
        player = self._new_player()
        before = self.ground.cpu()
        player.connect(changed=hello)
        for body, frames in steps:
            player.send(body, frames)
        player.settle(seconds=30.0)
        cost = self.ground.cpu() - before
        kind = text.partition(":")[0]
        self.counts.costs[kind] = max(self.counts.costs.get(kind, 0.0), cost)
        if cost > BUSY * (len(steps) + 2):
            self.add(Sign("dispatcher busy", kind, f"{text}: {cost:.2f} s of its CPU for {len(steps) + 1} messages"))

    def _ops(self, rng: random.Random, name: str) -> None:
        """An op with wild arguments, or a name that is no op."""
        table = operators.schemas()
        if not self._order:
            self._order = operators.tried([n for n in sorted(table) if self.only in n], self.seed)
        if self._op is None or self._op.tried >= SESSION or self._op.over:
            self._case = Case("ops", name, backend=self.backend)
            self._op = OpSession(self._new_player(), rng)
        if rng.random() < 0.04:
            said = self._op.foreign(rng)
            self._case.text = said[0]
            if said[1]:
                self.add(Sign("foreign name", "executed", said[0]))
            return
        op = table[self._order[self._next_op % len(self._order)]]
        self._next_op += 1
        self._case.text = op.name
        self.counts.ops.add(op.name)
        outcome = self._op.attempt(rng, op, str(self.canary), self._case)
        if outcome in ("value", "executed"):
            self.counts.carried_out.add(op.name)
        if outcome == "not zero":
            self.add(Sign("uninitialised", op.name, f"{self._case.text} gave bytes that nobody wrote"))
        if outcome == "silent" and self.ground.whole:
            self.add(Sign("op holds worker", op.name, f"{self._case.text} is not over after {LONG:g} s"))
            for pid, role in self.ground.processes().items():
                if role.startswith("gt.worker"):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            self.ground._pids = {pid: role for pid, role in self.ground._pids.items() if role == "gt.server"}

    # ---- the end

    def confirm(self, most: int = 20) -> None:
        """Play the first case of each finding again on fresh processes, and leave out steps that it does not need."""
        from tests.attacks.confirm import confirm

        for finding in list(self.findings)[:most]:
            if finding.kind != "process left":
                finding.again, finding.steps = confirm(Path(finding.file), finding.kind, self.folder / "again")

    def result(self) -> dict[str, Any]:
        """The figures, in the order of the document's table."""
        counts, trips = self.counts, self.holder.trips
        return {
            "seconds": round(time.monotonic() - self.begin),
            "cases": ", ".join(f"{part} {number}" for part, number in sorted(counts.cases.items())),
            "messages made wrong": sum(counts.mutations.values()),
            "kinds of message and field": len(counts.mutations),
            "op overloads tried": f"{len(counts.ops)} of {len(operators.schemas()) if 'ops' in self.parts else 0}",
            "of which gave a result at least once": len(counts.carried_out),
            "honest rounds": self.trainers.rounds,
            "honest losses compared": self.trainers.losses,
            "honest rounds that a worker's crash took along": self.trainers.excused,
            "slowest honest round (s)": round(self.trainers.slowest, 2),
            "honest round trips": len(trips),
            "views of an observer": self.watcher.views,
            "round trip p50 (ms)": round(at(trips, 0.5) * 1e3, 1),
            "round trip p99 (ms)": round(at(trips, 0.99) * 1e3, 1),
            "newcomer's welcome, slowest (s)": round(max(self.holder.newcomers, default=0.0), 2),
            "server grew by at most (MiB)": self.ground.most.get("server", 0) >> 20,
            "a worker grew by at most (MiB)": self.ground.most.get("worker", 0) >> 20,
            "costliest message (ms of the dispatcher)": _costliest(counts.costs),
            "starts of the server": self.ground.starts,
            "findings besides ops that crash a worker": sum(f.kind != CRASH for f in self.findings),
            "ops that crash a worker": sum(f.kind == CRASH for f in self.findings),
            "findings": [asdict(f) for f in self.findings],
        }


def _costliest(costs: dict[str, float]) -> str:
    if not costs:
        return "not measured"
    kind = max(costs, key=lambda key: costs[key])
    return f"{costs[kind] * 1e3:.0f} ({kind})"


def _regrouped(rng: random.Random, origins: list) -> list:
    return [[*row[:3], rng.choice(("p", "q")), *row[4:]] for row in origins]


def _text(data: bytes) -> str:
    from tests.attacks.case import text_of

    return text_of(data)


def _host() -> bytes:
    from gt.wire.messages import UploadChunk

    return codec.pack(UploadChunk(0, 0, 0))[1:2]


HOST = _host()


class OpSession:
    """An attacker's session with a pool of operands, that tries op after op."""

    def __init__(self, player: Player, rng: random.Random) -> None:
        self.player = player
        self.tried = self.seq = 0
        self.numbers = itertools.count(16)
        self.requests = itertools.count(1)
        uploaded = operators.pool(rng)
        self.forms = [form for form, _ in uploaded] + operators.expanded()  # tensor n + 1 has the form n
        self.ids = itertools.count(len(self.forms) + 1)
        player.connect(config=PLACES, workers=2)
        templates, code, frames = [], [], []
        for n, (form, data) in enumerate(uploaded):
            upload = Template("gt.upload.default", (), (), (), 1, (Out("new", Spec.from_wire(form)),))
            templates.append([next(self.numbers), upload.wire()])
            code += [templates[-1][0], 1, n, n + 1]
            frames.append(data)
        for n, (source, *sizes, offset) in enumerate(operators.EXPANDED, len(uploaded)):
            ins, out = (Spec.from_wire(self.forms[source]),), Out("view", Spec.from_wire(self.forms[n]), 0)
            view = Template("aten.as_strided.default", (T(0), *map(list, sizes), offset), (), ins, 0, (out,))
            templates.append([next(self.numbers), view.wire()])
            code += [templates[-1][0], 1, source + 1, n + 1]
        self.batch(templates, code, frames, [[1, "attack.py", 1, rng.choice("ab"), False, -1]])
        self.over = player.settle(seconds=20.0) is None

    def batch(self, templates: list, code: list, frames: list = [], origins: list = []) -> None:  # noqa: B006
        self.player.send(Ops(self.seq, templates, origins, code), frames, numbered=True)
        self.seq += 1

    def ask(self, message: Callable[[int], Message], seconds: float = LONG) -> Message | None:
        request = next(self.requests)
        self.player.send(message(request))
        answer = self.player.wait(request, seconds=seconds)
        self.over = self.over or bool(self.player.peers["client"].lost)
        return answer

    def attempt(self, rng: random.Random, op: operators.Op, canary: str, case: Case) -> str:
        """refused, failed, executed, value, not zero, or silent if no answer came."""
        self.tried += 1
        self.player.group = self.tried
        call = operators.Call(rng, op, self.forms, canary)
        case.text = f"{op.name}({json.dumps([call.args, call.kwargs], default=str)[:300]})"
        number = next(self.numbers)
        said = None if rng.random() < 0.9 else rng.choice(self.forms)
        made = [next(self.ids) for kind, _, _ in call.outs if kind in ("new", "view")]
        self.batch([[number, call.template(op.name, said)]], [number, 1, *(n + 1 for n in call.ins), *call.values, *made])
        if not made or said is not None:
            answer = self.ask(lambda request: Fetch(request, made[0] if made else -1))
            return self._outcome(answer)
        answer = self.ask(lambda request: Describe(request, made))
        if not isinstance(answer, Described):
            return self._outcome(answer)
        outcome = "executed"
        for tensor, wire in zip(made, answer.specs, strict=False):
            outcome = self._read(rng, tensor, wire, op.name) or outcome
        self.batch([], [FREE, len(made), *made])
        return outcome

    def _read(self, rng: random.Random, tensor: int, wire: list, name: str) -> str:
        """Fetch a result and a copy of it."""
        try:
            form = Spec.from_wire(wire)
        except ValueError:
            return ""
        if form.nbytes > LARGEST or self.over:
            return ""
        if not isinstance(self.ask(lambda request: Fetch(request, tensor)), Value):
            return ""
        whole = Spec(form.shape, _rows(form.shape), 0, form.dtype)
        number, copy = next(self.numbers), next(self.ids)
        clone = Template("aten.clone.default", (T(0),), (), (form,), 0, (Out("new", whole),))
        self.batch([[number, clone.wire()]], [number, 1, tensor, copy])
        peer = self.player.peers["client"]
        del peer.answers[:]
        answer = self.ask(lambda request: Fetch(request, copy))
        self.batch([], [FREE, 1, copy])
        if not isinstance(answer, Value):
            return ""
        peer.wait(lambda _: len(peer.bytes_of({key for key, _ in answer.pieces})) >= form.nbytes, 2.0)
        data = peer.bytes_of({key for key, _ in answer.pieces})
        fresh = any(word in name for word in EMPTY) and not name.endswith("_.default")
        return "not zero" if fresh and any(data) else "value"

    def _outcome(self, answer: Message | None) -> str:
        if answer is None:
            return "refused" if self.player.peers["client"].lost else "silent"
        return "failed" if isinstance(answer, Failed) or self.over else "executed"

    def foreign(self, rng: random.Random) -> tuple[str, bool]:
        """A name that is no op, called: its text, and whether that was executed."""
        self.tried += 1
        self.player.group = self.tried
        name = f"aten.{rng.choice(mutate.NAMES)}.{rng.choice(('__call__', '__call__', *mutate.NAMES))}"
        args = [rng.choice(["pwn", "add", {"layout": rng.choice(mutate.NAMES)}, 0]) for _ in range(rng.randrange(3))]
        number = next(self.numbers)
        self.batch([[number, [name, args, {}, [], 0, [["none", None, -1]], [], False, False]]], [number, 1])
        answer = self.ask(lambda request: Fetch(request, -1))
        peer = self.player.peers["client"]
        failed = bool(peer.heard(Failed)) or self.over or not isinstance(answer, Value)
        del peer.answers[:]
        return f"{name}({args})", not failed


def _rows(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, step = [], 1
    for n in reversed(shape):
        stride.insert(0, step)
        step *= max(n, 1)
    return tuple(stride)

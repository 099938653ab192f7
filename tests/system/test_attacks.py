"""A minute of the engine of attacks, bounded by work and from one seed, and that the engine sees what it is there to see."""

from __future__ import annotations

import json
import os
import random
import signal
from dataclasses import fields
from pathlib import Path

import pytest

from gt.wire import codec
from gt.wire.link import MAY_SEND
from gt.wire.messages import Failed, Fetch, Hello, Ops, Piece
from tests.attacks import matrix, mutate, operators
from tests.attacks.beside import Trainers
from tests.attacks.case import OWED, Case, Player, replay
from tests.attacks.engine import EACH, SAID, Engine
from tests.attacks.ground import Ground, alive
from tests.attacks.peer import Leaks
from tests.attacks.report import CRASH
from tests.helpers.processes import wait_until

TURN = sum(EACH.values())  # cases of all parts


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3])
def test_attacks_of_every_kind_harm_no_honest_program(tmp_path: Path, seed: int) -> None:
    engine = Engine(tmp_path, seed)
    engine.run(cases=2 * TURN)
    found = engine.result()
    harm = [finding for finding in found["findings"] if finding["kind"] != CRASH]
    assert not harm, json.dumps(harm, indent=1)
    assert engine.counts.cases == {part: 2 * each for part, each in EACH.items()}
    assert engine.trainers.losses >= 3 * 6 * len(engine.modes) and len(engine.holder.trips) >= 20
    assert engine.watcher.views >= 4
    assert sum(engine.counts.mutations.values()) >= 30 and len(engine.counts.carried_out) >= 20


CELLS = (
    "SEGV worker replay", "TERM worker all-reduce", "STOP worker schedule", "KILL client upload", "SEGV dispatcher capture",
)  # fmt: skip


@pytest.mark.slow
def test_who_is_harmed_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    wanted = [cell for cell in matrix.cells([]) if cell.name in CELLS]
    assert len(wanted) == len(CELLS)
    for cell in matrix.run(tmp_path, wanted, 64 << 20):
        assert cell.good, cell


# ---- the engine itself


def test_every_field_of_every_message_that_a_peer_may_send_is_made_wrong() -> None:
    rng = random.Random(1)
    for role, (sent, _) in MAY_SEND.items():
        assert sent < set(mutate.SENT[role])
    assert {(role, cls, name) for role, cls, name in mutate.TARGETS} == {
        (role, cls, name)
        for role, (sent, _) in MAY_SEND.items()
        for cls in {*sent, Hello}
        for name in [one.name for one in fields(cls)] or [""]
    }
    kinds = sum(len(sent) for sent in mutate.SENT.values())
    assert len({(role, cls) for role, cls, _ in mutate.TARGETS[:kinds]}) == kinds, "every message once before any comes again"
    assert EACH["messages"] * 2 >= len({cls for role, cls, _ in SAID}) and EACH["puppets"] * 2 >= len(mutate.SENT["worker"]) - 1
    for cls in set().union(*mutate.SENT.values()):
        changed = set()
        for _ in range(400):
            message = mutate.default(cls)
            new, name = mutate.field_changed(rng, message)
            if new != message:
                changed.add(name)
        assert changed == {one.name for one in fields(cls)}, cls


def test_a_seed_gives_the_same_attack_again() -> None:
    recording = [(Ops(0, [], [], [0, 1, 5]), ()), (Fetch(1, 5), ()), (Fetch(2, 5), (b"x",))]
    first, again = (mutate.sequence(random.Random("7:messages:1"), recording) for _ in range(2))
    others = [mutate.sequence(random.Random(f"7:messages:{n}"), recording) for n in range(20)]
    assert first == again and len({str(other) for other in others}) > 15


def test_ops_are_called_with_arguments_of_their_types() -> None:
    operands = [form for form, _ in operators.pool(random.Random(0))]
    name = operators.Op(
        "aten.add.Tensor",
        (("self", operators.Kind("Tensor")), ("other", operators.Kind("Tensor"))),
        (("alpha", operators.Kind("Scalar")),),
        (operators.Kind("Tensor"),),
    )
    for seed in range(50):
        call = operators.Call(random.Random(seed), name, operands, "")
        assert all(set(arg) == {"t"} and arg["t"] < len(call.ins) for arg in call.args)
        assert [out[0] for out in call.outs] == ["new"] and not call.writes


def test_bytes_of_another_session_are_seen_in_values_and_in_texts() -> None:
    leaks = Leaks(b"secret-of-another")
    leaks.look(Piece(1, 0, 8), (b"12345678",))
    assert not leaks.seen
    leaks.look(Piece(1, 0, 40), (b"...secret-of-another...",))
    leaks.look(Failed(1, {"kind": "OpFailed", "message": "in secret-of-another.py"}), ())
    assert leaks.seen == 2
    leaks.look(Failed(1, {"kind": "SystemFailure", "message": "internal error of the server: KeyError"}), ())
    assert len(leaks.texts) == 1


def test_wrong_losses_and_errors_of_the_honest_are_signs(tmp_path: Path) -> None:
    trainers = Trainers(tmp_path, ("eager",))
    read, write = os.pipe()
    trainers._answers["eager"], trainers._asked["eager"] = read, 0.0
    rows = [{"losses": 6, "seconds": 1, "wrong": "[1], alone [2]"}, {"losses": 6, "seconds": 1, "error": "WorkerLost: w0"}]
    os.write(write, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    assert [sign.kind for sign in trainers.collect()] == ["honest wrong", "honest error"]
    trainers._asked["eager"] = 0.0
    os.write(write, json.dumps(rows[1]).encode() + b"\n")
    assert not trainers.collect(deaths=True) and trainers.excused == 1
    trainers._asked["eager"] = 0.0
    assert [sign.kind for sign in trainers.collect()] == ["honest stall"]
    os.close(read)
    os.close(write)


def test_dead_workers_large_logs_and_forged_lines_are_signs(tmp_path: Path) -> None:
    ground = Ground(tmp_path, "numpy", 1)
    ground.start()
    try:
        assert not ground.look()
        os.kill(old := ground.pid_of("gt.worker 0"), signal.SIGKILL)
        assert wait_until(lambda: not alive(old)) and not ground.heal() and ground.whole  # by the nursery, which tells nobody
        pid = ground.pid_of("gt.worker 0")
        ground._pids = {**ground._pids, 1 << 30: "gt.worker 0"}
        with (tmp_path / "stderr.1").open("ab") as file:
            file.write(b'Traceback (most recent call last):\n  File "/x/core.py", line 7, in f\nKeyError: 3\n' + bytes(2 << 20))
        with (tmp_path / "instructions.1").open("ab") as file:
            file.write(b"\n    1.000000        0 CONNECT     c\nforged\n\n")
        signs = ground.look()
        kinds = [sign.kind for sign in signs]
        # The line of the worker that came back may be before or after; an empty line is forged too.
        assert kinds[:3] == ["process died", "internal error", "log grows"] and set(kinds[3:]) == {"log forged"}, kinds
        assert sum("forged" in sign.text for sign in signs) == 1
        assert pid in ground.processes()
    finally:
        assert not ground.stop()


def test_a_case_is_played_again_from_its_file(tmp_path: Path) -> None:
    ground = Ground(tmp_path, "numpy", 1)
    ground.start()
    try:
        leaks = Leaks(b"nothing")
        case = Case("messages", "1", backend="numpy")
        player = Player(ground.address, ground.token, leaks, case)
        assert player.connect() is not None
        player.send(codec.pack(Fetch(1, 99)))
        answer = player.wait(1, seconds=OWED)
        assert answer is not None and "is not of this session" in str(answer)
        player.close()
        case.save(tmp_path / "case.json")
        again = Case.load(tmp_path / "case.json")
        assert again.steps == case.steps
        heard: list[str] = []
        leaks.look = lambda message, frames: heard.append(str(message))  # type: ignore[method-assign]
        replay(again, ground.address, ground.token, leaks)
        assert any("is not of this session" in text for text in heard)
    finally:
        assert not ground.stop()

"""A finding played again on fresh processes, with fewer and fewer steps."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

from tests.attacks.beside import Holder
from tests.attacks.case import Case, replay
from tests.attacks.ground import Ground, Sign
from tests.attacks.peer import Leaks
from tests.attacks.report import CRASH

SAME = {CRASH: "process died"}
JUDGED = {
    "process died",
    "memory",
    "secret read",
    "internal error",
    "dispatcher busy",
    "log grows",
    "log forged",
    "honest stall",
}
TRIES = 16  # replays that make a case shorter


def signs_of(case: Case, folder: Path) -> list[Sign]:
    """The signs of a replay, on a server and workers of its own."""
    shutil.rmtree(folder, ignore_errors=True)
    ground = Ground(folder, case.backend)
    ground.start()
    holder = Holder()
    leaks = Leaks(holder.secret[:16], holder.secret.hex().encode())
    try:
        signs = holder.turn(ground) + holder.turn(ground)
        before = ground.cpu()
        replay(case, ground.address, ground.token, leaks)
        cost = ground.cpu() - before
        time_of_death = time.monotonic() + 0.5
        while time.monotonic() < time_of_death and not signs:
            signs += ground.look()
        signs += holder.turn(ground)
        if leaks.seen:
            signs.append(Sign("secret read", case.part, "bytes of another session"))
        if leaks.texts:
            signs.append(Sign("internal error", "", leaks.texts[0]))
        if cost > 0.05 * (len(case.steps) + 1):
            signs.append(Sign("dispatcher busy", "", f"{cost:.2f} s"))
        return signs
    finally:
        holder.stop()
        ground.stop()


def shows(case: Case, kind: str, folder: Path) -> bool:
    return any(sign.kind == kind for sign in signs_of(case, folder))


def confirm(path: Path, kind: str, folder: Path) -> tuple[str, int]:
    """(whether a replay shows a sign of this kind, steps left); the file is the shortest case that did."""
    case = Case.load(path)
    kind = SAME.get(kind, kind)
    if kind not in JUDGED:
        return "not judged", len(case.steps)
    if not shows(case, kind, folder):
        return "no", len(case.steps)
    groups = sorted({step["group"] for step in case.steps if "group" in step})
    tries, size = 0, max(len(groups) - 1, 1)
    while len(groups) > 1 and tries < TRIES and size >= 1:
        for start in range(0, len(groups), size):
            left = groups[:start] + groups[start + size :]
            tries += 1
            shorter = replace(case, steps=[step for step in case.steps if step.get("group", 0) in (0, *left)])
            if left and shows(shorter, kind, folder):
                shorter.save(path)
                case, groups = shorter, left
                break
        else:
            size //= 2
    return "yes", len(case.steps)

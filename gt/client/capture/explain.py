"""What workers say of a program's backend, as lines for explain()."""

from __future__ import annotations

from typing import Any

from gt.client.current_session import Live
from gt.client.device.torch_remote import synchronize
from gt.client.session import Session
from gt.errors import GTError
from gt.ir.schedules import size


def lines(session: Session, program: int, asked: str) -> list[str]:
    """Which backend carries out a program where, how much of it is compiled, and why the rest is not."""
    failed: GTError | None = None
    try:
        if Live.recorder is not None and Live.recorder.session is session:
            synchronize()  # or it would be what they have got to
    except GTError as error:
        failed = error
    try:
        workers = session.stats(program)["workers"]
    except GTError as error:
        return [f"backend {asked}: the workers did not answer: {error}"]
    finally:
        if failed is not None:
            session.put_off(failed)
    said: dict[tuple[str, ...], list[str]] = {}
    for worker in workers:
        if worker.get("plans"):
            said.setdefault(tuple(_worker(worker["plans"])), []).append(worker["name"])
    found = []
    for (backend, *rest), names in said.items():
        found.append(f"backend {backend} on {', '.join(names)}: {rest[0]}")
        found += [f"  {line}" for line in rest[1:]]
    return found


def saved(recomputed: dict[str, list[int]]) -> list[str]:
    """What is made again rather than kept, and what that saves, by workers of which the same is true."""
    said: dict[str, list[str]] = {}
    for name, (values, before, after) in recomputed.items():
        sizes = " instead of ".join(map(size, (after, before)))
        said.setdefault(f"{values} values are made again: the step makes at most {sizes}", []).append(name)
    return [f"{text} on {', '.join(names)}" for text, names in said.items()]


def _worker(plans: list[dict[str, Any]]) -> list[str]:
    """Its backend, then lines. A long program has several plans."""
    first = plans[0]
    if first["backend"] == "eager":
        return ["eager", first["why"]]
    count = {key: sum(plan[key] for plan in plans) for key in ("segments", "distinct", "compiled")}
    text = f"{count['segments']} segments, {count['compiled']} compiled, {count['distinct']} distinct"
    if not all(plan["ready"] or not plan["segments"] for plan in plans):
        text = f"{count['segments']} segments, compiled after the first replay"
    graphs = sum(plan["graphs"] for plan in plans)
    if graphs:
        text += f", {graphs} CUDA graph{'s' if graphs > 1 else ''}"
    if first["why"]:
        text = f"{first['why']}; {text}"
    reasons: dict[str, int] = {}
    for number, why in (row for plan in plans for row in plan["reasons"]):
        reasons[why] = reasons.get(why, 0) + number
    return [first["backend"], text, *(f"{number} not as asked for: {why}" for why, number in reasons.items())]

"""Workers' reports on a program's backend and its recomputed values, as lines of text for `explain()`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from gt.client.capture.program.captured_program import CapturedProgram
from gt.client.current_session import Current
from gt.client.device.torch_remote import synchronize
from gt.client.session import Session
from gt.errors import GTError
from gt.ir.text import size

MAX_PATHS = 12  # attributes that explain() lists


def program_lines(program: CapturedProgram) -> list[str]:
    """A program's ops and replays, its schedule, its backend and its measures to save memory, as lines. May wait."""
    answer = program.answer
    lines = [f"  program {program.number}: {answer['ops']} ops, {program.replays} replays; recorded for: {program.why}"]
    order = answer["schedule"]
    details: list[str] = []
    if order:
        details = [f"schedule {order['name']}: {order['why'] or _bubble_text(order)}", *order.get("said", ())]
    details += recompute_lines(answer["recomputed"]) + batch_lines(answer["batched"])
    details += host_step_lines(answer.get("advanced", {}))
    if program.steps:
        details.append(f"{_counted(len(program.steps), 'scheduler')} stepped after each replay")
    if answer["backend"] != "eager":
        details += backend_lines(program.recorder.session, program.number, answer["backend"])
    return lines + [f"    {line}" for line in details]


def unread_lines(paths: list[str]) -> list[str]:
    """The attributes that a function's calls do not use, and that are not compared, as a line."""
    more = f" and {len(paths) - MAX_PATHS} more" if len(paths) > MAX_PATHS else ""
    return [f"  not compared, since the calls do not use it: {', '.join(paths[:MAX_PATHS])}{more}"] if paths else []


def _counted(count: int, noun: str) -> str:
    return f"a {noun} is" if count == 1 else f"{count} {noun}s are"


def _bubble_text(order: dict) -> str:
    bubbles = ", ".join(f"{100 * part:.1f}%" for part in order["bubble"])
    return f"{order['stages']} stages, {order['micro_batches']} micro-batches; bubble by simulation {bubbles}"


def backend_lines(session: Session, program: int, asked: str) -> list[str]:
    """Per backend the workers that use it, how much of the program is compiled, and why the rest is not. Waits."""
    failed: GTError | None = None
    try:
        if Current.recorder is not None and Current.recorder.session is session:
            synchronize()  # workers may not have executed the last replay yet
    except GTError as error:
        failed = error
    try:
        workers = session.stats(program)["workers"]
    except GTError as error:
        return [f"backend {asked}: the workers did not answer: {error}"]
    finally:
        if failed is not None:
            session.defer_error(failed)
    alike: dict[tuple[str, ...], list[str]] = {}  # description -> names of workers
    for worker in workers:
        if worker.get("plans"):
            alike.setdefault(tuple(_worker_lines(worker["plans"])), []).append(worker["name"])
    text = []
    for (backend, *rest), names in alike.items():
        text.append(f"backend {backend} on {', '.join(names)}: {rest[0]}")
        text += [f"  {line}" for line in rest[1:]]
    return text + compilation_lines({worker["name"]: worker.get("plans") or [] for worker in workers})


def compilation_lines(plans: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Seconds that compiled code took on the slowest worker. plans: by name of a worker, as it reports them."""
    # Each plan reports three times: to generate code, to compile kernels, and in first calls. Summed per worker by column
    seconds = {
        name: [sum(column) for column in zip(*(plan.get("seconds") or [0, 0, 0] for plan in of))] for name, of in plans.items()
    }
    name, parts = max(seconds.items(), key=lambda item: sum(item[1]), default=("", []))
    if not sum(parts):
        return []
    generating, kernels, first = parts
    return [
        f"compiled code took {sum(parts):.1f} s on {name}: {generating:.1f} s to generate, "
        f"{kernels:.1f} s more for its kernels, {first:.1f} s in first calls"
    ]


def fragment_lines(session: Session, slot: int, calls: int, cuts: Counter[tuple[str, str]]) -> tuple[int, list[str]]:
    """The number of programs of a function that runs in parts, and how much of its ops they execute, as text. Waits.

    cuts: place and reason -> how often a part ended there.
    """
    try:
        if Current.recorder is not None and Current.recorder.session is session:
            Current.recorder.flush()
        report = session.inspect_fragments(slot)
    except GTError as error:
        return 0, [f"  the dispatcher did not answer: {error}"]
    last, every = (
        f"{100 * report[carried] / max(report[ops], 1):.0f}% of the {report[ops]} ops of {of}"
        for carried, ops, of in (
            ("last_carried", "last_ops", "the last call"),
            ("carried", "ops", f"{calls} calls" if calls > 1 else "1 call"),
        )
    )
    lines = [f"  in parts: Python runs at each call, and programs carry {last}, {every}"]
    lines += [f"    cut at {where}: {what} ({count} times)" for (where, what), count in cuts.most_common()]
    lines += [f"    not carried: {count} ops: {why}" for count, why in report["why"]]
    return report["programs"], lines


def recompute_lines(recomputed: dict[str, list[int]]) -> list[str]:
    """Number of recomputed values and peak bytes with and without, one line for all workers with the same figures.

    recomputed: name of a worker -> values, peak bytes without recomputation, peak bytes with it.
    """
    alike: dict[str, list[str]] = {}
    for name, (values, before, after) in recomputed.items():
        sizes = " instead of ".join(map(size, (after, before)))
        alike.setdefault(f"{values} values are recomputed: the values of the step take at most {sizes}", []).append(name)
    return [f"{text} on {', '.join(names)}" for text, names in alike.items()]


def batch_lines(batched: dict[str, list[int]]) -> list[str]:
    """Number of collectives and of those that workers do, one line for all workers with the same figures.

    batched: name of a worker -> collectives of the step, and as how many they are done.
    """
    alike: dict[str, list[str]] = {}
    for name, (single, done) in batched.items():
        alike.setdefault(f"{single} collectives are done as {done}", []).append(name)
    return [f"{text} on {', '.join(names)}" for text, names in alike.items()]


def host_step_lines(advanced: dict[str, list[int]]) -> list[str]:
    """Number of parts of the optimizer's step on the host that begin early, one line for all workers with the same figures.

    advanced: name of a worker -> parts, and those that begin early.
    """
    alike: dict[str, list[str]] = {}
    for name, (parts, early) in advanced.items():
        text = f"{early} of {parts} parts of the offloaded optimizer's step begin during the backward pass"
        alike.setdefault(text, []).append(name)
    return [f"{text} on {', '.join(names)}" for text, names in alike.items()]


def _worker_lines(plans: list[dict[str, Any]]) -> list[str]:
    """A worker's backend, then lines on it. A long program has several plans."""
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

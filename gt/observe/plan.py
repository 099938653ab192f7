"""The plan of a program as data and as the text of `gt plan`. Lines without # at the start are in plan notation."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from math import prod
from typing import Any

from gt.client.reports import html
from gt.config.schema import DATA_AXIS, Rule
from gt.dispatcher.planning.sharded_memory import parts, table
from gt.dispatcher.schedule.balance import said
from gt.dispatcher.sharding import zero
from gt.dispatcher.sharding.cost import LINK
from gt.ir.instr import COLLECTIVES
from gt.ir.layout import Replicate, Shard
from gt.ir.text import PlanLine, counted, size
from gt.observe import pipeline_report
from gt.observe.dry_run import Dry, PlannedStep
from gt.observe.simulated_worker import GRADIENTS, OFFLOADED, OPTIMIZER, WEIGHTS

LOCAL = ("place", "shard", "keep")
KINDS = ("captured", "optimizer", "all")
STEP = {
    "captured": "the step that gt.compile captured", "optimizer": "from one optimizer step to the next",
    "all": "everything from start to end",
}  # fmt: skip
KEPT = {
    1: "a weight's whole copy lives until it is written, terms of gradients until the optimizer reads them",
    2: "a weight's whole copy lives until it is written",
    3: "whole copies of weights, as activations here, are at most twice the largest weight, and small ones",
}
LARGE, PART = 1 << 20, 0.02  # bytes, and part of all weights, from which a replicated weight gets a warning


class Plan:
    """The plan of a program. `body` is printed by `--json`; str() is the text."""

    def __init__(self, dry: Dry | None, about: str = "") -> None:
        kind = next((kind for kind in KINDS if dry is not None and kind in dry.steps), "")
        if dry is None or not kind:
            raise ValueError("nothing was planned: the program used no remote tensors")
        self.body = _body(dry, kind, about)

    def json(self) -> str:
        return json.dumps(self.body, indent=1)

    def __str__(self) -> str:
        return "\n".join(_text(self.body)) + "\n"

    def _repr_html_(self) -> str:
        """For notebooks: memory as bars, and the text."""
        kinds = (WEIGHTS, GRADIENTS, OPTIMIZER, "activations")
        rows = [(_range(row["workers"]), {kind: row[kind] for kind in kinds}) for row in self.body["memory"]]
        return html.titled(f"plan of {self.body['program']}", html.bars(rows), html.text_block(str(self)))


# ---- data


def _body(dry: Dry, kind: str, about: str) -> dict[str, Any]:
    step = dry.steps[kind]
    pipe = pipeline_report.describe(dry, step)
    lines = sorted(step.moves.items(), key=lambda item: -_nbytes(item[0]) * item[1])
    # Lines of local changes (LOCAL) move nothing between workers.
    moves = [(line, count) for line, count in lines if not line.op.startswith(LOCAL)]
    body: dict[str, Any] = {
        "program": about, "workers": len(dry.workers), "step": _said(dry, kind, step), "values": dry.values,
        "weights": [_weight(line, name, dry.rules.get(name)) for line, name, _ in sorted(dry.weights, key=_order)],
        "unplaced": [name for name, rule in dry.rules.items() if rule is None],
        "collectives": [_move(line, count) for line, count in moves if line.op.startswith(tuple(COLLECTIVES))],
        "transfers": [_move(line, count) for line, count in moves if not line.op.startswith(tuple(COLLECTIVES))],
        "memory": [_worker(dry, step, i, kind != "captured") for i in dry.followed],
        "pipeline": pipe,
        **({"hosts": hosts, "ways": _ways(dry)} if len(hosts := _hosts(dry)) > 1 else {}),
        **({"zero": dry.state.config.zero, "theory": _theory(dry)} if dry.state.config.zero else {}),
        **({"offload": str(dry.state.planner.offload.choice)} if dry.state.planner.offload.active else {}),
    }  # fmt: skip
    _scheduled(body, pipe, dry, step)
    body["warnings"] = _warnings(dry, body)
    body["time"] = _times(body)
    return body


def _said(dry: Dry, kind: str, step: PlannedStep) -> str:
    """The planned part of the program."""
    if kind == "captured" and dry.captured > 1:
        return f"the last of {dry.captured} steps that gt.compile captured"
    together = len(set(step.optimizers))
    return STEP[kind] if together < 2 else f"the last {len(step.optimizers)} steps of {together} optimizers"


def _hosts(dry: Dry) -> dict[str, list[int]]:
    """Workers of each host by its name."""
    found: dict[str, list[int]] = {}
    for worker in dry.core.cluster.workers:
        found.setdefault(worker.info["host"], []).append(worker.index)
    return found


def _ways(dry: Dry) -> list[dict[str, Any]]:
    """The way of each two hosts: of all transfers and collectives between workers of theirs."""
    # Each pair of hosts once, in the order of their workers.
    cluster = dry.core.cluster
    names = {host.home: host.name for host in cluster.hosts_of(cluster.workers)}
    pairs = [(pair, way) for pair, way in cluster.ways().items() if list(names).index(pair[0]) < list(names).index(pair[1])]
    rows = []
    for (a, b), way in pairs:
        text = {
            "via": f"via {', '.join(names[host] for host in way.via)}",
            "none": "nothing joins them",
        }.get(way.kind, f"{way.kind} {way.source} to {way.target}")
        rows.append({"hosts": [names[a], names[b]], "kind": way.kind, "way": text})
    return rows


def _theory(dry: Dry) -> dict[int, dict[str, int]]:
    """By worker, bytes of each kind in the table of the ZeRO paper, for these weights with AdamW."""
    # Rajbhandari et al., 2020: of each weight, the bytes of its part that the worker computes with.
    theory: dict[int, Counter[str]] = {}
    for line, _, layout in dry.weights:
        use = zero.used(layout)
        split = prod(extent for extent, place in zip(use.mesh.sizes, use.placements, strict=True) if isinstance(place, Shard))
        for index in use.mesh.workers:
            rows = table(dry.state.config.zero, _nbytes(line) // split, parts(use), line.id not in dry.frozen)
            theory.setdefault(index, Counter()).update(rows)
    return {index: dict(rows) for index, rows in sorted(theory.items())}


def _theory_lines(theory: dict[int, dict[str, int]]) -> list[str]:
    """The worker that has most."""
    if not theory:
        return []
    worker, rows = max(theory.items(), key=lambda item: sum(item[1].values()))
    kinds = ", ".join(f"{kind} {size(n)}" for kind, n in rows.items())
    return [f"theory with AdamW, on worker {worker}: {kinds}; in all {size(sum(rows.values()))}"]


def _times(body: dict[str, Any]) -> dict[str, float]:
    """Nominal seconds of a step: the schedule's makespan; without schedule all work and all transfers in a row."""
    # Without a schedule nothing overlaps: the worker with most work and transfers bounds the step.
    rows, pipe = body["memory"], body["pipeline"]
    took = max(row["seconds"] + row["link_seconds"] for row in rows)
    if pipe.get("makespan"):
        took = pipe["makespan"]
    return {"step": took, "compute": max(row["seconds"] for row in rows), "links": max(row["link_seconds"] for row in rows)}


def _nbytes(line: PlanLine) -> int:
    first = line.note.partition(" B")[0]
    return int(first) if first.isdigit() else 0


def _weight(line: PlanLine, name: str, rule: Rule | None) -> dict[str, Any]:
    """A weight's row, with the rule that places its module, if any: {pattern, group, parts}."""
    said = "" if rule is None else f" by {rule.pattern} in {rule.group}" + (f", {rule.parts} in one" if rule.parts > 1 else "")
    shown = None if rule is None else {"pattern": rule.pattern, "group": rule.group, "parts": rule.parts}
    nbytes = _nbytes(line)
    text = str(replace(line, note=f"{size(nbytes)} {name}{said}".strip()))
    return {"plan": text, "name": name, "bytes": nbytes, "rule": shown}


def _order(row: tuple[PlanLine, str, Any]) -> list[tuple[int, int, str]]:
    """Key that sorts names as a reader counts: h.2 before h.10."""
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in row[1].split(".")]


def _move(line: PlanLine, count: int) -> dict[str, Any]:
    nbytes, said = _nbytes(line), line.note.partition(" B")[2].strip()
    kind, _, axis = line.op.partition(" over ")
    shown = replace(line, note=f"{size(nbytes)} x {count} {said}".strip())
    return {
        "plan": str(shown), "kind": kind, "axis": axis, "bytes": nbytes, "count": count, "workers": list(line.workers),
        "where": said,
    }  # fmt: skip


def _worker(dry: Dry, step: PlannedStep, index: int, eager: bool) -> dict[str, Any]:
    # The order of a schedule has figures of its own, beside those of the order as written: see _scheduled.
    interval, known = step.intervals[index], (WEIGHTS, GRADIENTS, OPTIMIZER)
    if not step.scheduled:
        interval = step.replay.get(index, interval)
    held: Counter[str] = Counter(step.held.get(index))
    # Without an optimizer no tensor has a declared role: the kinds of all blocks are added up.
    if not step.held:
        for block in (*interval.start, *interval.made):
            held[block.kind] += block.nbytes
    report: dict[str, Any] = {
        "workers": dry.alike[index],
        **{kind: held[kind] for kind in known},
        **({OFFLOADED: held[OFFLOADED]} if held[OFFLOADED] else {}),
        "activations": interval.peak(known, eager),
        "peak": interval.peak((), eager),
        "arena": dry.core.cluster.heap_used,
        "sent": {str(peer): n for peer, n in sorted(interval.sent.items())},
        "received": {str(peer): n for peer, n in sorted(interval.received.items())},
        "collectives": {kind: n for kind, n in sorted(interval.collectives.items()) if n},
        "flops": interval.flops,
        "seconds": interval.seconds,
        "link_seconds": max(sum(interval.sent.values()), sum(interval.received.values())) / LINK,
    }
    return report


def _scheduled(body: dict[str, Any], pipe: dict[str, Any], dry: Dry, step: PlannedStep) -> None:
    """Add activations and peak of the schedule to those of the order as written."""
    if step.scheduled:
        for row in body["memory"]:
            replay = step.replay[row["workers"][0]]
            row["activations_scheduled"], row["peak_scheduled"] = replay.peak((WEIGHTS, GRADIENTS, OPTIMIZER)), replay.peak()
        return
    if not pipe.get("activations") or pipe["schedule"] == "as written":
        return
    # `places` has the rows of the schedule that execute each stage. Shared stages, with several rows, are left out.
    where = {some[0]: stage for some, stage in zip(pipe["places"], pipe["stages"]) if len(some) == 1}
    for place, peak in enumerate(pipe["activations"]):
        members = pipeline_report.members(dry, where[place])
        for row in body["memory"]:
            if row["workers"][0] in members:
                # The schedule counts what micro-batches keep between actions; an action's temporaries come on top.
                beside = max(0, row["activations"] - round(pipe["micro_batch"][place]))
                row["activations_scheduled"] = round(peak) + beside
                row["peak_scheduled"] = row["activations_scheduled"] + sum(row[k] for k in (WEIGHTS, GRADIENTS, OPTIMIZER))


def _warnings(dry: Dry, body: dict[str, Any]) -> list[str]:
    warnings = []
    # 1. Gathers of activations, by the line that causes them.
    gathers: dict[str, list[dict[str, Any]]] = {}
    for row in body["collectives"]:
        sharded = "zero" in body and row["kind"] == "all_gather" and row["axis"] == DATA_AXIS  # a weight before its use
        if row["kind"] in ("all_gather", "all_to_all") and not sharded:
            gathers.setdefault(row["where"], []).append(row)
    for where, rows in gathers.items():
        count, nbytes = sum(row["count"] for row in rows), sum(row["count"] * row["bytes"] for row in rows)
        kinds = " and ".join(sorted({f"{row['kind']} over {row['axis']}" for row in rows}))
        warnings.append(
            f"{where}: {count} x {kinds}, {size(nbytes)}: an op there needs whole what is split: put it into the group that "
            "ends the split (_rowpar after _colpar), split another dim, or say how many weights are fused (parts)"
        )

    # 2. Large weights that each worker of a tensor-parallel axis has whole.
    total = sum(row["bytes"] for row in body["weights"])
    for line, name, layout in dry.weights:
        whole = [a for (a, n), p in zip(layout.mesh.axes, layout.placements) if a == "tp" and isinstance(p, Replicate)]
        nbytes = _nbytes(line)
        if whole and nbytes >= max(LARGE, PART * total):
            warnings.append(f"{name or line.spec}, {size(nbytes)}, is whole on each tp worker: use it in a _colpar group")

    # 3. Limits of the plan itself.
    if dry.values:
        warnings.append(
            f"{counted(dry.values, 'read')} of values gave 0 while planning: a real run may differ where the program decides "
            "by a value"
        )
    if len(dry.followed) < len(dry.workers):
        warnings.append("workers of the same groups are taken to be alike: the first, which has the largest pieces, is shown")
    return warnings


# ---- text


def _text(body: dict[str, Any]) -> list[str]:
    pipe = body["pipeline"]
    lines = [f"# plan of {body['program']} on {counted(body['workers'], 'worker')}: {body['step']}"]
    took = body["time"]
    alone = f"{time(took['compute'])} of work, {time(took['links'])} of transfers where there is most"
    lines.append(f"# {time(took['step'])} of a nominal GPU: {alone}")
    for title, rows in (("weights", body["weights"]), ("collectives", body["collectives"]), ("transfers", body["transfers"])):
        total = sum(row["bytes"] * row.get("count", 1) for row in rows)
        lines += ["#", f"# {title}: {counted(len(rows), 'line')}, {size(total)}"] + [row["plan"] for row in rows]
        if title == "weights" and body["unplaced"]:
            lines.append(f"# no rule for {_some(body['unplaced'])}")
    if "zero" in body:
        lines += [
            "#",
            f"# zero {body['zero']}: weights, gradients and optimizer state rest in pieces of {DATA_AXIS}",
            f"# {KEPT[body['zero']]}",
            *(f"# {line}" for line in _theory_lines(body["theory"])),
        ]
    if "ways" in body:
        where = ", ".join(f"{name} has {_range(workers)}" for name, workers in body["hosts"].items())
        lines += ["#", f"# hosts: {where}", *(f"# {' - '.join(row['hosts'])}: {row['way']}" for row in body["ways"])]
    if "offload" in body:
        lines += ["#", f"# offload: the optimizer's step is computed {body['offload']}"]
    lines += ["#", "# memory of each worker", *(f"# {line}" for line in _memory(body["memory"]))]
    if pipe:
        lines += _pipeline(pipe)
    lines += ["#", *[f"# warning: {warning}" for warning in body["warnings"]]] if body["warnings"] else []
    return lines


def _memory(rows: list[dict[str, Any]]) -> list[str]:
    """A table: a line for each kind of worker. Columns of the schedule are there if a worker has one."""
    kinds = (WEIGHTS, GRADIENTS, OPTIMIZER, *[OFFLOADED] * any(OFFLOADED in row for row in rows), "activations", "peak")
    scheduled = [key for key in ("activations_scheduled", "peak_scheduled") if any(key in row for row in rows)]
    table = [["worker", *kinds, *(f"{key.partition('_')[0]} in schedule" for key in scheduled), "arena", "sent", "received"]]
    for row in rows:
        sizes = [size(row.get(key, 0)) for key in kinds] + [size(row[key]) if key in row else "-" for key in scheduled]
        moved = [size(sum(row[key].values())) for key in ("sent", "received")]
        table.append([_range(row["workers"]).removeprefix("worker "), *sizes, size(row["arena"]), *moved])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]


def _pipeline(pipe: dict[str, Any]) -> list[str]:
    if "stages" not in pipe:
        return ["#", f"# pipeline: schedule {pipe['schedule']}", f"# not used: {pipe['why']}"]
    count = f"{len(pipe['stages'])} stages, {pipe['micro_batches']} micro-batches"
    lines = ["#", f"# pipeline: {count}, schedule {pipe['schedule']}"]
    if pipe["why"]:
        lines.append(f"# not used: {pipe['why']}")
    if "grid" in pipe:
        lines.append(f"# predicted bubble {pipe['idle']:.2%} of {time(pipe['makespan'])} (nominal)")
        lines += [f"# {row}" for row in pipe["grid"].splitlines()]
    for name, row in pipe["choices"].items():
        took = f"{time(row['makespan'])}, {row['bubble']:.2%} bubble"
        lines.append(f"# with {name}: {took}, {size(round(row['activations']))} of activations")
    balance = pipe["balance"]
    lines.append("# balance: " + ", ".join(f"{n} {s:.1%}" for n, s in zip(pipe["stages"], balance["share"])))
    if "better" in balance:
        better = balance["better"]
        share = ", ".join(f"{s:.1%}" for s in better["share"])
        begins = ", ".join(f"{n} from {b}" for n, b in zip(pipe["stages"][1:], better["begins"]) if b)
        lines.append(f"# a better cut gains {better['gain']:.1%} in {better['schedule']}: {share} ({begins})")
        lines.append(f"# {said(better['moves'], pipe['stages'])}")
    return lines


def _some(names: list[str], most: int = 12) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _range(workers: list[int]) -> str:
    # Runs of consecutive numbers: [0, 1, 2, 5] is "worker 0-2,5".
    runs: list[list[int]] = []
    for worker in workers:
        if runs and runs[-1][1] == worker - 1:
            runs[-1][1] = worker
        else:
            runs.append([worker, worker])
    return "worker " + ",".join(f"{a}-{b}" if a < b else str(a) for a, b in runs)


def time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3f} us"

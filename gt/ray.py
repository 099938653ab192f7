"""`gt.ray.start(workers=8)`: workers as actors of Ray, in one placement group. Ray restarts a worker that dies.

The server is an actor too, on the program's node, and no actor of it outlives the program. Needs `pip install ray`.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gt import api, env
from gt.errors import ConfigError, SystemFailure
from gt.wire.access import auth
from gt.wire.socket import written

STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")
MAX_RESTARTS = -1  # as often as it takes
WAIT_SECONDS = 300.0  # for resources, and for workers to import torch
HEARTBEAT_SECONDS, STOP_SECONDS = 10.0, 5.0


@dataclass
class RayJob:
    """The actors of one start."""

    address: str
    token: str
    dispatcher: Any = field(repr=False)
    workers: list[Any] = field(repr=False)
    group: Any = field(repr=False)


_job: RayJob | None = None


class ServerActor:
    """A dispatcher within an actor."""

    def start(self, token: str) -> tuple[str, int]:
        """Listen on this node's address; that and the port."""
        from gt.dispatcher.server import Server
        from gt.wire.access.auth import Access

        host = importlib.import_module("ray.util").get_node_ip_address()
        self._server, self._changed = Server(host, 0, Access(token), HEARTBEAT_SECONDS), threading.Event()
        self._server.on_workers = lambda count: self._changed.set()
        self._thread = threading.Thread(target=self._server.run, name="gt-server", daemon=True)
        self._thread.start()
        return host, self._server.port

    def wait(self, count: int, seconds: float) -> int:
        """Wait until so many workers are connected; their number then, or after so many seconds."""
        deadline = time.monotonic() + seconds
        while len(self._server.worker_names) < count and time.monotonic() < deadline:
            self._changed.wait(deadline - time.monotonic())
            self._changed.clear()
        return len(self._server.worker_names)

    def stop(self) -> None:
        self._server.stop("gt.ray has stopped it")
        self._thread.join(STOP_SECONDS)


class WorkerActor:
    """A worker within an actor. `run` lasts for the worker's life: if that ends early, the process ends too."""

    def run(self, host: str, port: int, token: str, rank: int, gpu: bool) -> None:
        from gt.worker.loop import WorkerOptions, run

        device = "cuda:0" if gpu else "cpu"
        why = run(WorkerOptions(host, port, token, f"w{rank}", env.backend(), device, WAIT_SECONDS, rank=rank))
        if why:
            os.write(2, f"gt worker w{rank}: {why}\n".encode())
            os._exit(1)  # for Ray a death, after which it starts the actor again


def start(
    workers: int,
    config: api.Config = None,
    *,
    gpus_per_worker: float | None = None,
    cpus_per_worker: float = 1.0,
    placement: str = "PACK",
    variables: Mapping[str, str] | None = None,
) -> None:
    """Start a server and workers in Ray's cluster, and connect to it. They end with this program, or by gt.ray.stop().

    workers: their number; worker i is bundle i of the placement group. config: as for gt.connect. gpus_per_worker: 1 by default
        if the cluster has that many GPUs, else 0. placement: Ray's strategy, PACK, STRICT_PACK, SPREAD or STRICT_SPREAD.
    variables: of the environment of workers. Variables of NCCL, GT and the like are passed on in any case.

    Connects to a cluster by ray.init() unless the program has done so. If a worker dies, Ray starts it again, under its name:
    the program gets WorkerLost for tensors that it held, and goes on. ConfigError for wrong arguments; SystemFailure if Ray is
    missing, or has too few resources.
    """
    global _job
    if type(workers) is not int or workers < 1:
        raise ConfigError(f"workers is {workers!r}, want a number above 0")
    if placement not in STRATEGIES:
        raise ConfigError(f"placement is {placement!r}, want one of {', '.join(STRATEGIES)}")
    ray = _ray()
    if not ray.is_initialized():
        ray.init()
    stop()
    if gpus_per_worker is None:
        gpus_per_worker = 1.0 if ray.cluster_resources().get("GPU", 0) >= workers else 0.0
    resources = {"CPU": cpus_per_worker, **({"GPU": gpus_per_worker} if gpus_per_worker else {})}
    group = _place(ray, [resources] * workers, placement)
    token = env.token() or auth.strong()
    passed = {"env_vars": {**env.for_hosts(), **(variables or {})}}
    try:
        strategy = importlib.import_module("ray.util.scheduling_strategies")
        own = strategy.NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
        server = ray.remote(ServerActor).options(num_cpus=0, scheduling_strategy=own, runtime_env=passed).remote()
        host, port = ray.get(server.start.remote(token), timeout=WAIT_SECONDS)
        actor, actors = ray.remote(WorkerActor), []
        for rank in range(workers):
            bundle = strategy.PlacementGroupSchedulingStrategy(group, rank)
            options = {"num_cpus": cpus_per_worker, "num_gpus": gpus_per_worker, "scheduling_strategy": bundle}
            options |= {"max_restarts": MAX_RESTARTS, "max_task_retries": -1, "runtime_env": passed}
            actors.append(actor.options(**options).remote())
            actors[-1].run.remote(host, port, token, rank, bool(gpus_per_worker))
    except BaseException:
        importlib.import_module("ray.util").remove_placement_group(group)
        raise
    _job = RayJob(written(host, port), token, server, actors, group)
    atexit.register(stop)
    try:
        here = ray.get(server.wait.remote(workers, WAIT_SECONDS))
        if here < workers:
            why = "see their output in Ray's dashboard or logs"
            raise SystemFailure(f"{here} of {workers} workers are connected after {WAIT_SECONDS:g} s: {why}")
        api.connect(_job.address, config, token=_job.token, workers=workers)
    except BaseException:
        stop()
        raise


def stop() -> None:
    """End the session, and the actors. Safe to call twice."""
    global _job
    job, _job = _job, None
    if job is None:
        return
    atexit.unregister(stop)
    api.disconnect()
    ray = _ray()
    if not ray.is_initialized():  # the program has ended Ray, and so the actors
        return
    with contextlib.suppress(ray.exceptions.RayError):  # it tells the workers to end, or is dead, and they with it
        ray.get(job.dispatcher.stop.remote(), timeout=STOP_SECONDS)
    for actor in job.workers:
        ray.kill(actor)
    ray.kill(job.dispatcher)
    importlib.import_module("ray.util").remove_placement_group(job.group)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise SystemFailure(f"Ray cannot be imported ({error}): pip install ray") from None


def _place(ray: Any, bundles: Sequence[dict[str, float]], placement: str) -> Any:
    """A placement group that has its resources. SystemFailure where the cluster has too few for WAIT_SECONDS."""
    util = importlib.import_module("ray.util")
    group = util.placement_group(list(bundles), strategy=placement)
    if not group.wait(WAIT_SECONDS):
        util.remove_placement_group(group)
        have = {name: count for name, count in ray.cluster_resources().items() if name in ("CPU", "GPU")}
        want = f"{len(bundles)} x {bundles[0]} by {placement}"
        raise SystemFailure(f"Ray has no place for the workers after {WAIT_SECONDS:g} s: got {have}, want {want}")
    return group

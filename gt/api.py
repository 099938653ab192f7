"""Public functions of gt: connecting, starting workers, remote factories, and reports on what was executed."""

from __future__ import annotations

import itertools
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch

from gt import env
from gt.client import current_session
from gt.client.device import random, torch_remote
from gt.client.device import register as device_
from gt.client.device.remote_tensor import RemoteTensor, Shown
from gt.client.reports import progress
from gt.client.reports.html import TensorPlacement
from gt.client.trace import shape_inference
from gt.config.doubts import doubts
from gt.config.load import check_workers, load
from gt.config.registry import source
from gt.errors import ConfigError, ProgramError, SystemFailure
from gt.ir.text import size
from gt.launch import machine
from gt.logs import private_file
from gt.wire.messages import MAX_STALL_SECONDS
from gt.wire.process_settings import available_bytes
from gt.wire.signals import uninterrupted
from gt.wire.socket import host_and_port, server_of_environment

if TYPE_CHECKING:
    from gt.observe.plan import Plan
    from gt.observe.tracing import Tracing

    device: torch.device  # by __getattr__
log = logging.getLogger("gt")
MAX_WORKERS = 1 << 16
LEAST_WORKER_BYTES = 64 << 20  # of memory that a worker takes for itself: torch alone needs more
AUTO_SHARD = "gt: {data_parallel: null}"  # the config of GT_AUTO_SHARD
cat, stack = torch.cat, torch.stack
Factory = TypeVar("Factory", bound=Callable)
Config = str | os.PathLike[str] | Mapping[str, Any] | None


class _Started:
    """Processes that this program has started, and functions that replace or follow them."""

    local: Any = None
    trace: Tracing | None = None  # that is being made
    plan: Callable[[Config, int], None] | None = None  # opens a session that only plans; None outside of gt.plan


def __getattr__(name: str) -> Any:
    if name == "device":  # `remote`, or `lazy` where the name is not registered
        return Shown.device
    raise AttributeError(f"module 'gt.api' has no attribute {name!r}")


# ---- sessions


def connect(  # noqa: PLR0913 - public: settings of one connection, by keyword
    address: str = "",
    config: Config = None,
    *,
    token: str | None = None,
    name: bool = True,
    wait: float = 10.0,
    stall_timeout: float | None = None,
    workers: int = 0,
    ssh: Sequence[str] | None = None,
) -> None:
    """Connect to the dispatcher at "host:port". Ops run there from now on; an open session ends.

    An open session with a server at another port goes on if this fails.

    address: "env" joins the job of torchrun, srun, mpirun or Kubernetes that has started this process. Rank 0 starts the server
        and goes on as the program. A process of another rank becomes a worker here and never returns. Without a launcher this
        is gt.gpu_workers of all GPUs. "" for `ssh`.
    config: the signal groups: path of the YAML, gt:NAME of a ready config, YAML text, or a dict of the same form. None for
        GT_CONFIG and the groups of gt.register_config, "" for no groups.
    token: the server's secret; GT_TOKEN if None.
    name: False leaves the device name "remote" unregistered, so that local CUDA training works in this process; the device is
        then `gt.device`.
    wait: seconds to try for.
    stall_timeout: seconds without progress of any worker after which a wait ends in WorkerStuck; GT_STALL_TIMEOUT if None,
        0 for no limit.
    workers: number of workers that the program wants, 0 for all. An exclusive server leases that many, which the config calls
        0 to workers - 1. If too few are free, this waits in the server's queue without limit and logs its place.
    ssh: hosts, as "h0" or "h0:4" for four workers; by default one for each GPU, else one. Starts a server here and workers
        there, which end with this program.

    Raises DispatcherLost if no server answers, and Refused if it does not accept this program. ConfigError: the config is
    wrong, or names more workers than there are. ValueError: `workers` or `stall_timeout` is no such number.
    """
    import_libraries()
    if _Started.plan is None and (why := machine.unsupported()):
        raise SystemFailure(why)
    if type(workers) is not int or not 0 <= workers <= MAX_WORKERS:
        raise ValueError(f"workers is {workers!r}, want the number of workers as a whole number, or 0 for all")
    switches = {**_switches(stall_timeout), "workers": workers}
    if _Started.plan is None and (ssh is not None or address in ("", "env")):
        _connect_job(address, ssh, config, {"name": name, "wait": wait, "stall_timeout": stall_timeout, "workers": workers})
        return
    if _Started.plan is not None:
        disconnect()
        if name:
            device_.register()
        _Started.plan(config, workers)
        return
    _connect(address, config_of(config), switches, {"token": env.token() if token is None else token, "wait": wait}, name)


def _connect(address: str, config: tuple[str, str], switches: dict[str, Any], settings: dict[str, Any], name: bool) -> None:
    """Open a session and record into it. config: text and path. An open session ends once nothing can fail that is known."""
    from gt.client.session import Session

    text, path = config
    groups = load(text, path)
    if not _of_another_server(address):
        disconnect()  # an exclusive server has workers for this program once
    if name:
        device_.register()
    session = Session(address, (text, path), switches=switches, **settings)
    try:
        disconnect()
        session.why_lost = lambda: _why_lost(address)
        recorder = current_session.connect(session, text, path)
    except BaseException:
        session.close()
        raise
    recorder.when_watched = lambda: _report_roles(recorder)
    if _Started.trace is not None:
        _Started.trace.begin(session)
    for doubt in doubts(groups):
        log.warning("%s", doubt)


def _of_another_server(address: str) -> bool:
    """True if no server is at the address that the open session may have. DispatcherLost for a text that is no address.

    Then that session can go on until the other server has answered, and does where none answers.
    """
    _, port = host_and_port(address)
    open_ = current_session.Current.recorder
    there = getattr(open_.session, "address", "") if open_ is not None else ""  # a session may be within this process
    return bool(there) and host_and_port(there)[1] != port


def import_libraries() -> None:
    """Import the libraries of a link, which `import gt` leaves out. Ctrl-C waits, as half of one could not be mended later."""
    with uninterrupted():
        import gt.client.session  # noqa: F401


def _why_lost(address: str) -> str:
    """The end of the server at this address in words, if this program has started it; "" if it is not known."""
    local = _Started.local
    return local.why_ended() if local is not None and local.address == address else ""


def _report_roles(recorder: Any) -> None:
    """The first batch while somebody observes: the part that reports roles is imported now."""
    from gt.client.groups.role_reports import RoleReports

    recorder.when_watched = RoleReports(recorder).after_batch
    recorder.when_watched()


def _connect_job(address: str, ssh: Sequence[str] | None, config: Config, settings: dict[str, Any]) -> None:
    """Connect to the job of this process, or to one that ssh starts; it starts here unless it runs already."""
    from gt.launch import job
    from gt.launch.ssh import entries

    if (ssh is None) == (address == "") or isinstance(ssh, str):
        raise ValueError(f"gt.connect wants an address, or ssh=[hosts], and got address {address!r} and ssh={ssh!r}")
    groups = load(*config_of(config))
    if ssh is not None:
        hosts = entries(ssh)
        shutdown()
        _Started.local = job.start_hosts(hosts, job.Reach(), shape_inference.warm)
    elif _job() is None:
        place = job.place()
        if place.rank:
            job.work(place)
        if not place.launcher:
            log.warning("gt.connect('env') found no launcher's variables, so this program starts workers on this machine")
        shutdown()
        _Started.local = job.start(place, shape_inference.warm)
    running = _job()
    assert running is not None
    check_workers(groups, [f"w{i}" for i in range(running.workers)])
    connect(running.address, config, token=running.token, **{**settings, "workers": settings["workers"] or running.workers})


def _job() -> Any:
    """The job that this program has started or was started in: address, token, workers. None without one."""
    from gt.launch import job

    return _Started.local if _Started.local is not None and _Started.local.job else job.running()


def _switches(stall_timeout: float | None) -> dict[str, Any]:
    """Settings for the workers: those of torch in this process that change results, and the stall timeout in seconds."""
    limit = env.seconds("GT_STALL_TIMEOUT") if stall_timeout is None else float(stall_timeout)
    if not 0 <= limit <= MAX_STALL_SECONDS:
        raise ValueError(f"stall_timeout is {stall_timeout!r}, want seconds, 0 for no limit, or None for GT_STALL_TIMEOUT")
    return {
        "stall_timeout": limit,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
    }


def gpu_workers(
    n: int,
    config: Config = None,
    *,
    name: bool = True,
    stall_timeout: float | None = None,
    libraries: Sequence[str] | None = None,
) -> None:
    """Start a dispatcher and n workers on this machine, one GPU each. They end with this program.

    With fewer than n GPUs it warns and starts n CPU workers. In a job of `gt run` or gt.connect("env") it starts none, and
    connects to the job's. config, name, stall_timeout: as for gt.connect. libraries: modules whose ops the workers execute,
    such as "torchvision"; GT_LIBRARIES if None. ValueError for n below 1, or for more workers than this machine's memory has
    room for; ConfigError for a config that names more than n workers.
    """
    _checked(n)
    have = torch.cuda.device_count()
    if have < n and _job() is None:
        there = f"{have} GPUs" if have > 1 else "one GPU" if have else "no GPU"
        log.warning(
            "gt.gpu_workers(%d) found %s: it uses %s instead", n, there, "a CPU worker" if n == 1 else f"{n} CPU workers"
        )
    _start_local(n, have >= n, config, name, stall_timeout, libraries)


def cpu_workers(
    n: int,
    config: Config = None,
    *,
    name: bool = True,
    stall_timeout: float | None = None,
    libraries: Sequence[str] | None = None,
) -> None:
    """Start a dispatcher and n workers on this machine's CPUs. They end with this program.

    config, name, stall_timeout: as for gt.connect. libraries: as for gt.gpu_workers. ValueError for n below 1, or for more than
    this machine's memory has room for; ConfigError for a config that names more than n workers.
    """
    _start_local(n, False, config, name, stall_timeout, libraries)


def _checked(n: int) -> None:
    if not hasattr(n, "__index__"):
        raise TypeError(f"the number of workers is {n!r:.80}, want a whole number of at least 1")
    if n < 1:
        raise ValueError(f"the number of workers is {n}, want at least 1")


def _start_local(
    n: int,
    gpu: bool,
    config: Config,
    name: bool,
    stall_timeout: float | None = None,
    libraries: Sequence[str] | None = None,
) -> None:
    import_libraries()
    from gt.launch import local

    _checked(n)
    if isinstance(libraries, str):
        raise TypeError(f"libraries is {libraries!r:.80}, want a list of modules, such as [{libraries!r:.80}]")
    _switches(stall_timeout)
    everyone = False
    if _Started.plan is None:
        groups = load(*config_of(config))
        check_workers(groups, [f"w{i}" for i in range(n)])
        everyone = any(group.everyone for group in groups.groups.values())
        if (running := _job()) is not None:
            if n > running.workers:
                raise ConfigError(f"{n} workers are asked for, and this job has {running.workers}: start more processes")
            settings = {"name": name, "stall_timeout": stall_timeout, "workers": running.workers}
            connect(running.address, config, token=running.token, **settings)
            return
    shutdown()
    if _Started.plan is not None:
        _Started.plan(config, n)
        return
    room = max(1, (memory := available_bytes()) // LEAST_WORKER_BYTES)
    if n > room:
        raise ValueError(f"{n} workers take more memory than this machine has, {size(memory)}: want at most {room}")
    if address := env.get("GT_SERVER"):
        text = "GT_SERVER=%s is not used, since the program starts workers of its own: leave that call out, or gt.connect(%r)"
        log.warning(text, address, address)
    loaded = env.names("GT_LIBRARIES") if libraries is None else libraries
    started = local.start(n, gpu=gpu, backend=env.backend(), meanwhile=shape_inference.warm, libraries=loaded)
    try:
        wanted = n if everyone else 0  # all of them have to be there, since the config is of all
        connect(started.address, config, token=started.token, name=name, stall_timeout=stall_timeout, workers=wanted)
    except BaseException:
        started.stop()
        raise
    _Started.local = started


def start() -> None:
    """Connect to GT_SERVER, or start workers on this machine. Called for the first remote tensor without a session."""
    if _Started.plan is not None:
        _Started.plan(None, 0)
        return
    if address := server_of_environment():
        connect(address)
        return
    gpus = torch.cuda.device_count()
    wanted = max(workers_named(config_of(None)), gpus, 1)
    _start_local(wanted, 0 < wanted <= gpus, None, True)


def config_of(config: Config) -> tuple[str, str]:
    """Text and path of a session's config: of GT_CONFIG for None, and with GT_AUTO_SHARD data parallel if that is empty."""
    text, path = source(config, env.get("GT_CONFIG"))
    return (AUTO_SHARD, "GT_AUTO_SHARD") if config is None and not text and env.flag("GT_AUTO_SHARD") else (text, path)


def workers_named(config: tuple[str, str]) -> int:
    """Number of workers that a config's groups name. config: text and path."""
    return max([w + 1 for group in load(*config).groups.values() for w in group.flat], default=0)


def disconnect() -> None:
    """End the session. Its tensors are lost; processes that this program has started keep running."""
    if _Started.plan is not None and current_session.Current.recorder is not None:
        current_session.Current.recorder.flush()
    elif _Started.trace is not None and current_session.Current.recorder is not None:
        _Started.trace.end(current_session.Current.recorder.session, current_session.Current.recorder.flush)
    session = current_session.disconnect()
    if session is not None:
        session.close()


def shutdown() -> None:
    """End the session and the processes that this program has started. Remote tensors are lost."""
    disconnect()
    local, _Started.local = _Started.local, None
    if local is not None:
        local.stop()


# ---- reports


def stats() -> dict[str, Any]:
    """Counters of `client`, `dispatcher` and `workers`, the last as a list in order of index.

    Waits for the answers, but not for ops that are still executing: a step that hangs can be examined. Call
    `torch.remote.synchronize()` first for figures of everything before.
    """
    recorder = current_session.current()
    recorder.flush()
    counters = recorder.session.stats()
    reads = {"fetches": recorder.fetches, "known_reads": recorder.values.answered + recorder.read.answered}
    client = {"ops": recorder.ops, **counters.get("client", {}), **reads}
    return {**counters, "client": client}


@contextmanager
def trace(path: str | Path) -> Iterator[dict[str, Any]]:
    """Record what the program does inside, and write it as a Chrome trace: `with gt.trace("out.json"):`.

    path: of the JSON file, which Perfetto, chrome://tracing and torch's viewer show. Workers' instructions with their lines,
    transfers, memory, the dispatcher's messages and the program's own waits. Waits for all workers at begin and end. At
    the end the yielded dict gets the numbers of "slices" and of those that were "dropped" for want of room. If a captured step
    was replayed in a schedule, it also gets the "schedule" of gt.stats(); if workers were lost, "missing"
    names them. FileNotFoundError if there is no such folder.
    """
    from gt.observe.tracing import Tracing

    if _Started.trace is not None:
        raise ProgramError("a trace is being made: end it before another begins")
    tracing = Tracing(path)
    if current_session.Current.recorder is not None:
        torch_remote.synchronize()
        tracing.begin(current_session.Current.recorder.session)
    _Started.trace = tracing
    try:
        yield tracing.report
    finally:
        _Started.trace = None
        if current_session.Current.recorder is not None:
            tracing.end(current_session.Current.recorder.session, current_session.Current.recorder.flush)
        tracing.close()


def trace_replay(path: str | Path) -> dict[str, Any]:
    """Write the last replay of a scheduled step as a Chrome trace, measured and predicted. Waits for all workers.

    path: of the JSON file. Returns the part of gt.stats() on the step's schedule.
    """
    from gt.observe import timeline

    torch_remote.synchronize()
    events = timeline.chrome(stats())
    with os.fdopen(private_file(path), "w", encoding="utf-8") as out:
        json.dump(events, out)
    return events["otherData"]


def inspect(tensor: torch.Tensor) -> TensorPlacement:
    """Layout and mesh of a remote tensor, and of each piece its worker, shape, bytes and boxes. Waits for the plan only.

    A dict, which a notebook shows as blocks coloured by worker. boxes: of the tensor that the piece has, [start, stop] by dim.
    TypeError for anything but a remote tensor.
    """
    if not isinstance(tensor, RemoteTensor):
        plain = isinstance(tensor, bool | int | float | str)  # the text of others may hold tensors, and read their values
        kind = f"one on {tensor.device}" if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"gt.inspect takes a remote tensor, got {kind}{f' {tensor!r:.80}' if plain else ''}")
    current_session.check(tensor)
    recorder = current_session.current()
    recorder.flush()
    return TensorPlacement(recorder.session.inspect(tensor._ref.id))


def plan(fn: Callable, *args: Any, workers: int = 0, config: Config = None) -> Plan:
    """Plan fn(*args) for workers that need not exist. str() of the result is the text, `.body` the data.

    fn: makes the model and other remote tensors itself and runs a few steps. Values read as zeros; its result is dropped.
    workers: their number; by default the number that fn asks for, or that the config names.
    config: as for gt.connect.
    """
    if not callable(fn):
        raise TypeError(f"gt.plan takes a function that makes the model and trains it, got {type(fn).__name__}")
    if workers != 0:
        _checked(workers)
    with planning(workers, config) as plan_of:
        fn(*args)
    return plan_of(getattr(fn, "__qualname__", "function"))


@contextmanager
def planning(workers: int = 0, config: Config = None, about: Sequence[dict[str, Any]] = ()) -> Iterator[Callable[[str], Plan]]:
    """Inside, functions that connect or start workers open a session that only plans.

    about: of each worker the facts of its host, see Dry. Yields a function of a title, which returns the plan after the
    context has ended.
    """
    from gt.client.groups import tensor_roles
    from gt.observe.dry_run import Dry
    from gt.observe.plan import Plan

    sessions: list[Dry] = []
    ticks: list[progress.Tick] = []
    names: dict[int, str] = {}  # identity of a parameter -> its name
    frozen: list[weakref.ref[torch.Tensor]] = []  # parameters that need no gradient
    optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()  # that stepped: numbers
    numbers = itertools.count()

    def begin(asked: Config, wanted: int) -> None:
        text, path = config_of(asked if config is None else config)
        device_.register()
        sessions.append(Dry(text, path, len(about) or workers or wanted or workers_named((text, path)) or 1, about))
        sessions[-1].tick = ticks[-1]
        sessions[-1].living = lambda: list(tensor_roles.weights(weight_names()))
        current_session.connect(sessions[-1], text, path)
        for doubt in doubts(load(text, path)):
            log.warning("%s", doubt)

    def weight_names() -> dict[int, str]:
        """Names of weights, collected with their rules while the modules are alive."""
        if not names:
            names.update(tensor_roles.names())
            frozen.extend(map(weakref.ref, tensor_roles.frozen()))
            sessions[-1].rules = tensor_roles.rules()
        return names

    def stepped(optimizer: torch.optim.Optimizer) -> None:
        recorder = current_session.Current.recorder
        if recorder is None or recorder.session not in sessions:
            return
        weight_names()
        recorder.flush()
        if optimizer not in optimizers:
            optimizers[optimizer] = next(numbers)
        tensors = [row for each in [*optimizers] for row in tensor_roles.rows(each, names)]
        others = [row for known in frozen for row in tensor_roles.weight(known(), names)]
        recorder.session.frozen.update(row[0] for row in others)
        tensors += others
        recorder.session.stepped(tensors, optimizers[optimizer])

    outer, interrupted = _Started.plan, current_session.set_aside()
    _Started.plan = begin
    try:
        with progress.bar("planning", unit=" ops") as tick, tensor_roles.after_steps(stepped):
            ticks.append(tick)
            yield lambda about: Plan(max(sessions, key=lambda dry: dry.state.op_stream.ops) if sessions else None, about)
            disconnect()
    finally:
        current_session.disconnect()
        _Started.plan = outer
        current_session.restore(interrupted)


# ---- tensors


def manual_seed(seed: int) -> None:
    """Seed remote and local random numbers, as torch.manual_seed does."""
    torch.manual_seed(seed)
    random.manual_seed(seed)


def from_numpy(array: Any, requires_grad: bool = False) -> torch.Tensor:
    """A remote copy of a NumPy array, with its shape and dtype; with requires_grad, a leaf."""
    if isinstance(array, np.ndarray) and (not array.flags.writeable or min(array.strides, default=0) < 0):
        array = array.copy()  # torch refuses negative strides, and warns of memory that it may not write
    return torch.from_numpy(array).to(Shown.device).requires_grad_(requires_grad)


def dtype_of(dtype: Any) -> Any:
    """A torch dtype of its name, as "float32", or of NumPy's; any other value as it is. ValueError for an unknown name."""
    if isinstance(dtype, np.dtype) or (isinstance(dtype, type) and issubclass(dtype, np.generic)):
        dtype = np.dtype(dtype).name
    if not isinstance(dtype, str):
        return dtype
    attribute = getattr(torch, dtype.removeprefix("torch."), None)
    if not isinstance(attribute, torch.dtype):
        raise ValueError(f"dtype is {dtype!r}, want a torch dtype or its name, such as 'float32' or 'int64'")
    return attribute


def _remote(factory: Factory) -> Factory:
    """A factory of torch with the remote device as default, and whose dtype may be a name or NumPy's. It keeps its type."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.setdefault("device", Shown.device)
        if "dtype" in kwargs:
            kwargs["dtype"] = dtype_of(kwargs["dtype"])
        return factory(*args, **kwargs)

    make.__name__ = make.__qualname__ = factory.__name__
    make.__doc__ = f'torch.{factory.__name__} with the remote device as default; dtype may be a name, such as "float32".'
    return cast("Factory", make)


tensor, zeros, ones, full = _remote(torch.tensor), _remote(torch.zeros), _remote(torch.ones), _remote(torch.full)
empty, arange, eye = _remote(torch.empty), _remote(torch.arange), _remote(torch.eye)
rand, randn, randint = _remote(torch.rand), _remote(torch.randn), _remote(torch.randint)
zeros_like, ones_like, full_like = _remote(torch.zeros_like), _remote(torch.ones_like), _remote(torch.full_like)
empty_like, rand_like = _remote(torch.empty_like), _remote(torch.rand_like)
randn_like, randint_like = _remote(torch.randn_like), _remote(torch.randint_like)

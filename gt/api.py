"""What `import gt` shows: connecting, starting workers, remote factories, and looking at what happened."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

from gt import env
from gt.client import current_session
from gt.client.device import random, torch_remote
from gt.client.device import register as device_
from gt.client.device.remote_tensor import RemoteTensor, Shown
from gt.client.trace import shape_inference
from gt.config.files import read

if TYPE_CHECKING:
    from gt.observe.plan import Plan

    device: torch.device  # by __getattr__
log = logging.getLogger("gt")
LONGEST_STALL = 1e9  # seconds
cat, stack = torch.cat, torch.stack
Factory = TypeVar("Factory", bound=Callable)


class _Started:
    """Processes that this program started, if any."""

    local: Any = None
    trace: Callable[[], None] | None = None  # before a session ends
    plan: Callable[[str | None, int], None] | None = None  # while a plan is made: what takes the place of workers


def __getattr__(name: str) -> Any:
    if name == "device":  # `remote`, or `lazy` where the name is not registered
        return Shown.device
    raise AttributeError(f"module 'gt.api' has no attribute {name!r}")


# ---- sessions


def connect(
    address: str,
    config: str | None = None,
    *,
    token: str | None = None,
    name: bool = True,
    wait: float = 10.0,
    stall_timeout: float | None = None,
    workers: int = 0,
) -> None:
    """Use the dispatcher at "host:port" from now on. config: path of the YAML, or gt:NAME of a ready config; GT_CONFIG if None,
    "" for none.

    name=False leaves the string "remote" unregistered, so that local CUDA training works beside it; the device is then
    `gt.device`. wait: seconds to try for. stall_timeout: seconds in which no worker gets on until a wait ends in WorkerStuck,
    GT_STALL_TIMEOUT if None, 0 for never. workers: how many the program wants, 0 for all that there are. An exclusive server
    gives it so many of its own, which a config calls 0 to workers - 1; where too few are free it waits in a queue, as long as
    it takes, and says at which place. Refused, ConfigError: there are not so many, or a session may not have them.
    """
    from gt.client.session import Session

    if type(workers) is not int or not 0 <= workers <= 1 << 16:
        raise ValueError(f"workers is {workers!r}, want the number of workers as a whole number, or 0 for all")
    switches = {**_switches(stall_timeout), "workers": workers}
    disconnect()
    if name:
        device_.register()
    if _Started.plan is not None:
        _Started.plan(config, workers)
        return
    path = env.get("GT_CONFIG") if config is None else config
    text = read(path)
    token = env.get("GT_TOKEN") if token is None else token
    session = Session(address, text, path, switches=switches, token=token, wait=wait)
    current_session.connect(session, text, path)


def _switches(stall_timeout: float | None) -> dict[str, Any]:
    """This process's settings of torch that change numbers, for its workers, and seconds that it waits for a stalled one."""
    limit = env.seconds("GT_STALL_TIMEOUT") if stall_timeout is None else float(stall_timeout)
    if not 0 <= limit <= LONGEST_STALL:
        raise ValueError(f"stall_timeout is {stall_timeout!r}, want seconds, 0 for no limit, or None for GT_STALL_TIMEOUT")
    return {
        "stall_timeout": limit,
        "threads": torch.get_num_threads(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_tf32": torch.backends.cudnn.allow_tf32,
    }


def gpu_workers(n: int, config: str | None = None, *, name: bool = True, stall_timeout: float | None = None) -> None:
    """Start a dispatcher and n workers, one GPU each; CPU workers, said once, where this machine has fewer GPUs.

    stall_timeout: see connect. ConfigError for a config that names more workers than n.
    """
    have = torch.cuda.device_count()
    if have < n:
        log.warning("gt.gpu_workers(%d) found %s: it uses %d CPU workers instead", n, f"{have} GPUs" if have else "no GPU", n)
    _start_local(n, have >= n, config, name, stall_timeout)


def cpu_workers(n: int, config: str | None = None, *, name: bool = True, stall_timeout: float | None = None) -> None:
    """Start a dispatcher and n workers on this machine's CPUs; they end with this program.

    stall_timeout: see connect. ConfigError for a config that names more workers than n.
    """
    _start_local(n, False, config, name, stall_timeout)


def _start_local(n: int, gpu: bool, config: str | None, name: bool, stall_timeout: float | None = None) -> None:
    from gt.launch import local

    if n < 1:
        raise ValueError(f"the number of workers is {n}, want at least 1")
    _switches(stall_timeout)
    if _Started.plan is None:
        _fits(env.get("GT_CONFIG") if config is None else config, n)
    shutdown()
    if _Started.plan is not None:
        _Started.plan(config, n)
        return
    started = local.start(n, gpu=gpu, backend=env.get("GT_BACKEND"), meanwhile=shape_inference.warm)
    try:
        connect(started.address, config, token=started.token, name=name, stall_timeout=stall_timeout)
    except BaseException:
        started.stop()
        raise
    _Started.local = started


def start() -> None:
    """What the first remote tensor does: connects to GT_SERVER, or starts what this machine has."""
    if _Started.plan is not None:
        _Started.plan(None, 0)
        return
    if address := env.get("GT_SERVER"):
        connect(address)
        return
    gpus = torch.cuda.device_count()
    wanted = max(_named(env.get("GT_CONFIG")), gpus, 1)
    _start_local(wanted, 0 < wanted <= gpus, None, True)


def _fits(path: str, n: int) -> None:
    """ConfigError unless a config does with n workers."""
    from gt.config.load import check_workers, load

    check_workers(load(read(path), path), [f"w{i}" for i in range(n)])


def _named(path: str) -> int:
    """How many workers a config's groups name."""
    from gt.config.load import load

    return max([w + 1 for group in load(read(path), path).groups.values() for w in group.flat], default=0)


def disconnect() -> None:
    if _Started.plan is not None and current_session.Live.recorder is not None:
        current_session.Live.recorder.flush()
    elif _Started.trace is not None and current_session.Live.recorder is not None:
        _Started.trace()
    session = current_session.disconnect()
    if session is not None:
        session.close()


def shutdown() -> None:
    """End the session, and the processes that this program started."""
    disconnect()
    local, _Started.local = _Started.local, None
    if local is not None:
        local.stop()


# ---- looking


def stats() -> dict[str, Any]:
    """Counters: `client`, `dispatcher`, and `workers`, a list in order of index.

    They are what each has got to: waits for an answer, not for what was issued before (a step that hangs can be looked at;
    `torch.remote.synchronize()` first where that matters).
    """
    recorder = current_session.current()
    recorder.flush()
    found = recorder.session.stats()
    client = {"ops": recorder.ops, **found.get("client", {}), "fetches": recorder.fetches}
    return {**found, "client": client}


def trace(path: str | Path) -> dict[str, Any]:
    """Write the last replay as a Chrome trace, as measured and as predicted; what stats() has of its schedule. Waits."""
    from gt.observe import timeline

    torch_remote.synchronize()
    found = timeline.chrome(stats())
    Path(path).write_text(json.dumps(found))
    return found["otherData"]


@contextmanager
def tracing(path: str | Path) -> Iterator[dict[str, Any]]:
    """A trace of what ran last inside, whichever way its session ends. The value is what trace() gives, afterwards."""
    order: dict[str, Any] = {}
    _Started.trace = lambda: order.update(trace(path))
    try:
        yield order
        disconnect()
    finally:
        _Started.trace = None


def inspect(tensor: torch.Tensor) -> dict[str, Any]:
    """Layout, mesh, and each piece's worker, shape and bytes. Waits for the plan, not for the values."""
    if not isinstance(tensor, RemoteTensor):
        got = f"one on {tensor.device}" if isinstance(tensor, torch.Tensor) else f"{type(tensor).__name__} {tensor!r:.80}"
        raise TypeError(f"gt.inspect takes a remote tensor, got {got}")
    current_session.check(tensor)
    recorder = current_session.current()
    recorder.flush()
    return recorder.session.inspect(tensor._ref.id)


def plan(fn: Callable, *args: Any, workers: int = 0, config: str | None = None) -> Plan:
    """What fn(*args) would do on workers, of which none are needed: str() is the text, `.body` the data.

    fn makes the model and everything else remote itself, and runs a few steps; its value is dropped. workers: how many there
    would be, by default what fn asks for, or what the config (a path; GT_CONFIG if None) names. Values read as zeros.
    """
    with planning(workers, config) as made:
        fn(*args)
    return made(getattr(fn, "__qualname__", "function"))


@contextmanager
def planning(workers: int = 0, config: str | None = None) -> Iterator[Callable[[str], Plan]]:
    """Inside, whatever connects or starts workers gets a dispatcher that only plans. The value gives the plan, afterwards."""
    from gt.client.groups import tensor_roles
    from gt.observe.dry_run import Dry
    from gt.observe.plan import Plan

    found: list[Dry] = []
    called: dict[int, str] = {}

    def begin(given: str | None, wanted: int) -> None:
        path = next(p for p in (config, given, env.get("GT_CONFIG")) if p is not None)
        device_.register()
        found.append(Dry(read(path), path, workers or wanted or _named(path) or 1))
        found[-1].living = lambda: list(tensor_roles.weights(look()))
        current_session.connect(found[-1], read(path), path)

    def look() -> dict[int, str]:
        """Names of weights, learnt with their rules while the modules live."""
        if not called:
            called.update(tensor_roles.names())
            found[-1].rules = tensor_roles.rules()
        return called

    def stepped(optimizer: torch.optim.Optimizer) -> None:
        recorder = current_session.Live.recorder
        if recorder is None or recorder.session not in found:
            return
        look()
        recorder.flush()
        recorder.session.stepped(list(tensor_roles.rows(optimizer, called)))

    before = _Started.plan, current_session.set_aside()
    _Started.plan = begin
    try:
        with tensor_roles.after_steps(stepped):
            yield lambda about: Plan(max(found, key=lambda dry: dry.state.op_stream.ops) if found else None, about)
            disconnect()
    finally:
        current_session.disconnect()
        _Started.plan = before[0]
        current_session.restore(before[1])


# ---- tensors


def manual_seed(seed: int) -> None:
    """Seed remote and local random numbers."""
    torch.manual_seed(seed)
    random.manual_seed(seed)


def from_numpy(array: Any) -> torch.Tensor:
    """A remote copy of a NumPy array."""
    return torch.from_numpy(array).to(Shown.device)


def _remote(factory: Factory) -> Factory:
    """A factory of torch, on the remote device unless told otherwise. It keeps its type, for checkers and editors."""

    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        kwargs.setdefault("device", Shown.device)
        return factory(*args, **kwargs)

    make.__name__ = make.__qualname__ = factory.__name__
    make.__doc__ = f"torch.{factory.__name__} on the remote device."
    return cast("Factory", make)


tensor, zeros, ones, full = _remote(torch.tensor), _remote(torch.zeros), _remote(torch.ones), _remote(torch.full)
empty, arange, eye = _remote(torch.empty), _remote(torch.arange), _remote(torch.eye)
rand, randn, randint = _remote(torch.rand), _remote(torch.randn), _remote(torch.randint)
zeros_like, ones_like, full_like = _remote(torch.zeros_like), _remote(torch.ones_like), _remote(torch.full_like)
empty_like, rand_like = _remote(torch.empty_like), _remote(torch.rand_like)
randn_like, randint_like = _remote(torch.randn_like), _remote(torch.randint_like)

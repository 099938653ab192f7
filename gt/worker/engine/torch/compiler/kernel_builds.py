"""Builds of Inductor's kernels, side by side: a segment is lowered while kernels of those before it are built.

Inductor's generated code hands its kernels to processes (Triton) or threads (C++), and waits for them before the next graph can
be lowered. Here these waits are collected, and come once all graphs are lowered. Knows no segments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

MAX_BUILD_THREADS = 8  # compilers that a CPU worker runs at once; each takes several hundred MiB
Waits = list[Callable[[], None]]  # each raises if a kernel cannot be built


@contextmanager
def kernel_builds(host: bool, build: bool = True) -> Iterator[Waits]:
    """Collect the waits for kernels within this context. Whoever opens it has to call them there.

    host: kernels are C++. Its threads end with the context. build: False leaves out the kernels of a GPU.
    """
    import torch._inductor.config as settings
    from torch._inductor.async_compile import AsyncCompile

    waits: Waits = []
    builds: Any = AsyncCompile
    wait, build_pool, use_process_pool = builds.wait, builds.pool, builds.use_process_pool

    def collect(self: Any, scope: dict[str, Any]) -> None:
        waits.append(partial(wait, self, scope))

    threads = min(settings.compile_threads or 1, MAX_BUILD_THREADS)
    # Patches of torch's classes, undone in reverse order even after a failure. The caller holds a lock: they are global.
    with ExitStack() as stack:
        builds.wait = collect
        stack.callback(lambda: setattr(builds, "wait", wait))
        if host:
            pool = stack.enter_context(ThreadPoolExecutor(threads, "gt kernel builds"))
            stack.enter_context(settings.patch(compile_threads=threads))
            builds.pool = staticmethod(lambda: pool)
            stack.callback(lambda: setattr(builds, "pool", staticmethod(build_pool)))
            builds.use_process_pool = classmethod(lambda cls: False)  # they are for Triton, and would be idle afterwards
            stack.callback(lambda: setattr(builds, "use_process_pool", classmethod(use_process_pool.__func__)))
        if not (host or build):
            triton = builds.triton
            builds.triton = lambda *args, **kwargs: None
            stack.callback(lambda: setattr(builds, "triton", triton))
        yield waits


def start_build_processes() -> None:
    """Start the processes that build Triton kernels, as torch.compile does: they take seconds to be ready."""
    from torch._inductor import async_compile

    warm = getattr(async_compile, "maybe_warm_pool", None)  # not in every torch; compile_fx starts them at the latest
    if warm is not None:
        warm()

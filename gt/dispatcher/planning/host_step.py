"""Choice of the side that computes an optimizer's step on offloaded state: the host, or the device in streamed parts. Pure.

Bytes are those of AdamW, for one fp32 parameter. On the device all of its state crosses the link both ways. On the host its
gradient goes there and its value comes back, and the arithmetic takes time of the host's memory, beside these copies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

VALUE_BYTES, STATE_BYTES = 4, 8  # bytes of the parameter, or of its gradient, and of its state
# read and written in host memory: gradient, parameter and state
ARITHMETIC_BYTES = VALUE_BYTES + 2 * VALUE_BYTES + 2 * STATE_BYTES


@dataclass(frozen=True, slots=True)
class HostRates:
    """Bytes a second: of the link between host and device, each way, and of arithmetic in host memory."""

    link: float = 25e9  # nominal: a PCIe 4.0 x16 link
    memory: float = 60e9  # nominal: an eighth of a server's memory bandwidth
    measured: bool = False


@dataclass(frozen=True, slots=True)
class StepChoice:
    """on_host: the step is computed there. reason: for people."""

    on_host: bool
    reason: str

    def __str__(self) -> str:
        return f"{'on the host' if self.on_host else 'on the device, in streamed parts'}: {self.reason}"


def choose(asked: str, params_away: bool, rates: Iterable[HostRates | None]) -> StepChoice:
    """asked: auto, host or device. params_away: parameters are offloaded too. rates: of each worker, None for one that computes
    in host memory anyway. The slowest worker decides."""
    if asked != "auto":
        return StepChoice(asked == "host", f"step is {asked} in the config")
    # On the device bytes go there and back at once (the link has both ways), so one way counts. On the host the link and the
    # arithmetic overlap, so the longer of them counts.
    linked = [rate for rate in rates if rate is not None]
    if not linked:
        return StepChoice(True, "workers compute in host memory, so nothing has to cross a link")
    streamed = STATE_BYTES + VALUE_BYTES * params_away
    device = max(streamed / rate.link for rate in linked)
    host = max(max(VALUE_BYTES / rate.link, ARITHMETIC_BYTES / rate.memory) for rate in linked)
    link, memory = min(rate.link for rate in linked), min(rate.memory for rate in linked)
    known = "measured" if all(rate.measured for rate in linked) else "nominal"
    moved = f"{VALUE_BYTES} bytes over the link, {ARITHMETIC_BYTES} in host memory"
    costs = f"{_times(host)} on the host ({moved}), {_times(device)} on the device"
    bytes_ = f"{streamed} bytes over the link each way"
    at = f"at {known} {link / 1e9:.1f} GB/s and {memory / 1e9:.1f} GB/s"
    return StepChoice(host < device, f"for one parameter {costs} ({bytes_}), {at}")


def _times(seconds: float) -> str:
    return f"{seconds * 1e9:.2f} ns"

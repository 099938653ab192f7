"""The two families of errors: your program's (`ProgramError`) and our system's (`SystemFailure`).

Messages are lower case and contain the values. They begin with the place of the op and end with a remedy.
"""

from __future__ import annotations


class GTError(Exception):
    """Base of every error that GT raises on purpose."""


class ProgramError(GTError):
    """The program or its config asks for something impossible."""


class OpFailed(ProgramError, RuntimeError):
    """An op failed on a worker, or depends on one that did. Carries op, worker, group and the user's file:line."""

    def __init__(self, message: str, *, op: str = "", worker: str = "", group: str = "", origin: str = "") -> None:
        super().__init__(message)
        self.op, self.worker, self.group, self.origin = op, worker, group, origin


class ConfigError(ProgramError, ValueError):
    """The YAML cannot be used. Names group, file and line."""


class UnsupportedOp(ProgramError, NotImplementedError):
    """An op that this engine or the dispatcher cannot execute. Names the op."""


class CheckpointError(ProgramError, ValueError):
    """A checkpoint cannot be written or read. Names file, tensor and reason; nothing was changed."""


class SystemFailure(GTError):
    """A process, link or machine failed; the program is not at fault."""


class WorkerLost(SystemFailure, ConnectionError):
    """A worker is gone, and with it the tensors that it held."""


class WorkerStuck(SystemFailure, TimeoutError):
    """A worker's process is stopped, or no worker of a program made progress within stall_timeout. Waiting again may help."""


class SessionExpired(SystemFailure, TimeoutError):
    """The session has reached the server's time limit for a session."""


class DispatcherLost(SystemFailure, ConnectionError):
    """The dispatcher is gone or cannot be reached."""


class Refused(SystemFailure, ConnectionError):
    """The other side refused the connection: version, token, name in use, port in use."""


class ProtocolError(SystemFailure):
    """A message that breaks the protocol. Names the field."""


KINDS: dict[str, type[GTError]] = {
    cls.__name__: cls
    for cls in (
        OpFailed, ConfigError, UnsupportedOp, WorkerLost, WorkerStuck, SessionExpired, DispatcherLost, Refused,
        ProtocolError, CheckpointError,
    )
}  # fmt: skip


def to_wire(error: GTError) -> dict:
    """{"kind", "message", and for OpFailed its fields}."""
    form = {"kind": type(error).__name__, "message": str(error)}
    if isinstance(error, OpFailed):
        form.update(op=error.op, worker=error.worker, group=error.group, origin=error.origin)
    return form


def from_wire(form: dict) -> GTError:
    cls = KINDS.get(form.get("kind", ""), SystemFailure)
    if cls is OpFailed:
        return OpFailed(form["message"], **{k: form.get(k, "") for k in ("op", "worker", "group", "origin")})
    return cls(form.get("message", "no message"))

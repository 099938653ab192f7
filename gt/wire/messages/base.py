"""The base class of messages, the version of the protocol, and the bounds of what one message has."""

from __future__ import annotations

from dataclasses import dataclass

Numbers = list  # a stream: numbers only

VERSION = 8
CHUNK = 1 << 20  # bytes of one frame of tensor data
AHEAD = 4 * CHUNK  # bytes of a fetched piece that are sent before its client has acknowledged any
MAX_VALUES = 64  # in one Metrics
MAX_ROLES = 1 << 15  # tensors in one TensorRoles
MAX_ROLE_CHARACTERS = 200  # of a tensor's name in one
MAX_ARENAS = 1024  # of one session
MAX_HOLDERS = 1 << 13  # tensors of a session that one answer about memory names
MAX_STALL_SECONDS = 1e9  # of a session's stall_timeout
MAX_TIMES = 4096  # definitions in one Done, at most
MAX_PIECES = 64  # fetched pieces in one Done
MAX_OTHERS = 4096  # ops of one OpError, each of which takes the dispatcher some microseconds
MAX_BODY_BYTES = 16 << 20  # bytes of one msgpack body
THROUGH = -1  # Fetch.tensor: no tensor; waits for all devices
UNREADABLE = -2  # UploadChunk.total, Data.total: no more of the upload is sent


@dataclass(frozen=True, slots=True)
class Message:
    """Base class. The `frames` of a received message are passed beside it."""

"""Roles of tensors for observers of the server: sent while somebody observes, and seldom, for they take time to collect."""

from __future__ import annotations

import gc
import logging
import time
from itertools import accumulate

import torch

from gt.client.groups import tensor_roles
from gt.client.trace.recorder import Recorder
from gt.wire.codec import MAX_LIST_BYTES
from gt.wire.messages import MAX_ROLE_CHARACTERS, MAX_ROLES

log = logging.getLogger("gt.client")
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 0.5, 60.0  # between two reports; each is twice as long as the one before
IDLE_SHARE = 400  # times as long as a report takes, until the next,
QUICK_REPORTS = 5  # but for the first ones: a program may be at the beginning
ROW_BYTES = 24  # bytes of a row in a message, at most, but for the name
ORDER = ("weights", "optimizer", "gradients")  # weights first: they have the names


class RoleReports:
    """Sends the roles of one session's tensors after a batch, if it is time."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._next = self._pause = 0.0
        self._count = 0
        self._told: list = []

    def after_batch(self) -> None:
        """Called with each batch while the session is watched."""
        began = time.monotonic()
        if began < self._next or self._recorder.tape is not None:
            return
        try:
            rows = roles(self._recorder.first)
        except Exception:  # an object of the program is half made, or changes meanwhile: the program must not notice
            log.debug("roles of tensors are not told this time", exc_info=True)
            rows = self._told
        if rows != self._told:
            self._told = rows
            self._recorder.session.tell_roles(rows)
        now = time.monotonic()
        self._count += 1
        self._pause = min(LAST_PAUSE_SECONDS, max(FIRST_PAUSE_SECONDS, 2 * self._pause))
        self._next = now + max(self._pause, IDLE_SHARE * (now - began) if self._count > QUICK_REPORTS else 0.0)


def roles(first: int) -> list[list]:
    """Rows of TensorRoles: live parameters, and tensors of live optimizers. first: least id of the session."""
    # The first role of a tensor stays: a weight is one even if an optimizer has it in its state
    called = tensor_roles.names()
    role_of = {number: (kind, name) for number, kind, name in tensor_roles.weights(called)}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.optim.Optimizer):
            for number, kind, name in tensor_roles.rows(thing, called):
                role_of.setdefault(number, (kind, name))
    for number, kind, name in tensor_roles.gradients(called):
        role_of.setdefault(number, (kind, name))
    rows = [[number, kind, name[:MAX_ROLE_CHARACTERS]] for number, (kind, name) in role_of.items() if number >= first]
    return fitting(sorted(rows, key=lambda row: (ORDER.index(row[1]), row[0]))[:MAX_ROLES])


def fitting(rows: list[list]) -> list[list]:
    """The first rows, as many as one message takes."""
    ends = accumulate(ROW_BYTES + len(name.encode()) for _, _, name in rows)
    return rows[: sum(end <= MAX_LIST_BYTES - ROW_BYTES for end in ends)]

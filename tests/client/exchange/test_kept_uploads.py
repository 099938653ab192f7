"""Values that wait for their upload, of which some cannot be read."""

from __future__ import annotations

import errno
import os
from types import SimpleNamespace
from typing import Any

import numpy as np

from gt.client.exchange.host_buffers import Frames
from gt.client.exchange.kept_uploads import KeptUploads
from gt.ir.layout import Boxes
from gt.wire.messages import UNREADABLE, UploadChunk, UploadRequest


class WithoutDescriptors:
    """A tensor in a file of which no descriptor is to be had."""

    place = -1

    def region(self, boxes: Boxes) -> tuple[int, Frames]:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    def release(self) -> None:
        pass


def test_a_file_for_which_there_is_no_descriptor_is_unreadable_and_the_others_go_on() -> None:
    """The session ended for it."""
    sent: list[UploadChunk] = []
    arenas: Any = SimpleNamespace(take=lambda nbytes: None)
    uploads = KeptUploads(arenas, lambda message, parts: sent.append(message))
    uploads.keep_in_file(7, WithoutDescriptors())
    uploads.keep(8, np.zeros(4, np.uint8))
    uploads.begin(UploadRequest(7, 1, [[[0, 4]]], 4))
    uploads.send_chunks(1, 8)  # the server moves the window before it knows
    uploads.begin(UploadRequest(8, 2, [[[0, 4]]], 4))
    assert sent == [UploadChunk(1, 0, UNREADABLE), UploadChunk(2, 0, 4)]

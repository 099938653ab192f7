"""A worker's proof that it knows the secret of a server's workers. It is made for one process, and does not tell the secret."""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from typing import Any

SIGNED = ("name", "pid", "host", "doorbell", "unique_id")  # keys of Hello.info; 61 bits of a doorbell are unique to its process


def proof(secret: str, info: Mapping[str, Any]) -> str:
    """For Hello.info.proof: HMAC-SHA256 of who the worker is, in hex."""
    signed = json.dumps([info.get(key) or ("" if key != "pid" else 0) for key in SIGNED])
    return hmac.new(secret.encode(), signed.encode(), hashlib.sha256).hexdigest()


def proves(secret: str, info: Mapping[str, Any]) -> bool:
    """True if a worker's info has the proof."""
    return hmac.compare_digest(proof(secret, info).encode(), str(info.get("proof", "")).encode("utf-8", "replace"))


def world_key(secret: str, sessions: Sequence[int]) -> str:
    """World.key, in hex: workers that serve the same sessions prove by it to one another that they do. The wire never has it
    but encrypted, and on links within a host.
    """
    return hmac.new(secret.encode(), json.dumps(["world", sessions]).encode(), hashlib.sha256).hexdigest()

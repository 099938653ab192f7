"""Schemas of other libraries' ops, as workers announce them. Nothing here extends the closed table of this process.

A worker's owner names libraries when it starts. The dispatcher takes a session's ops from its workers alone, never from a
client, and the lines are bounded before they are parsed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from gt.ir.schema import OWN, TABLE, Schema

MAX_OPS = 512  # of all libraries of a worker
MAX_CHARACTERS = 128 << 10  # of all their lines
MAX_LINE = 2048  # characters
_NAME = re.compile(r"(?P<library>[A-Za-z_]\w{0,60})\.\w{1,80}\.\w{1,60}", re.ASCII)
Schemas = Mapping[str, Schema]  # by name of op


def parse(lines: Any) -> dict[str, Schema]:
    """The schemas of a worker's lines. ValueError names the first that is none, or the limit that they exceed."""
    if type(lines) is not list or any(type(line) is not str for line in lines):
        raise ValueError("ops is not a list of texts")
    if len(lines) > MAX_OPS or sum(map(len, lines)) > MAX_CHARACTERS:
        raise ValueError(f"{len(lines)} ops of libraries with {sum(map(len, lines))} characters, at most {MAX_OPS} with "
                         f"{MAX_CHARACTERS} are taken: name fewer libraries")  # fmt: skip
    return {schema.op: schema for schema in map(_schema, lines)}


def _schema(line: str) -> Schema:
    name = _NAME.fullmatch(line[: line.find("(")])
    if len(line) > MAX_LINE or not line.isascii() or not line.isprintable() or line.count(") -> (") != 1 or name is None:
        raise ValueError(f"{line!r:.80} is not the schema of a library's op")
    if name["library"] in OWN or name[0] in TABLE:
        raise ValueError(f"{name[0]} is an op of torch or GT, to which no library adds")
    return Schema.parse(line)


def common(workers: Iterable[Schemas]) -> dict[str, Schema]:
    """The ops that all workers have, with one form."""
    first, *others = [*workers] or [{}]
    return {op: schema for op, schema in first.items() if all(op in ops and _form(ops[op]) == _form(schema) for ops in others)}


def _form(schema: Schema) -> tuple:
    return schema.arguments, schema.returns, schema.flags


class SessionOps:
    """The closed table, and the ops of libraries that a session's workers have."""

    def __init__(self, libraries: Schemas) -> None:
        self.libraries = libraries

    def find(self, op: str) -> tuple[Schema, ...]:
        """The schemas of an op. UnsupportedOp for one that no worker executes."""
        schema = self.libraries.get(op)
        return TABLE.find(op) if schema is None else (schema,)

"""The closed table of ops: the schema of each overload that workers execute. Knows no torch.

`op_schemas.txt` beside this file has a line for each op, written by tools/op_schemas.py: torch's notation with real types,
versions of torch, flags. A line is parsed at the first look-up of its op. Workers refuse ops that are not in the table. Only
the owner of a process can extend it, when that process starts (`OpTable.add`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from gt import env
from gt.errors import ConfigError, UnsupportedOp
from gt.ir.ops import GT_OPS

FILE = Path(__file__).with_name("op_schemas.txt")
OWN = frozenset({"aten", "gt", "prim"})  # namespaces to which no library adds an op
MAY = "~"  # alias mark of an argument that an op may write, which torch's schema does not state
TYPES = frozenset(
    {"Tensor", "Scalar", "int", "float", "bool", "str", "ScalarType", "Layout", "MemoryFormat", "Device", "Generator"}
)
FLAGS = {
    "by_values": "the shapes of its results may depend on values",
    "takes_numbers": "a number may stand where the schema says Tensor: torch makes a tensor without dims of it",
    "trusts_values": "its kernel indexes memory by values of a tensor as they are: CPU workers check them, GPUs do not",
}
# Reasons for ops of torch that are not in the table. Ops left out by name have their own.
LEFT_OUT = {
    "composite": "torch carries it out as other ops before a device sees it",
    "kernel": "it has no kernel for dense tensors on CPUs or GPUs",
    "returns": "it returns something besides tensors",
    "argument": "it takes what cannot be sent",
    "random": "it draws from the generator of the worker's process, which all sessions share",
    "out": "it writes to tensors that are given (out=), which it resizes: programs send the op without, and a copy",
    "metadata": "it changes its operand's shape, strides or storage in place",
}
_NAME = re.compile(r"[A-Za-z_]\w{0,60}\.\w{1,80}\.\w{1,60}", re.ASCII)
# A line of the table: "aten.add_.Tensor(Tensor(a!) self, Tensor other, *, Scalar alpha=1) -> (Tensor(a!))  # 2.11-2.13 FLAGS"
_ROW = re.compile(
    r"(?P<op>\w+\.\w+\.\w+)\((?P<arguments>.*)\) -> \((?P<returns>.*)\)  "
    r"# (?P<since>[\d.]+)-(?P<until>[\d.]+)(?P<flags>( \w+)*)"
)
# base "Tensor", alias "a", mark "!" (written) or "~" (may be written), suffix "[]", "[]?", "?[]" or "?"
_TYPE = re.compile(r"(?P<base>\w+)(?:\((?P<alias>(?:[a-z]\d{0,2})?)(?P<mark>[!~]?)\))?(?P<suffix>\[\]\??|\?\[\]|\?)?")


@dataclass(frozen=True)
class SchemaType:
    """Type of an argument or result. alias: torch's letter for the memory that it shares, "" for none."""

    text: str
    base: str
    list: bool
    optional: bool  # may be None
    gaps: bool  # items of the list may be None
    alias: str
    written: bool
    may_write: bool

    @classmethod
    @lru_cache(maxsize=4096)  # shared by all schemas: a worker's Hello has thousands of arguments of few types
    def parse(cls, text: str) -> SchemaType:
        """Parse a type; ValueError for one that the table does not have."""
        match = _TYPE.fullmatch(text)
        if match is None or match["base"] not in TYPES:
            raise ValueError(f"{text!r:.80} is not a type of the table")
        suffix = match["suffix"] or ""
        return cls(
            text, match["base"], "[]" in suffix, suffix.endswith("?"), suffix == "?[]", match["alias"] or "",
            match["mark"] == "!", match["mark"] == MAY,
        )  # fmt: skip


@dataclass(frozen=True)
class Argument:
    """One argument of an op, as its schema declares it."""

    name: str
    type: SchemaType
    required: bool
    by_name: bool  # keyword-only


@dataclass(frozen=True)
class Schema:
    """Schema of one overload. since, until: first and last version of torch that has it in this form."""

    op: str
    arguments: tuple[Argument, ...]
    returns: tuple[SchemaType, ...]
    since: str
    until: str
    flags: frozenset[str]
    line: str = field(default="", compare=False, repr=False)  # its line in the table

    @cached_property
    def named(self) -> dict[str, Argument]:
        return {argument.name: argument for argument in self.arguments}

    @cached_property
    def positional(self) -> tuple[Argument, ...]:
        return tuple(argument for argument in self.arguments if not argument.by_name)

    @cached_property
    def writes(self) -> tuple[str, ...]:
        """Names of the arguments that the op writes."""
        return tuple(argument.name for argument in self.arguments if argument.type.written)

    @cached_property
    def aliases(self) -> bool:
        """True if a result shares memory with an argument that the op does not write."""
        return any(value.alias and not value.written for value in self.returns)

    @classmethod
    def parse(cls, line: str) -> Schema:
        """The schema of a line of the table; ValueError names the fault."""
        match = _ROW.fullmatch(line)
        if match is None:
            raise ValueError(f"{line!r:.120} is not a line of the table")
        flags = frozenset(match["flags"].split())
        if flags - set(FLAGS):
            raise ValueError(f"{match['op']} has the flags {sorted(flags - set(FLAGS))}, want some of {sorted(FLAGS)}")

        # Arguments behind a lone `*` are by name. A default makes one optional; its value is torch's affair.
        arguments, by_name = [], False
        for text in filter(None, match["arguments"].split(", ")):
            if text == "*":
                by_name = True
                continue
            kind, _, name = text.partition(" ")
            name, equals, _ = name.partition("=")
            arguments.append(Argument(name, SchemaType.parse(kind), not equals, by_name))
            if by_name and arguments[-1].type.written:
                raise ValueError(f"{match['op']} writes its result to {name}, which may not fit: no worker does that")
        returns = tuple(SchemaType.parse(text) for text in filter(None, match["returns"].split(", ")))
        return cls(match["op"], tuple(arguments), returns, match["since"], match["until"], flags, line)


class OpTable:
    """Schemas by name of op. An op whose schema changed between versions of torch has several."""

    def __init__(self, text: str = "") -> None:
        self._lines: dict[str, list[str]] = {}
        self._left: dict[str, str] = {}
        self._parsed: dict[str, tuple[Schema, ...]] = {}
        # Lines are sorted by op and not parsed: a process uses few of about
        # 1,000. "- aten.resize_.default  metadata" is left out.
        for line in text.splitlines():
            if line[:2] == "- ":
                name, _, why = line[2:].partition("  ")
                self._left[name] = why
            elif line and line[0] != "#":
                self._lines.setdefault(line[: line.find("(")], []).append(line)

    def __contains__(self, op: str) -> bool:
        return op in self._lines

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)

    def __len__(self) -> int:
        return len(self._lines)

    @property
    def left_out(self) -> dict[str, str]:
        """Ops of torch that workers refuse, with the reasons."""
        return {op: LEFT_OUT.get(why, why) for op, why in self._left.items()}

    def find(self, op: str) -> tuple[Schema, ...]:
        """The schemas of an op. UnsupportedOp for one that is not in the table."""
        schemas = self._parsed.get(op)
        if schemas is None:
            if op not in self._lines:
                raise UnsupportedOp(self.refusal(op))
            schemas = self._parsed[op] = tuple(map(Schema.parse, self._lines[op]))
        return schemas

    def refusal(self, op: str) -> str:
        """The reason why workers refuse an op."""
        why = self._left.get(op)
        if why is not None:
            return f"{op} is not an op that workers execute: {LEFT_OUT.get(why, why)}"
        if _NAME.fullmatch(op) is None:
            return f"{op!r:.80} is not an op: want a name like aten.add.Tensor"
        text = (
            f"{op} is not an op of the table: if your torch has it, `gt ops {op} >> ops.txt` writes its schema, and "
            "GT_OPS=ops.txt for server, workers and program adds it"
        )
        return text if op.partition(".")[0] in OWN else f"{text}; for another library's ops see `gt worker --library`"

    def add(self, lines: Iterable[str], source: str = "OpTable.add") -> list[str]:
        """Extend the table of this process, and return the names of the ops. For the process's owner, before it serves anybody.

        ConfigError names a line that is no schema, or an op that is left out because of its effects.
        """
        added: dict[str, list[tuple[str, Schema]]] = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            try:
                schema = Schema.parse(line.strip())
            except ValueError as error:
                raise ConfigError(f"{source}, line {number}: {error}") from None
            # Some ops are left out for what they do. No owner may add those, as they would break the sessions of others.
            why = self._left.get(schema.op)
            if why is not None and why not in LEFT_OUT:
                raise ConfigError(f"{source}, line {number}: {schema.op} cannot be added: {why}")
            added.setdefault(schema.op, []).append((line.strip(), schema))

        # All lines are good: only now does the table change.
        for op, rows in added.items():
            self._lines[op] = [line for line, _ in rows]
            self._parsed[op] = tuple(schema for _, schema in rows)
        return list(added)


def _load() -> OpTable:
    table = OpTable(FILE.read_text())
    table.add(f"{op}{schema}  # 2.11-2.13" for op, (schema, _) in GT_OPS.items())
    own = env.get("GT_OPS")
    if own:
        try:
            table.add(Path(own).read_text().splitlines(), f"GT_OPS={own}")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"GT_OPS names {own!r}, which cannot be read: {error}") from None
    return table


TABLE = _load()


# ---- ops of other libraries, as workers announce them: nothing here extends the table of this process

MAX_LIBRARY_OPS = 512  # of all libraries of a worker
MAX_LIBRARY_CHARACTERS = 64 << 10  # of all their lines, which take the dispatcher up to 50 ms
MAX_LIBRARY_LINE_CHARACTERS = 2048  # characters
_LIBRARY_OP = re.compile(r"(?P<library>[A-Za-z_]\w{0,60})\.\w{1,80}\.\w{1,60}", re.ASCII)
Schemas = Mapping[str, Schema]  # by name of op


def library_schemas(lines: Any) -> dict[str, Schema]:
    """The schemas of a worker's lines. ValueError names the first that is none, or the limit that they exceed."""
    if type(lines) is not list or any(type(line) is not str for line in lines):
        raise ValueError("ops is not a list of texts")
    characters = sum(map(len, lines))
    if len(lines) > MAX_LIBRARY_OPS or characters > MAX_LIBRARY_CHARACTERS:
        raise ValueError(
            f"{len(lines)} ops of libraries with {characters} characters, at most {MAX_LIBRARY_OPS} with "
            f"{MAX_LIBRARY_CHARACTERS} are taken: name fewer libraries"
        )
    return {schema.op: schema for schema in map(_library_schema, lines) if schema.op not in TABLE}


def _library_schema(line: str) -> Schema:
    # Looked at before the large pattern: a worker's text is not trusted, and with one ") -> (" the pattern has little to try.
    name = _LIBRARY_OP.fullmatch(line[: line.find("(")])
    plain = len(line) <= MAX_LIBRARY_LINE_CHARACTERS and line.isascii() and line.isprintable() and line.count(") -> (") == 1
    if not plain or name is None:
        raise ValueError(f"{line!r:.80} is not the schema of a library's op")
    if name["library"] in OWN:
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

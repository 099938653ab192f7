"""Writes the generated pages of docs/, and configs/schema.json: `python -m tools.docs` (or `make docs`).

protocol.md is made from gt/wire/messages/ and gt/ir/instr.py, environment.md from gt/env.py, and ops.md from runs of
tests.conformance. A test compares the pages with their sources.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from gt import env
from gt.config import json_schema
from gt.ir import instr
from gt.wire import link, messages
from gt.wire.messages import clients, handshake, observers, workers
from tools import ops_page

ROOT = Path(__file__).resolve().parent.parent
DOCS, SCHEMA = ROOT / "docs", ROOT / "configs" / "schema.json"
MADE = "<!-- made by `python -m tools.docs`; edit {source}, then run that -->\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; `|` within a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


# ---- environment.md

ENVIRONMENT = """# Environment variables

Variables set the config, the server, logs and limits from outside. So a program gets another placement without a change:

```
GT_CONFIG=sharding.yaml GT_VERBOSE=1 python program.py
```

GT reads these variables and no others. `gt env` prints each with its value here.

{table}
| case | rule |
| --- | --- |
| an empty variable | counts as unset |
| a switch | is off for empty, `0`, `false` and `no` |
| processes that a program starts by itself | get the program's variables |
| a server or worker started by hand | reads its own shell's variables, when it starts |
| `CUDA_VISIBLE_DEVICES` | CUDA's own; it says which GPUs there are |
"""


def environment() -> str:
    rows = [(f"`{v.name}`", f"`{v.default}`" if v.default else "", v.help) for v in env.VARIABLES]
    return MADE.format(source="gt/env.py") + ENVIRONMENT.format(table=table(("variable", "default", "meaning"), rows))


# ---- protocol.md

PROTOCOL = """# Protocol

You need this page to write a client or a worker, or to read a log of messages. A program that uses GT never needs it. A client
opens a connection and computes one value like this:

```
client     -> dispatcher   Hello          who it is, and its config
dispatcher -> client       Welcome        the workers, the signal groups, and credit for batches
client     -> dispatcher   Ops            a batch of ops
dispatcher -> workers      Run            the instructions that the ops became
workers    -> dispatcher   Done           they are executed
dispatcher -> client       Ack            credit for another batch
client     -> dispatcher   Fetch          asks for a value
dispatcher -> client       Value, Piece   the value's shape, and its bytes
client     -> dispatcher   Goodbye
```

The [glossary](glossary.md) explains the terms. This is version {version}, over ZeroMQ: clients and workers have DEALER sockets,
the dispatcher has a ROUTER. A msgpack body has at most {body} MiB.

{about}

CHUNK is {chunk} MiB. The number behind a message's name is its code. Four rules hold on each connection:

- `Hello` is the first message and is sent once. `Welcome` or `Reject` answers it.
- Batches (`Ops`) are numbered and in order.
- `Goodbye` is the last message.
- A message that is not in its sender's row of this table ends the connection:

{roles}
{messages}
## Instructions

{instructions}

{reserved}
{kinds}"""


def protocol() -> str:
    shown = [f"## {title}\n" + "".join(message(cls) for cls in found) for title, found in sections()]
    return MADE.format(source="gt/wire/messages/ and gt/ir/instr.py") + PROTOCOL.format(
        version=messages.VERSION,
        body=messages.MAX_BODY_BYTES >> 20,
        chunk=messages.CHUNK >> 20,
        about=unwrapped(messages.__doc__),
        roles=table(("peer", "may send, after Hello", "may get"), list(roles())),
        messages="\n".join(shown),
        instructions=unwrapped(instr.__doc__),
        reserved=table(("number", "name", "meaning"), list(reserved())),
        kinds=table(("kind", "operands", "definition", "meaning"), list(instructions())),
    )


def reserved() -> Iterator[tuple[str, str, str]]:
    """The numbers of a stream that no template or definition has; the meaning is the comment above or behind."""
    lines = inspect.getsource(instr).splitlines()
    for at, line in enumerate(lines):
        if (named := re.match(r"([A-Z]+) = (\d+)\b", line)) is not None:
            yield named[2], f"`{named[1]}`", comment(lines, at, at)


def unwrapped(text: str | None) -> str:
    """A docstring without its line breaks; paragraphs stay."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n"))


def roles() -> Iterator[tuple[str, str, str]]:
    for role, (sends, gets) in link.MAY_SEND.items():
        yield role, listed(sends), listed(gets)


def listed(kinds: frozenset[type[messages.Message]]) -> str:
    return ", ".join(f"`{kind.__name__}`" for kind in messages.CODES if kind in kinds)


def sections() -> list[tuple[str, list[type[messages.Message]]]]:
    """(heading, messages) in the order of the sources, headings being their `# ---- x` lines."""
    found: list[tuple[str, list[type[messages.Message]]]] = []
    for line in "".join(map(inspect.getsource, (handshake, clients, workers, observers))).splitlines():
        if line.startswith("# ---- "):
            found.append((line.removeprefix("# ---- "), []))
        elif (name := re.match(r"class (\w+)\(Message\)", line)) is not None:
            found[-1][1].append(getattr(messages, name[1]))
    return found


def message(cls: type[messages.Message]) -> str:
    rows = []
    for field in fields(cls):
        default = "" if field.default is MISSING else f" = {field.default}"
        rows.append(f"{field.name}: {field.type}{default}")
    head = f"\n### {cls.__name__} ({messages.CODES.index(cls)})\n\n"
    text = explained(unwrapped(cls.__doc__), [field.name for field in fields(cls)])
    return head + f"`{', '.join(rows) or 'no fields'}`\n\n" + text + "\n"


def explained(text: str, names: list[str]) -> str:
    """A docstring's text, the fields that it explains (`name: meaning.`) as a list."""
    name = "|".join([*names, "frames", r"Report\.body"])
    told = re.compile(rf"(?:^|(?<=\. ))((?:{name})(?:, (?:{name}))*): ")
    paragraphs = []
    for paragraph in text.split("\n\n"):
        lead, *rest = told.split(paragraph)
        items = [f"- `{listed}`: {meaning.strip()}" for listed, meaning in zip(rest[::2], rest[1::2], strict=True)]
        paragraphs += [lead.strip()] if lead.strip() else []
        paragraphs += ["\n".join(items)] if items else []
    return "\n\n".join(paragraphs)


def instructions() -> Iterator[tuple[str, str, str, str]]:
    """Rows of KINDS; the meaning is the comment above an entry, or behind it."""
    source = inspect.getsource(instr)
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and getattr(node.target, "id", "") == "KINDS":
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Constant) and value.end_lineno is not None
                operands, payload = instr.KINDS[key.value]
                text = comment(lines, key.lineno - 1, value.end_lineno - 1)
                yield f"`{key.value}`", ", ".join(operands), ", ".join(payload), text


def comment(lines: list[str], first: int, last: int) -> str:
    above: list[str] = []
    while (line := lines[first - 1 - len(above)].strip()).startswith("#"):
        above.insert(0, line)
    behind = lines[last].partition("  #")[2].strip()
    return " ".join([*(line.lstrip("# ") for line in above), behind]).strip()


def ops() -> str:
    return MADE.format(source="benchmarks/results/conformance*.json by runs of tests.conformance") + ops_page.page(table)


PAGES = {"protocol.md": protocol, "environment.md": environment, "ops.md": ops}


def main() -> None:
    for name, page in PAGES.items():
        (DOCS / name).write_text(page())
    SCHEMA.write_text(json_schema.text())


if __name__ == "__main__":
    main()

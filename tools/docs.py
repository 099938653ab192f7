"""Writes the pages of docs/ that are made from the code: `python -m tools.docs` (or `make docs`).

protocol.md is gt/wire/messages.py and gt/ir/instr.py, environment.md is gt/env.py, ops.md is a run of tests.conformance. A
test holds that the pages are these.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import MISSING, fields
from pathlib import Path

from gt import env
from gt.ir import instr
from gt.wire import link, messages
from tools import ops_page

DOCS = Path(__file__).resolve().parent.parent / "docs"
MADE = "<!-- made by `python -m tools.docs`; edit {source}, then run that -->\n"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table; `|` within a cell is escaped."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


# ---- environment.md

ENVIRONMENT = """# Environment variables

Nothing else in GT reads the environment. An empty variable counts as unset; a switch is off for empty, `0`, `false` and
`no`. `gt env` prints each with its value here.

{table}
The dispatcher and its workers read theirs when they start: those that a program starts by itself get the program's, those
started by hand have their own shell's. Of CUDA's variables, `CUDA_VISIBLE_DEVICES` says which GPUs there are.
"""


def environment() -> str:
    rows = [(f"`{v.name}`", f"`{v.default}`" if v.default else "", v.help) for v in env.VARIABLES]
    return MADE.format(source="gt/env.py") + ENVIRONMENT.format(table=table(("variable", "default", "meaning"), rows))


# ---- protocol.md

PROTOCOL = """# Protocol

Version {version}, over ZeroMQ: DEALER sockets (clients, workers) to the ROUTER of the dispatcher, msgpack bodies of at most
{body} MiB.

{about}

CHUNK is {chunk} MiB. The number behind a message's name is its code. `Hello` comes first and once, and `Welcome` or `Reject`
answers it; batches (`Ops`) are numbered and in order; nothing is sent after `Goodbye`. A message that is not in its
sender's row here ends that connection:

{roles}
{messages}
## Instructions

{instructions}

{reserved}
{kinds}"""


def protocol() -> str:
    shown = [f"## {title}\n" + "".join(message(cls) for cls in found) for title, found in sections()]
    return MADE.format(source="gt/wire/messages.py and gt/ir/instr.py") + PROTOCOL.format(
        version=messages.VERSION,
        body=messages.MAX_BODY >> 20,
        chunk=messages.CHUNK >> 20,
        about=unwrapped(messages.__doc__),
        roles=table(("peer", "may send, after Hello", "may get"), list(roles())),
        messages="\n".join(shown),
        instructions=unwrapped(instr.__doc__),
        reserved=table(("number", "name", "meaning"), list(reserved())),
        kinds=table(("kind", "operands", "definition", "meaning"), list(instructions())),
    )


def reserved() -> Iterator[tuple[str, str, str]]:
    """The numbers of a stream that no template or definition has."""
    for name, number, said in re.findall(r"^([A-Z]+) = (\d+)  # (.*)$", inspect.getsource(instr), re.M):
        yield number, f"`{name}`", said


def unwrapped(text: str | None) -> str:
    """A docstring without its line breaks; paragraphs stay."""
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text or "").split("\n\n"))


def roles() -> Iterator[tuple[str, str, str]]:
    for role, (sends, gets) in link.MAY_SEND.items():
        yield role, listed(sends), listed(gets)


def listed(kinds: frozenset[type[messages.Message]]) -> str:
    return ", ".join(f"`{kind.__name__}`" for kind in messages.CODES if kind in kinds)


def sections() -> list[tuple[str, list[type[messages.Message]]]]:
    """(heading, messages) in the order of the source, headings being its `# ---- x` lines."""
    found: list[tuple[str, list[type[messages.Message]]]] = []
    for line in inspect.getsource(messages).splitlines():
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
    return head + f"`{', '.join(rows) or 'no fields'}`\n\n" + unwrapped(cls.__doc__) + "\n"


def instructions() -> Iterator[tuple[str, str, str, str]]:
    """Rows of KINDS; the meaning is the comment above an entry, or behind it."""
    source = inspect.getsource(instr)
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Dict) and getattr(node.target, "id", "") == "KINDS":
            for key, value in zip(node.value.keys, node.value.values, strict=True):
                assert isinstance(key, ast.Constant) and value.end_lineno is not None
                operands, payload = instr.KINDS[key.value]
                said = comment(lines, key.lineno - 1, value.end_lineno - 1)
                yield f"`{key.value}`", ", ".join(operands), ", ".join(payload), said


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


if __name__ == "__main__":
    main()

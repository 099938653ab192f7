"""What a batch brings before its stream: whether it may come at all, and the templates and origins it defines.

Everything a client may claim is bounded here; what is beyond is a ProtocolError that names the field.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gt.config.load import hint
from gt.dispatcher.sharding import shape_rules
from gt.dispatcher.sharding.groups import Meaning
from gt.errors import ProtocolError, UnsupportedOp
from gt.ir import check
from gt.ir.instr import FIRST
from gt.ir.template import weight
from gt.wire.messages import Notice, Ops

if TYPE_CHECKING:
    from gt.dispatcher.session import ClientSession

CREDIT = 64  # batches a client may have under way
LONGEST = 1 << 18  # numbers of one batch
MOST_OPS = 1 << 18  # ops under way before another batch
MOST_TEMPLATES, MOST_ORIGINS = 1 << 16, 1 << 20
LONGEST_NAME = 4096  # characters of a file's name, and of a group's: contexts within one another
DEEPEST = 32  # signal contexts within one another
MOST_NAMES = 4 << 20  # characters of all different names of a session
HEAVIEST = 1 << 21  # parts of all templates of a session
MOST_WARNINGS = 100  # of groups that the config lacks
MOST_HINTS = 4  # of these with a near name, which takes milliseconds to find
SHORT = 80  # characters of a name in such a warning


@dataclass(frozen=True, slots=True, eq=False)
class Origin:
    """Where the user issued an op. group: nested contexts, `outer/inner`; target: where a transfer among them leads."""

    file: str
    line: int
    group: str
    backward: bool
    micro: int = -1  # micro-batch
    meaning: Meaning | None = None
    target: Meaning | None = None


def admit(session: ClientSession, message: Ops) -> None:
    """Batches come in order, and so many as were granted."""
    if message.seq != session.next_batch:
        raise ProtocolError(f"Ops.seq is {message.seq}, want {session.next_batch}")
    session.next_batch += 1
    batches = session.batches
    if len(batches.pending) + len(batches.coming) >= CREDIT or len(session.journal.rows) > MOST_OPS:
        raise ProtocolError(f"Ops.seq {message.seq} is beyond the credit of {CREDIT} batches and {MOST_OPS} ops")
    if len(message.code) > LONGEST:
        raise ProtocolError(f"Ops.code has {len(message.code)} numbers, at most {LONGEST} are taken")


def define(session: ClientSession, row: Any) -> None:
    """[number, template] of Ops.templates."""
    number, form = row if type(row) is list and len(row) == 2 else (None, None)
    if type(number) is not int or not FIRST <= number < FIRST + MOST_TEMPLATES:
        raise ProtocolError(f"Ops.templates: {row!r:.80} is not [number, template], numbers from {FIRST}")
    try:
        known = shape_rules.known(check.template(form))
    except UnsupportedOp as error:
        raise UnsupportedOp(f"Ops.templates: template {number}: {error}") from None
    except (TypeError, ValueError, KeyError) as error:
        raise ProtocolError(f"Ops.templates: template {number}: {error}") from error
    if number in session.templates:  # the client's table has started again
        session.templates[number].plans.clear()
        session.template_parts = 0 if number == FIRST else session.template_parts
    session.template_parts += weight(form)
    if session.template_parts > HEAVIEST:
        raise ProtocolError(f"Ops.templates: all of them have {session.template_parts} parts, at most {HEAVIEST} are taken")
    session.templates[number] = known


def origin(session: ClientSession, row: Any) -> None:
    """[number, file, line, group, backward, micro] of Ops.origins."""
    kinds = [type(part) for part in row] if type(row) is list else []
    if kinds != [int, str, int, str, bool, int] or max(len(row[1]), len(row[3])) > LONGEST_NAME:
        raise ProtocolError(f"Ops.origins: {row!r:.80} is not [number, file, line, group, backward, micro]")
    number, file, line, group, backward, micro = row
    if not 0 < number < MOST_ORIGINS:
        raise ProtocolError(f"Ops.origins: number {number} is not from 1 to {MOST_ORIGINS - 1}")
    if group.count("/") >= DEEPEST:
        raise ProtocolError(f"Ops.origins: {group.count('/') + 1} groups are within one another, at most {DEEPEST} are taken")
    file, group = _name(session, file), _name(session, group)
    meaning, missing = session.groups.find(group, backward)
    for name in missing:
        if name not in session.known_names and session.groups and len(session.known_names) < MOST_WARNINGS:
            session.known_names.add(name)
            near = hint(name, session.config.groups) if len(session.known_names) <= MOST_HINTS else ""
            text = f"the config has no group {name[:SHORT]!r}: ops run as outside it{near}"
            session.send(Notice(f"{file}:{line}: {text}"))
    leads = (session.groups.destination(name, backward) for name in reversed(group.split("/")))
    target = next((found for found in leads if found is not None), None)
    session.origins[number] = Origin(file, line, group, backward, micro, meaning, target)


def _name(session: ClientSession, text: str) -> str:
    """One object for equal names."""
    known = session.names.get(text)
    if known is not None:
        return known
    session.name_characters += len(text)
    if session.name_characters > MOST_NAMES:
        raise ProtocolError(f"Ops.origins: names have {session.name_characters} characters, at most {MOST_NAMES} are taken")
    session.names[text] = text
    return text

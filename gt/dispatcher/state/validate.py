"""Validation of a batch before its stream: its admission, and the templates and origins that it defines.

Every number that a client sends is bounded here; one beyond its bound is a ProtocolError that names the field.
"""

from __future__ import annotations

from typing import Any

from gt.config.load import hint
from gt.config.schema import MAX_NESTED_GROUPS, MAX_PATH_CHARACTERS
from gt.dispatcher.sharding import shape_rules
from gt.dispatcher.state.context import SessionContext
from gt.dispatcher.state.records import Origin
from gt.errors import ProtocolError, UnsupportedOp
from gt.ir import check
from gt.ir.instr import FIRST
from gt.ir.template import weight
from gt.wire import codec
from gt.wire.messages import Notice, Ops

CREDIT = 64  # batches a client may have under way
MAX_BATCH_NUMBERS = 1 << 18  # numbers of one batch
MAX_OPS_UNDER_WAY = 1 << 18  # ops under way before another batch
MAX_TEMPLATES, MAX_ORIGINS = 1 << 16, 1 << 20
MAX_FILE_CHARACTERS = 4096  # characters of a file's name
MAX_ALL_NAME_CHARACTERS = 4 << 20  # characters of all different names of a session
MAX_GROUP_WARNINGS = 100  # warnings about groups that the config lacks
MAX_GROUP_HINTS = 4  # warnings that suggest a similar name, which takes milliseconds to find
MAX_SHOWN_CHARACTERS = 80  # characters of a name in such a warning


class Definitions:
    """Templates and origins that one session's client has defined, and how many batches it has sent."""

    def __init__(self, context: SessionContext) -> None:
        self._context, self._queue, self._journal = context, context.queue, context.journal
        self._templates, self._origins = context.templates, context.origins
        self.next_batch = 0
        self._template_parts = 0  # parts of all templates together
        self._names: dict[str, str] = {}  # names of files and groups, each kept once
        self._name_characters = 0
        self._unknown_groups: set[str] = set()

    def admit(self, message: Ops) -> None:
        """Refuse a batch that is out of order, or more than were granted."""
        if message.seq != self.next_batch:
            raise ProtocolError(f"Ops.seq is {message.seq}, want {self.next_batch}")
        self.next_batch += 1
        queue = self._queue
        if len(queue.pending) + len(queue.coming) >= CREDIT or len(self._journal.rows) > MAX_OPS_UNDER_WAY:
            raise ProtocolError(f"Ops.seq {message.seq} is beyond the credit of {CREDIT} batches and {MAX_OPS_UNDER_WAY} ops")
        if len(message.code) > MAX_BATCH_NUMBERS:
            raise ProtocolError(f"Ops.code has {len(message.code)} numbers, at most {MAX_BATCH_NUMBERS} are taken")

    def define(self, row: Any) -> None:
        """[number, template] of Ops.templates."""
        number, form = row if type(row) is list and len(row) == 2 else (None, None)
        if type(number) is not int or not FIRST <= number < FIRST + MAX_TEMPLATES:
            raise ProtocolError(f"Ops.templates: {row!r:.80} is not [number, template], numbers from {FIRST}")

        # Weighed before anything recursive looks at it: a template that is too large is refused by `check.template`.
        parts = weight(form, check.MAX_TEMPLATE_PARTS)
        if parts <= check.MAX_TEMPLATE_PARTS:
            codec.check(form, "Ops.templates")
        try:
            known = shape_rules.known(check.template(form, self._context.ops))
        except UnsupportedOp as error:
            raise UnsupportedOp(f"Ops.templates: template {number}: {error}") from None
        except (TypeError, ValueError, KeyError) as error:
            raise ProtocolError(f"Ops.templates: template {number}: {error}") from error
        # The client's table of templates is full and starts again: numbers from FIRST on get new meanings, and their parts
        # count anew. The others go too: a client that begins again and again would leave them here.
        if number == FIRST and number in self._templates:
            self._context.pace.leavings.add(dict(self._templates), lambda known: known.plans.clear())
            self._templates.clear()
            self._template_parts = 0
        elif number in self._templates:
            self._templates[number].plans.clear()
        self._template_parts += parts
        if self._template_parts > (most := check.MAX_ALL_TEMPLATE_PARTS):
            raise ProtocolError(f"Ops.templates: all of them have {self._template_parts} parts, at most {most} are taken")
        self._templates[number] = known

    def define_origin(self, row: Any) -> None:
        """[number, file, line, group, backward, micro] of Ops.origins."""
        kinds = [type(part) for part in row] if type(row) is list else []
        if kinds != [int, str, int, str, bool, int]:
            raise ProtocolError(f"Ops.origins: {row!r:.80} is not [number, file, line, group, backward, micro]")
        number, file, line, group, backward, micro = row
        for what, text, most in (("file", file, MAX_FILE_CHARACTERS), ("group", group, MAX_PATH_CHARACTERS)):
            if len(text) > most:
                raise ProtocolError(
                    f"Ops.origins: the {what} {text!r:.80} has {len(text)} characters, at most {most} are taken"
                )
        if not 0 < number < MAX_ORIGINS:
            raise ProtocolError(f"Ops.origins: number {number} is not from 1 to {MAX_ORIGINS - 1}")
        if group.count("/") >= MAX_NESTED_GROUPS:
            raise ProtocolError(
                f"Ops.origins: {group.count('/') + 1} groups are within one another, at most {MAX_NESTED_GROUPS} are taken"
            )

        # Many origins have equal names, and each name is kept once; a typing error in a group's name is reported once.
        file, group = self._name(file), self._name(group)
        meaning, missing = self._context.groups.find(group, backward)
        for name in missing:
            if name not in self._unknown_groups and self._context.groups and len(self._unknown_groups) < MAX_GROUP_WARNINGS:
                self._unknown_groups.add(name)
                near = hint(name, self._context.config.groups) if len(self._unknown_groups) <= MAX_GROUP_HINTS else ""
                shown = name[:MAX_SHOWN_CHARACTERS]
                letters = "" if shown.isascii() else f" ({shown!a})"  # a letter of another script may look like one of its own
                text = f"the config has no group {shown!r}{letters}: ops run as outside it{near}"
                self._context.send(Notice(f"{file}:{line}: {text}"))

        # Of nested contexts, the innermost transfer (a group `A_to_B`) says where the op's result is sent.
        leads = (self._context.groups.destination(name, backward) for name in reversed(group.split("/")))
        target = next((lead for lead in leads if lead is not None), None)
        self._origins[number] = Origin(file, line, group, backward, micro, meaning, target)

    def _name(self, text: str) -> str:
        """One object for equal names."""
        known = self._names.get(text)
        if known is not None:
            return known
        self._name_characters += len(text)
        if self._name_characters > MAX_ALL_NAME_CHARACTERS:
            raise ProtocolError(
                f"Ops.origins: names have {self._name_characters} characters, at most {MAX_ALL_NAME_CHARACTERS} are taken"
            )
        self._names[text] = text
        return text

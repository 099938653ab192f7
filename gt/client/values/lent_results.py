"""Results that a program has lent to its caller, and that a backward pass reads: whether something has written to them.

A version counter does not tell: `result.data` has one of its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping

from gt.ir.instr import FIRST, client_length
from gt.ir.template import Template


class LentResult:
    """Results of one call. ids: of these tensors and of views of them."""

    __slots__ = ("__weakref__", "ids", "written")

    def __init__(self, numbers: Iterable[int]) -> None:
        self.ids = set(numbers)
        self.written = False


class LentResults:
    """The lent results of one recorder's program. The caller holds the recorder's lock. code: its buffer."""

    def __init__(self, templates: Mapping[int, Template]) -> None:
        self.templates = templates
        self._open: list[weakref.ref[LentResult]] = []  # no set: most batches find it empty, and have to be quick
        self._followed = 0  # numbers of the buffer that are followed

    def add(self, numbers: Iterable[int], code: list) -> LentResult:
        """Follow these results as long as somebody holds the answer."""
        self._follow(code)
        lent = LentResult(numbers)
        self._open.append(weakref.ref(lent))
        return lent

    def written(self, lent: LentResult, code: list) -> bool:
        """True if an op has written to one of these results."""
        self._follow(code)
        return lent.written

    def handed_over(self, code: list) -> None:
        """These ops leave the buffer."""
        self._follow(code)
        self._followed = 0

    def _follow(self, code: list) -> None:
        at, self._followed = self._followed, len(code)
        if not self._open:
            return
        results = [lent for found in self._open if (lent := found()) is not None]
        self._open[:] = map(weakref.ref, results)
        while results and at < len(code):
            number = code[at]
            if number < FIRST:
                at += client_length(code, at)
                continue
            template = self.templates[number]
            first = at + 2
            ins = code[first : first + len(template.ins)]
            at = first + len(ins) + template.values + template.results
            for lent in results:
                if not lent.ids.isdisjoint(ins):
                    _follow(lent, template, ins, code[at - template.results : at])


def _follow(lent: LentResult, template: Template, ins: list[int], made: list[int]) -> None:
    """Note what one op does that reads a result."""
    # An op on lists has no outs: it may change any operand
    if not template.outs or any(ins[place] in lent.ids for place in template.writes):
        lent.written = True
    numbers = iter(made)
    for out in template.outs:
        if out.kind in ("new", "view"):
            number = next(numbers)
            if out.kind == "view" and ins[out.of] in lent.ids:
                lent.ids.add(number)

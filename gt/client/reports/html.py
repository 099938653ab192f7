"""HTML for notebooks: tensors as blocks coloured by worker, bars of memory, plans and reports. All text is escaped.

Only markup with inline styles: no script and nothing from another site. Text takes the notebook's colours, light or dark.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from gt.ir.text import size

# One for each worker, again from the ninth on: distinct in light and dark, and for colour-blind readers
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#997700", "#bbbbbb")
WIDTH, HEIGHT = 84, 56  # pixels of a tensor's outline
MAX_DRAWN = 64  # workers


def colour(worker: int) -> str:
    return COLOURS[worker % len(COLOURS)]


def text_block(text: str) -> str:
    """Text as it is, in a frame."""
    style = "font-size:12px;line-height:1.35;overflow-x:auto;border:1px solid #8888;border-radius:4px;padding:6px"
    return f'<pre style="{style}">{escape(text)}</pre>'


def titled(title: str, *parts: str) -> str:
    return f'<div style="font-family:sans-serif;font-size:12px"><b>{escape(title)}</b>{"".join(parts)}</div>'


def tensor(body: Mapping[str, Any]) -> str:
    """A tensor's layout, from gt.inspect: for each worker an outline of the tensor, in which its piece is filled."""
    shape, pieces = list(body["shape"]), list(body["pieces"])
    rows, columns = _drawn_dims(shape, pieces)
    drawn = "".join(_outline(piece, body) for piece in pieces[:MAX_DRAWN])
    more = f"<div>and {len(pieces) - MAX_DRAWN} more workers</div>" if len(pieces) > MAX_DRAWN else ""
    dims = f"dims {rows} (down) and {columns} (across)" if len(shape) > 1 else ""
    title = f"{body['spec']} {body['layout']} {body['mesh']}".strip()
    return titled(title, f'<div style="display:flex;flex-wrap:wrap">{drawn}</div>', more, f"<div>{escape(dims)}</div>")


def _drawn_dims(shape: Sequence[int], pieces: Sequence[Mapping[str, Any]]) -> tuple[int, int]:
    """The two dims that are drawn: those that are split, else the last ones."""
    split = [d for d in range(len(shape)) if any(p["shape"][d] != shape[d] for p in pieces)]
    rest = [d for d in reversed(range(len(shape))) if d not in split]
    chosen = sorted((split + rest)[:2]) or [0]
    return chosen[0], chosen[-1]


def drawing(piece: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    """A tensor's outline of WIDTH x HEIGHT in SVG, in which one worker's piece is filled. body: of gt.inspect."""
    shape = list(body["shape"])
    rows, columns = _drawn_dims(shape, list(body["pieces"]))
    high, wide = shape[rows] if len(shape) > 1 else 1, shape[columns] if shape else 1
    filled = []
    for box in piece["boxes"] if high and wide else ():
        top, bottom = box[rows] if len(shape) > 1 else (0, 1)
        left, right = box[columns] if shape else (0, 1)
        x, y, w, h = WIDTH * left / wide, HEIGHT * top / high, WIDTH * (right - left) / wide, HEIGHT * (bottom - top) / high
        place = f'x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}"'
        filled.append(f'<rect {place} fill="{colour(piece["index"])}"/>')
    return f'{"".join(filled)}<rect width="{WIDTH}" height="{HEIGHT}" fill="none" stroke="#888"/>'


def _outline(piece: Mapping[str, Any], body: Mapping[str, Any]) -> str:
    label = f"{piece['worker']} {' x '.join(map(str, piece['shape'])) or 'scalar'}, {size(piece['bytes'])}"
    svg = f'<svg width="{WIDTH}" height="{HEIGHT}" role="img" aria-label="{escape(label)}">{drawing(piece, body)}</svg>'
    return f'<div style="margin:4px">{svg}<div style="max-width:{WIDTH + 40}px">{escape(label)}</div></div>'


def bars(rows: Sequence[tuple[str, Mapping[str, int]]]) -> str:
    """Bars of bytes by use, one row a worker, all on one scale. A legend names the colours."""
    most = max((sum(parts.values()) for _, parts in rows), default=0) or 1
    uses = list(dict.fromkeys(use for _, parts in rows for use in parts))
    lines = []
    for name, parts in rows:
        blocks = "".join(
            f'<span title="{escape(use)} {size(nbytes)}" style="display:inline-block;height:14px;'
            f'width:{320 * nbytes / most:.1f}px;background:{colour(uses.index(use))}"></span>'
            for use, nbytes in parts.items()
        )
        lines.append(f"<div>{blocks} {escape(name)} {size(sum(parts.values()))}</div>")
    legend = " ".join(f'<span style="color:{colour(n)}">&#9632;</span> {escape(use)}' for n, use in enumerate(uses))
    return f"<div>{legend}</div>{''.join(lines)}"


class TextReport(str):
    """Text of a report, which a notebook shows in a frame."""

    def _repr_html_(self) -> str:
        return text_block(self)


class TensorPlacement(dict[str, Any]):
    """The answer of gt.inspect, which a notebook shows as blocks coloured by worker."""

    def _repr_html_(self) -> str:
        return tensor(self)

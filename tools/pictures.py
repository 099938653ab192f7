"""Pictures of docs/: `python -m tools.pictures` writes docs/pictures/layouts.svg, from gt.inspect on four CPU workers."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from gt.client.reports import html

OUT = Path(__file__).resolve().parent.parent / "docs" / "pictures" / "layouts.svg"
ROW, LEFT, GAP = 92, 250, 110  # pixels: height of a tensor's row, width of its text, and of one worker
CONFIG = {"net_colpar": {"workers": [0, 1, 2, 3]}, "net_rowpar": {"workers": [0, 1, 2, 3]}}


def placements() -> list[tuple[str, dict[str, Any]]]:
    """Tensors of a column-parallel and a row-parallel layer."""
    import torch

    import gt

    gt.cpu_workers(4, config=CONFIG)
    up, down = torch.nn.Linear(16, 64).to("remote"), torch.nn.Linear(64, 16).to("remote")
    x = torch.randn(8, 16, device="remote")
    with gt.signal.context("net_colpar"):
        h = up(x)
    with gt.signal.context("net_rowpar"):
        y = down(h)
    tensors = {"up.weight": up.weight, "h = up(x)": h, "down.weight": down.weight, "y = down(h)": y}
    placed = [(name, dict(gt.inspect(tensor))) for name, tensor in tensors.items()]
    gt.shutdown()
    return placed


def svg(rows: list[tuple[str, dict[str, Any]]]) -> str:
    parts = []
    for n, (name, body) in enumerate(rows):
        text = f"{name}: {body['spec']} {body['layout']}"
        parts.append(f'<text x="8" y="{n * ROW + 40}">{escape(text)}</text>')
        for piece in body["pieces"]:
            left = LEFT + GAP * piece["index"]
            label = f"{piece['worker']} {' x '.join(map(str, piece['shape']))}"
            parts.append(f'<g transform="translate({left},{n * ROW + 6})">{html.drawing(piece, body)}')
            parts.append(f'<text y="{html.HEIGHT + 14}">{escape(label)}</text></g>')
    size = f'width="{LEFT + 4 * GAP}" height="{len(rows) * ROW}"'
    style = 'font-family="sans-serif" font-size="12" fill="#777"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(svg(placements()))

"""HTML forms for notebooks: well-formed, text escaped, every worker drawn where its piece is."""

from __future__ import annotations

import re
from collections.abc import Callable
from xml.etree import ElementTree

import pytest
import torch

import gt
from gt.client.reports import html
from gt.observe.plan import Plan

pytestmark = pytest.mark.usefixtures("plain_threads")
EVIL = "<script>alert('&')</script>"


def parsed(markup: str) -> ElementTree.Element:
    """The markup, which is well-formed and loads nothing."""
    assert "<script" not in markup and not re.search(r"(src|href)=|url\(|@import", markup)
    return ElementTree.fromstring(f"<root>{markup}</root>")


def test_a_split_tensor_is_drawn_where_its_pieces_are(session: Callable) -> None:
    session({"net_colpar": {"workers": [0, 1, 2, 3]}})
    layer = torch.nn.Linear(16, 64).to("remote")
    with gt.signal.context("net_colpar"):
        layer(torch.randn(4, 16, device="remote"))
    placed = gt.inspect(layer.weight)
    assert placed["layout"] == "[S(0)]" and placed["shape"] == [64, 16]
    assert [piece["boxes"] for piece in placed["pieces"]] == [[[[n, n + 16], [0, 16]]] for n in range(0, 64, 16)]
    filled = [r for r in parsed(placed._repr_html_()).iter("rect") if r.get("fill") != "none"]
    assert [r.get("fill") for r in filled] == list(html.COLOURS[:4])
    quarter = html.HEIGHT / 4
    assert [(float(r.get("y")), float(r.get("height"))) for r in filled] == [(n * quarter, quarter) for n in range(4)]
    assert all(float(r.get("x")) == 0 and float(r.get("width")) == html.WIDTH for r in filled)


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 0, 3), (2, 3, 4, 5)])
def test_any_shape_has_a_form(session: Callable, shape: tuple) -> None:
    session("")
    x = torch.zeros(shape, device="remote") + 1
    assert parsed(gt.inspect(x)._repr_html_()).find("div") is not None
    parsed(gt.inspect(torch.empty(3, device="remote"))._repr_html_())


def test_text_is_escaped() -> None:
    body = {"spec": EVIL, "layout": EVIL, "mesh": EVIL, "shape": [2], "pieces": [
        {"worker": EVIL, "index": 9, "shape": [2], "bytes": 8, "boxes": [[[0, 2]]]}]}  # fmt: skip
    for markup in (
        html.tensor(body), html.text_block(EVIL), html.titled(EVIL), html.bars([(EVIL, {EVIL: 3})]),
        html.TextReport(EVIL)._repr_html_(),
    ):  # fmt: skip
        assert EVIL in "".join(parsed(markup).itertext()) or f"{EVIL} 2" in markup


def test_plans_explanations_and_memory_have_forms(session: Callable) -> None:
    def step() -> None:
        (torch.ones(8, 8, device="remote") @ torch.ones(8, 8, device="remote")).sum().item()

    plan = gt.plan(step, workers=2)
    assert isinstance(plan, Plan) and str(plan).strip() in "".join(parsed(plan._repr_html_()).itertext())
    session("")
    explained = gt.compile(step).explain()
    assert isinstance(explained, str) and explained in "".join(parsed(explained._repr_html_()).itertext())
    weight = torch.nn.Linear(8, 8).to("remote").weight.detach() * 2
    assert weight.shape == (8, 8)
    summary = gt.memory_summary()
    assert str(summary) in "".join(parsed(summary._repr_html_()).itertext())

"""Placing a model by module name, and cutting one into stages by cost."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gt.client.groups.placement import apply, balance, costs, governing, partition
from gt.config.schema import Rule
from gt.errors import ConfigError


class Spy:
    """Stands for gt.signal.context: remembers which groups were entered, and which are still open."""

    def __init__(self) -> None:
        self.entered: list[str] = []
        self.open: list[str] = []

    @contextlib.contextmanager
    def __call__(self, name: str, parts: int = 1) -> Iterator[None]:
        self.entered.append(name)
        self.open.append(name)
        try:
            yield
        finally:
            self.open.pop()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(4, 12), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c_proj(self.c_attn(x))


def model() -> nn.Module:
    return nn.ModuleDict({"h": nn.ModuleList([nn.Sequential(Attention()) for _ in range(3)])})


def run(m: nn.Module) -> None:
    x = torch.ones(2, 4)
    for block in m["h"]:
        x = block(x)


def test_apply_enters_each_modules_group() -> None:
    m, spy = model(), Spy()
    rules = {"h.[01]": "front", "h.2": "back", "h.?.*.c_attn": {"group": "front_colpar", "parts": 3}}
    placed = apply(m, rules, spy)
    run(m)
    assert spy.entered == ["front", "front_colpar", "front", "front_colpar", "back", "front_colpar"]
    assert placed["h.0.0.c_attn"].parts == 3 and placed["h.2"].group == "back" and "h" not in placed


def test_a_list_of_groups_is_cut_and_a_suffix_follows_the_stage() -> None:
    m, spy = model(), Spy()
    placed = apply(m, {"h.*": ["front", "back"], "*.c_attn": {"group": "_colpar", "parts": 3}}, spy)
    run(m)
    front, back = (["s", "s", "s_colpar", "s"] for _ in range(2))
    assert spy.entered == [g.replace("s", "front", 1) for g in front * 2] + [g.replace("s", "back", 1) for g in back]
    assert placed["h.2.0.c_attn"] == Rule("*.c_attn", "back_colpar", 3)
    with pytest.raises(ConfigError, match="3 modules for 4 stages"):
        apply(m, {"h.*": list("abcd")}, spy)
    with pytest.raises(ConfigError, match="is in no stage"):
        apply(m, {"*.c_attn": "_colpar"}, spy)


def test_each_parameter_has_the_rule_of_the_nearest_module() -> None:
    m = model()
    assert governing(m) == {}
    apply(m, {"h.[01]": "front", "*.c_attn": "front_colpar"}, Spy())
    groups = {name: rule.group if rule else None for name, rule in governing(m).items()}
    assert groups == {
        f"h.{n}.0.{linear}.{what}": "front_colpar" if linear == "c_attn" else "front" if n < 2 else None
        for n in range(3) for linear in ("c_attn", "c_proj") for what in ("weight", "bias")
    }  # fmt: skip


def test_a_group_is_left_when_forward_raises() -> None:
    m, spy = model(), Spy()
    apply(m, {"h.*": "all"}, spy)
    with pytest.raises(RuntimeError):
        m["h"][0](torch.ones(2, 5))
    assert spy.entered and spy.open == []


def test_applying_again_replaces_and_keeps_state_dicts() -> None:
    m, spy, other = model(), Spy(), Spy()
    keys = list(m.state_dict())
    apply(m, {"h.*": "all"}, spy)
    apply(m, {"h.1": "one"}, other)
    run(m)
    assert spy.entered == [] and other.entered == ["one"]
    assert list(m.state_dict()) == keys
    apply(m, {}, spy)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in m.modules())


def test_a_deep_copy_is_placed_too_and_stands_alone() -> None:
    m, spy = model(), Spy()
    apply(m, {"h.*": "all"}, spy.__call__)
    twin = copy.deepcopy(m)
    with torch.no_grad():
        for p in twin.parameters():
            p.zero_()
    assert twin["h"][0](torch.ones(2, 4)).abs().sum() == 0
    assert m["h"][0](torch.ones(2, 4)).abs().sum() > 0
    assert spy.open == []


def test_patterns_that_match_nothing_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"pattern 'x\.\*' matches none of the"):
        apply(model(), {"x.*": "a"}, Spy())
    with pytest.raises(ConfigError, match=r"pattern 'x' matches no module: Linear has none in it, want the pattern ''"):
        apply(nn.Linear(2, 2), {"x": "a"}, Spy())
    with pytest.raises(ConfigError, match="want a group's name"):
        apply(model(), {"h.*": 3}, Spy())  # type: ignore[dict-item]


@pytest.mark.parametrize("rules", ["a", ["h.*"], 3])
def test_rules_are_a_dict(rules: Any) -> None:
    with pytest.raises(ConfigError, match=r"want a dict from patterns to groups, as \{'encoder"):
        apply(model(), rules, Spy())


def test_what_is_no_module_is_refused_by_its_type() -> None:
    with pytest.raises(TypeError, match=r"takes a torch.nn.Module, got Tensor"):
        apply(torch.ones(2), {"": "a"}, Spy())  # type: ignore[arg-type]


def best(weights: list[int], parts: int) -> int:
    """The smallest largest sum, by trying every cut."""
    n = len(weights)
    return min(
        max(sum(weights[a:b]) for a, b in itertools.pairwise((0, *cut, n)))
        for cut in itertools.combinations(range(1, n), parts - 1)
    )


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_partition_is_the_best_there_is(weights: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(weights)))
    found = partition(weights, parts)
    assert len(found) == parts and all(a < b for a, b in found)
    assert [i for a, b in found for i in range(a, b)] == list(range(len(weights)))
    assert max(sum(weights[a:b]) for a, b in found) == best(weights, parts)


def test_balance_puts_a_heavy_head_alone() -> None:
    blocks = [nn.Linear(16, 16) for _ in range(6)] + [nn.Linear(16, 16 * 5)]
    assert balance(blocks, 2, torch.zeros(4, 16)) == [(0, 5), (5, 7)]
    assert costs(blocks[:1], torch.zeros(4, 16)) == [2 * 4 * 16 * 16]
    with pytest.raises(ValueError, match="7 modules cannot be divided into 8 stages: want 1 to 7"):
        balance(blocks, 8, torch.zeros(4, 16))


def test_balance_reads_no_data_and_follows_several_inputs() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            return a @ b

    with torch.device("meta"):
        modules = [Two(), nn.Linear(1_000_000, 1_000_000)]
    assert balance(modules, 2, (torch.empty(2, 3), torch.empty(3, 1_000_000, device="meta"))) == [(0, 1), (1, 2)]


@pytest.mark.parametrize(
    "rule", ["a\nb", ["a", "b/c"], {"group": "a", "parts": 0}, {"group": "a", "parts": True}, {"group": "a" * 256}]
)
def test_a_rule_has_a_groups_name_and_a_number_of_parts(rule: Any) -> None:
    """The error came in the first forward, whose line says nothing of the rule."""
    with pytest.raises(ConfigError, match="rule for 'h'"):
        apply(model(), {"h": rule})

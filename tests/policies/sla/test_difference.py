"""The difference of two SLA files is in their own words, and form makes none."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from policies.sla.difference import MOST_SHOWN, difference


def changes(before: str, after: str) -> list[str]:
    return list(map(str, difference(before, after)))


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ("pools: {a: {kind: fake}}", "pools: {a: {kind: fake}, b: {kind: vllm}}", ["+ pools.b: {kind: vllm}"]),
        ("pools: {a: {}, b: {at: [x, y]}}", "pools: {a: {}}", ["- pools.b: {at: [x, y]}"]),
        (
            "tenants: {t: {limits: {cost_per_day: 5}}}",
            "tenants: {t: {limits: {cost_per_day: 6}}}",
            ["~ tenants.t.limits.cost_per_day: 5 -> 6"],
        ),
        ("classes: {a: {}, b: {}}", "classes: {b: {}, a: {}}", ["~ classes in order: a, b -> b, a"]),
        ("pools: {a: {}, b: {}}", "pools: {b: {}, a: {}}", []),
        ("rules: [{class: a}]", "rules: [{class: b, pools: x}, {class: a}]", ["+ rules[0]: {class: b, pools: x}"]),
        ("rules: [{class: a}, {class: b}]", "rules: [{class: b}]", ["- rules[0]: {class: a}"]),
        (
            "rules: [{class: a, pools: {x: 95, y: 5}}]",
            "rules: [{class: a, pools: {x: 90, y: 10}}]",
            ["~ rules[0].pools.x: 95 -> 90", "~ rules[0].pools.y: 5 -> 10"],
        ),
        ("pools: {a: {at: x}}", "# hello\npools:\n  a:\n    at: [x]\n", []),
        ("", "server: {http: 'x:1', grpc: off}", ["+ server.http: x:1", "+ server.grpc: off"]),
        ("queue: {most: 3}", "", ["- queue: {most: 3}"]),
        ("store:", "store: {redis: r}", ["+ store.redis: r"]),
        ("store: {redis: r}", "store:", ["- store.redis: r"]),
        ("on_miss: {a: [x]}", "on_miss: {a: {queue: 3s}}", ["~ on_miss.a: [x] -> {queue: 3s}"]),
    ],
)
def test_each_change_has_its_place_and_both_values(before: str, after: str, found: list[str]) -> None:
    assert changes(before, after) == found


def test_a_long_value_is_cut() -> None:
    (line,) = changes("", f"rules: [{', '.join(['{class: a}'] * 99)}]")
    assert len(line) < MOST_SHOWN + 20
    assert line.endswith(" ...")


TREES = st.recursive(
    st.text("abc", min_size=1, max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("xyz", min_size=1, max_size=2), inner),
    max_leaves=12,
)
FILES = st.dictionaries(st.text("pqr", min_size=1, max_size=2), TREES)


@given(FILES, FILES)
def test_there_is_a_difference_exactly_where_values_differ(before: dict[str, object], after: dict[str, object]) -> None:
    old, new = (yaml.safe_dump(each, default_style='"') for each in (before, after))
    assert changes(old, old) == []
    assert bool(changes(old, new)) == (_without_lists_of_one(before) != _without_lists_of_one(after))


def _without_lists_of_one(value: object) -> object:
    if isinstance(value, list):
        items = [_without_lists_of_one(item) for item in value]
        return items[0] if len(items) == 1 and isinstance(items[0], str) else items
    return {key: _without_lists_of_one(item) for key, item in value.items()} if isinstance(value, dict) else value

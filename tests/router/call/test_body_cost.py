"""The estimate of a body's memory is above what parsing it takes, whatever its shape, and near it for usual ones."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings, target
from hypothesis import strategies as st

from benchmarks.worst_bodies import CHAT, ELEMENTS, FIELDS, TEXTS, WORST, Shape, cost_of, search
from router.call import bodies
from router.call.bodies import JSON, PROTOBUF, cost_in_turns, rough_cost
from router.text.turns import at_once

NUMBERS = st.lists(st.sampled_from(ELEMENTS), min_size=1, max_size=3).map(",".join)


@pytest.mark.parametrize("name", WORST)
def test_the_worst_bodies_that_were_found_take_no_more_than_the_estimate(name: str) -> None:
    shape = WORST[name]
    cost = cost_of(shape.field.path, shape.of(200_000))
    assert cost.peak <= cost.estimate
    assert cost.estimate <= rough_cost(shape.of(200_000))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(FIELDS.values())), st.one_of(NUMBERS, st.sampled_from(TEXTS)))
def test_no_body_of_any_shape_takes_more_than_the_estimate(field: object, element: str) -> None:
    shape = Shape(field, element, "" if element in TEXTS else ",")  # type: ignore[arg-type]
    cost = cost_of(shape.field.path, shape.of(30_000))
    target(cost.peak / cost.estimate)
    assert cost.peak <= cost.estimate


def test_a_search_finds_none_either() -> None:
    assert max(cost.peak / cost.estimate for cost in search(60, random.Random(3), 20_000).values()) <= 1.0


def test_a_body_is_read_only_until_it_is_known_to_cost_too_much() -> None:
    body, steps = WORST["documents"].of(2_000_000), 0
    reading = cost_in_turns(body, most=10**8)
    while next(reading, None) is not None:
        steps += bodies.SLICE_BYTES
    assert steps < 500_000
    assert at_once(cost_in_turns(body, most=10**8)).size > 10**8


@pytest.mark.parametrize(
    ("end", "width"), [("\U0001f600", 6), ("\u4e2d", 3), (r"\ud83d\ude00", 6), (r"\u4e2d", 3), ("a", 1)]
)
def test_no_step_looks_at_more_than_a_slice_and_the_widest_character_counts_for_all(
    end: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, width_of = list[int](), bodies._width

    def width_seen(body: bytes, start: int, stop: int) -> int:
        seen.append(min(stop, len(body)) - start)
        return width_of(body, start, stop)

    monkeypatch.setattr(bodies, "_width", width_seen)
    body = json.dumps("a" * 3 * bodies.SLICE_BYTES, ensure_ascii=False)[:-1].encode() + f'{end}"'.encode()
    assert at_once(cost_in_turns(body)).size == len(body) * (bodies._COPIES + width) + bodies._STRING
    assert len(seen) == 4
    assert max(seen) <= bodies.SLICE_BYTES + 3


def test_a_usual_chat_is_estimated_at_a_few_times_its_bytes() -> None:
    text = json.dumps({"files": [{"path": f"src/{n}.py", "lines": [1, 2, 3], "text": "a[0]: {}"} for n in range(99)]})
    turns = [{"role": "user", "content": text}, {"role": "assistant", "content": 'Done, "as" asked \\ told.'}] * 50
    body = json.dumps({"model": "m", "messages": turns}).encode()
    assert len(body) > 200_000
    assert at_once(cost_in_turns(body)).size < 20 * len(body)


def test_a_million_token_ids_and_sixteen_megabytes_of_text_fit_a_request() -> None:
    most = 2**30 // 6
    ids = json.dumps({"model": "m", "prompt": list(range(100_000, 1_100_000))}).encode()
    text = json.dumps({"model": "m", "prompt": "the lazy dog \U0001f600 " * 940_000}, ensure_ascii=False).encode()
    assert len(text) > 15.5 * 2**20
    for body in (ids, text):
        assert at_once(cost_in_turns(body)).size < most


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.text(st.sampled_from('a"\\{}[],:\n\u00e9\U0001f600'), max_size=6) | st.integers(0, 9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
        max_leaves=20,
    ),
    st.integers(1, 9),
    st.booleans(),
)
def test_what_is_in_a_text_is_told_from_what_is_not_wherever_the_body_is_cut(
    value: object, slice_bytes: int, escapes: bool
) -> None:
    body = json.dumps(value, ensure_ascii=escapes).encode()
    whole = at_once(cost_in_turns(body)).size
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "SLICE_BYTES", slice_bytes)
        assert at_once(cost_in_turns(body)).size == whole
        # slices with many quotes are counted in another way
        patch.setattr(bodies, "_FEW", 1)
        assert at_once(cost_in_turns(body)).size == whole
    flat = bodies._width(body) + bodies._COPIES
    assert whole == len(body) * flat + _counted(value)


def _counted(value: object) -> int:
    if isinstance(value, str):
        written = json.dumps(value)
        braces, commas = written.count("{") + written.count("["), written.count(",")
        return bodies._STRING + braces * bodies._TEXT_OBJECT + commas * bodies._TEXT_COMMA
    if isinstance(value, dict):
        each = sum(_counted(key) + _counted(inner) for key, inner in value.items())
        return bodies._OBJECT + each + max(0, len(value) - 1) * bodies._COMMA
    if isinstance(value, list):
        return bodies._STRING + sum(map(_counted, value)) + max(0, len(value) - 1) * bodies._COMMA
    return 0


def test_messages_over_grpc_count_too() -> None:
    empty = b"\x0a\x00" * 1000
    assert PROTOBUF.rough(empty) > 800_000
    assert at_once(PROTOBUF.in_turns(empty, 0)).size == PROTOBUF.rough(empty)
    assert JSON.rough(b"{}") > 1000
    assert CHAT in {field.path for field in FIELDS.values()}

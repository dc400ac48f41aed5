from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.nouns import Delta, Usage
from router.protocols.anthropic.answers import MessageStream
from router.protocols.dialect import Head
from router.protocols.responses.answers import ResponseStream

HEAD = Head("id", 0, "m")


def begun(index: int) -> Delta:
    function = {"name": f"f{index}", "arguments": ""}
    return Delta(
        message={"tool_calls": [{"index": index, "id": f"id{index}", "type": "function", "function": function}]}
    )


def more_of(index: int, arguments: str) -> Delta:
    return Delta(message={"tool_calls": [{"index": index, "function": {"arguments": arguments}}]})


def events_in(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")]


def anthropic_items(deltas: Sequence[Delta]) -> list[tuple[Any, ...]]:
    stream = MessageStream(HEAD)
    events = events_in(b"".join(stream.render(0, delta) for delta in deltas) + stream.end(Usage()))
    items: list[list[Any]] = []
    for event in events:
        if event["type"] == "content_block_start":
            block = event["content_block"]
            items.append([block["type"], block.get("id"), block.get("name"), ""])
            assert event["index"] == len(items) - 1
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(items) - 1
            delta = event["delta"]
            items[-1][3] += delta.get("text", "") + delta.get("partial_json", "") + delta.get("thinking", "")
    return [tuple(item[1:]) if item[0] == "tool_use" else (item[3],) for item in items]


def response_items(deltas: Sequence[Delta]) -> list[tuple[Any, ...]]:
    stream = ResponseStream(HEAD, {})
    data = b"".join(stream.render(0, delta) for delta in deltas) + stream.end(Usage())
    items = events_in(data)[-1]["response"]["output"]
    return [
        (item["call_id"], item["name"], item["arguments"])
        if item["type"] == "function_call"
        else (item["content"][0]["text"],)
        for item in items
    ]


@pytest.mark.parametrize("items_of", [anthropic_items, response_items])
@pytest.mark.parametrize(
    ("deltas", "items"),
    [
        pytest.param(
            [begun(0), more_of(0, '{"a":'), Delta("\n"), more_of(0, "1}")],
            [("id0", "f0", '{"a":1}')],
            id="a line break between two fragments",
        ),
        pytest.param(
            [begun(0), begun(1), more_of(0, "{"), more_of(1, "{"), more_of(0, "}"), more_of(1, "}")],
            [("id0", "f0", "{}"), ("id1", "f1", "{}")],
            id="fragments of two calls alternate",
        ),
        pytest.param(
            [begun(0), more_of(0, '{"a":'), Delta("so "), Delta("it is"), more_of(0, "1}")],
            [("id0", "f0", '{"a":1}'), ("so it is",)],
            id="text between two fragments",
        ),
        pytest.param(
            [Delta("so"), begun(0), more_of(0, "{}"), Delta("\n"), begun(1), more_of(1, "{}"), Delta("\n")],
            [("so",), ("id0", "f0", "{}"), ("id1", "f1", "{}")],
            id="line breaks between and behind calls",
        ),
        pytest.param(
            [begun(0), more_of(0, "{}"), Delta("\n"), Delta("then")],
            [("id0", "f0", "{}"), ("\nthen",)],
            id="text behind a call",
        ),
        pytest.param(
            [begun(0), more_of(0, "{}"), Delta(message={"reasoning_content": "hm"}), begun(1), more_of(1, "{}")],
            [("id0", "f0", "{}"), ("hm",), ("id1", "f1", "{}")],
            id="thoughts between two calls",
        ),
        pytest.param([begun(0), more_of(0, '{"a')], [("id0", "f0", '{"a')], id="a call that is cut off"),
    ],
)
def test_each_item_of_an_answer_is_whole(items_of: Any, deltas: list[Delta], items: list[tuple[Any, ...]]) -> None:
    assert items_of(deltas) == items


@given(st.lists(st.tuples(st.dictionaries(st.text(), st.text()), st.integers(1, 4)), min_size=1), st.randoms())
def test_calls_are_whole_in_whatever_order_their_fragments_come(
    asked: list[tuple[dict[str, str], int]], rng: Any
) -> None:
    queues: list[list[Delta]] = []
    for index, (arguments, pieces) in enumerate(asked):
        text = json.dumps(arguments)
        at = [len(text) * n // pieces for n in range(pieces + 1)]
        queues.append([more_of(index, text[a:b]) for a, b in pairwise(at)])
    deltas = [begun(index) for index in range(len(asked))]
    while any(queues):
        deltas.append(rng.choice([queue for queue in queues if queue]).pop(0))
        deltas.extend([Delta("\n")] * rng.choice([0, 1]))
    expected = [(f"id{index}", f"f{index}", json.dumps(arguments)) for index, (arguments, _) in enumerate(asked)]
    assert sorted(anthropic_items(deltas)) == sorted(expected)
    assert sorted(response_items(deltas)) == sorted(expected)


def test_the_end_of_an_answer_is_told_though_its_text_waits() -> None:
    stream = MessageStream(HEAD)
    stream.render(0, begun(0))
    stream.render(0, Delta("so", finish_reason="length"))
    assert b'"stop_reason":"max_tokens"' in stream.end(Usage())

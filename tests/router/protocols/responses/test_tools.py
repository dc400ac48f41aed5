from __future__ import annotations

import json
from typing import Any

import pytest

from policies.nouns import Delta, Usage
from router.protocols.dialect import Answer, Head
from router.protocols.responses.answers import ResponsesDialect, ResponseStream
from router.protocols.responses.request import responses_ask

HEAD = Head("resp_1", 100, "m")
PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"type": "function", "name": "f", "parameters": PARAMETERS}
NAMESPACE = {"type": "namespace", "name": "mcp__docs", "description": "Docs.", "tools": [FUNCTION]}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Patches.", "format": {"type": "text"}}
AT_THE_PROVIDER = (
    *({"type": "web_search"}, {"type": "web_search_preview"}, {"type": "mcp", "server_label": "s", "server_url": "u"}),
    *({"type": "file_search", "vector_store_ids": []}, {"type": "code_interpreter", "container": {"type": "auto"}}),
    *({"type": "image_generation"}, {"type": "tool_search"}, {"type": "of_next_year"}),
)


def a_body(*tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"model": "m", "input": "Hi", "tools": list(tools), **fields}


def sent(*tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return dict(responses_ask(a_body(*tools, **fields), {}).bodies[0])


def names(chat: dict[str, Any]) -> list[str]:
    return [tool["function"]["name"] for tool in chat.get("tools") or ()]


@pytest.mark.parametrize(
    ("tool", "name"),
    [
        (FUNCTION, "f"),
        (NAMESPACE, "mcp__docs__f"),
        ({**NAMESPACE, "name": "mcp__docs__"}, "mcp__docs__f"),
        ({**NAMESPACE, "tools": [{**PATCH, "name": "f"}]}, "mcp__docs__f"),
        (PATCH, "apply_patch"),
        ({"type": "local_shell"}, "local_shell"),
    ],
)
def test_tools_that_the_client_runs_become_functions(tool: dict[str, Any], name: str) -> None:
    assert names(sent(tool)) == [name]
    # a backend of the dialect gets the body as it is
    body = a_body(tool)
    assert responses_ask(body, {}).natives[0].body is body


@pytest.mark.parametrize("tool", AT_THE_PROVIDER)
def test_tools_that_run_at_the_provider_are_left_out(tool: dict[str, Any]) -> None:
    assert names(sent(tool, FUNCTION)) == ["f"]
    alone = sent(tool, tool_choice="auto", parallel_tool_calls=True)
    assert alone.keys().isdisjoint({"tools", "tool_choice", "parallel_tool_calls"})


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ({"type": "function", "name": "f", "namespace": "mcp__docs"}, "mcp__docs__f"),
        ({"type": "custom", "name": "apply_patch"}, "apply_patch"),
        ({"type": "local_shell"}, "local_shell"),
    ],
)
def test_the_choice_of_a_tool_is_the_choice_of_its_function(choice: dict[str, Any], chosen: str) -> None:
    chat = sent(NAMESPACE, PATCH, {"type": "local_shell"}, tool_choice=choice)
    assert chat["tool_choice"] == {"type": "function", "function": {"name": chosen}}


def test_only_allowed_tools_may_be_called() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]}
    chat = sent(FUNCTION, PATCH, {"type": "web_search"}, tool_choice=allowed)
    assert (names(chat), chat["tool_choice"]) == (["apply_patch"], "required")


def called(name: str, *pieces: str) -> list[Delta]:
    function = {"name": name, "arguments": ""}
    first = {"index": 0, "id": "c", "type": "function", "function": function}
    rest = [{"index": 0, "function": {"arguments": piece}} for piece in pieces]
    return [Delta(message={"tool_calls": [call]}) for call in (first, *rest)]


CALLS = [
    (FUNCTION, "f", '{"a":"b"}', {"type": "function_call", "name": "f", "arguments": '{"a":"b"}'}),
    (
        NAMESPACE,
        "mcp__docs__f",
        "{}",
        {"type": "function_call", "name": "f", "namespace": "mcp__docs", "arguments": "{}"},
    ),
    (PATCH, "apply_patch", '{"input":"a\\nb"}', {"type": "custom_tool_call", "name": "apply_patch", "input": "a\nb"}),
    (PATCH, "apply_patch", "a, b", {"type": "custom_tool_call", "name": "apply_patch", "input": "a, b"}),
    (
        {"type": "local_shell"},
        "local_shell",
        '{"command":["ls","-l"],"timeout_ms":5}',
        {
            "type": "local_shell_call",
            "action": {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5},
        },
    ),
]


@pytest.mark.parametrize(("tool", "name", "arguments", "item"), CALLS)
def test_a_call_comes_back_as_an_item_of_its_tool_and_is_understood_in_the_next_turn(
    tool: dict[str, Any], name: str, arguments: str, item: dict[str, Any]
) -> None:
    body = a_body(tool)
    stream = ResponseStream(HEAD, body)
    pieces = called(name, arguments[:5], arguments[5:])
    data = b"".join(stream.render(0, delta) for delta in pieces) + stream.end(Usage())
    events = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")]
    (found,) = events[-1]["response"]["output"]
    assert {key: value for key, value in found.items() if key not in ("id", "call_id", "status")} == item
    assert (found["call_id"], found["status"]) == ("c", "completed")
    (done,) = (event for event in events if event["type"] == "response.output_item.done")
    assert done["item"] == found
    answer = Answer()
    for delta in called(name, arguments):
        answer.add(delta)
    whole = json.loads(ResponsesDialect().whole(HEAD, responses_ask(body, {}), [answer], Usage()))
    assert whole["output"] == [found]
    output = {"type": found["type"] + "_output", "call_id": "c", "output": "done"}
    messages = sent(tool, input=[{"role": "user", "content": "Hi"}, found, output])["messages"]
    (call,) = messages[1]["tool_calls"]
    assert (call["id"], call["function"]["name"]) == ("c", name)
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert messages[2] == {"role": "tool", "tool_call_id": "c", "content": "done"}


@pytest.mark.parametrize(
    "item",
    [
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "search", "query": "q"}},
        {"type": "computer_call_output", "call_id": "c", "output": {"type": "computer_screenshot"}},
        {"type": "tool_search_call", "arguments": {"query": "q"}},
        {"type": "item_reference", "id": "x"},
    ],
)
def test_items_that_only_the_provider_reads_are_left_out_of_a_chat(item: dict[str, Any]) -> None:
    body = a_body(input=[item, {"role": "user", "content": "Hi"}])
    ask = responses_ask(body, {})
    assert ask.bodies[0]["messages"] == [{"role": "user", "content": "Hi"}]
    assert ask.natives[0].body is body


REQUIRED = {
    *("id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id"),
    *("instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p"),
    *("presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "usage", "max_tool_calls"),
    *("max_output_tokens", "store", "background", "service_tier", "metadata", "safety_identifier", "prompt_cache_key"),
}
"""Of a response, by the Open Responses specification (schema ResponseResource)."""


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_each_required_field_is_there(finish: str) -> None:
    stream = ResponseStream(HEAD, a_body(FUNCTION), unix_time=lambda: 107.5)
    data = stream.render(0, Delta("Hi", finish_reason=finish)) + stream.end(Usage())
    events = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")]
    for event in events:
        assert event.get("response", dict.fromkeys(REQUIRED)).keys() >= REQUIRED
    assert events[0]["response"]["completed_at"] is None
    assert events[-1]["response"]["completed_at"] == (107 if finish == "stop" else None)
    assert events[-1]["response"]["tools"] == [{**FUNCTION, "description": None, "strict": None}]

from __future__ import annotations

from typing import Any

import pytest

from policies.errors import InvalidRequest
from router.protocols.anthropic.request import counted_messages, messages_ask

WEATHER = {"name": "weather", "input_schema": {"type": "object", "properties": {}}}


def a_body(*tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "Hi"}]
    return {"model": "m", "max_tokens": 5, "messages": turns, "tools": list(tools), **fields}


def sent(*tools: dict[str, Any], **fields: Any) -> dict[str, Any]:
    body = a_body(*tools, **fields)
    ask = messages_ask(body, {})
    # a backend of the dialect gets the body as it is
    assert ask.natives[0].body is body
    counted = {name: value for name, value in body.items() if name != "max_tokens"}
    assert counted_messages(counted, {}).bodies[0].get("tools") == ask.bodies[0].get("tools")
    return dict(ask.bodies[0])


@pytest.mark.parametrize(
    ("type_", "name", "members"),
    [
        ("bash_20250124", "bash", {"command", "restart"}),
        ("bash_20241022", "bash", {"command", "restart"}),
        ("text_editor_20250728", "str_replace_based_edit_tool", {"command", "path", "old_str", "insert_line"}),
        ("memory_20250818", "memory", {"command", "path", "old_path", "new_path"}),
        ("computer_20250124", "computer", {"action", "coordinate", "text"}),
    ],
)
def test_a_tool_that_anthropic_defines_and_the_client_runs_is_a_function_with_its_schema(
    type_: str, name: str, members: set[str]
) -> None:
    (tool,) = sent({"type": type_, "name": name})["tools"]
    assert (tool["type"], tool["function"]["name"]) == ("function", name)
    assert tool["function"]["parameters"]["properties"].keys() >= members
    assert tool["function"]["description"]


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 5},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
        {"type": "of_next_year_20270101", "name": "x"},
    ],
)
def test_a_tool_that_runs_at_the_provider_is_left_out(tool: dict[str, Any]) -> None:
    assert [each["function"]["name"] for each in sent(tool, WEATHER)["tools"]] == ["weather"]
    assert sent(tool, tool_choice={"type": "auto"}).keys().isdisjoint({"tools", "tool_choice"})
    with pytest.raises(InvalidRequest, match="no tool of the request can be used"):
        messages_ask(a_body(tool, tool_choice={"type": "any"}), {})


@pytest.mark.parametrize(
    "block",
    [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [{"type": "web_search_result", "url": "u"}]},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": {"type": "web_search_tool_result_error"}},
        {"type": "mcp_tool_use", "id": "s", "name": "f", "server_name": "s", "input": {}},
        {"type": "redacted_thinking", "data": "x"},
    ],
)
def test_what_the_provider_ran_is_left_out_of_a_translated_conversation(block: dict[str, Any]) -> None:
    turns = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [block, {"type": "text", "text": "found"}]},
        {"role": "user", "content": "so?"},
    ]
    assert sent(messages=turns)["messages"][1] == {"role": "assistant", "content": "found"}


def test_a_tool_of_the_clients_own_needs_a_name() -> None:
    with pytest.raises(InvalidRequest) as failure:
        messages_ask(a_body({"input_schema": {}}), {})
    assert failure.value.param == "tools[0].name"

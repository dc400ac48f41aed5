from __future__ import annotations

import pytest

from backends.messages.answer import AnthropicAnswer, error_in_stream
from policies.errors import BackendErred, BackendFailed, ContextExceeded, ExpectedError, InvalidRequest, Overloaded
from policies.nouns import Delta, Usage

# As the reference prints it: redacted thinking, text, a call with input in pieces, a stop sequence, counts that grow.
GOLDEN = b"""event: message_start
data: {"type":"message_start","message":{"id":"msg_1","type":"message","role":"assistant","content":[],"model":"m",\
"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":25,"cache_creation_input_tokens":3,\
"cache_read_input_tokens":4,"output_tokens":1}}}

event: content_block_start
data: {"type":"content_block_start","index":0,"content_block":{"type":"redacted_thinking","data":"eA=="}}

event: content_block_stop
data: {"type":"content_block_stop","index":0}

event: ping
data: {"type": "ping"}

event: content_block_start
data: {"type":"content_block_start","index":1,"content_block":{"type":"text","text":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":1,"delta":{"type":"text_delta","text":"Gr\xc3\xbc\xc3\x9fe"}}

event: content_block_stop
data: {"type":"content_block_stop","index":1}

event: content_block_start
data: {"type":"content_block_start","index":2,"content_block":{"type":"tool_use","id":"toolu_1","name":"f","input":{}}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":""}}

event: content_block_delta
data: {"type":"content_block_delta","index":2,"delta":{"type":"input_json_delta","partial_json":"{\\"a\\": 1}"}}

event: content_block_stop
data: {"type":"content_block_stop","index":2}

event: message_delta
data: {"type":"message_delta","delta":{"stop_reason":"stop_sequence","stop_sequence":"END"},\
"usage":{"output_tokens":15}}

event: message_stop
data: {"type":"message_stop"}

"""


def read(data: bytes, size: int = 1 << 20) -> list[Delta]:
    answer = AnthropicAnswer("b")
    deltas = [delta for at in range(0, len(data), size) for delta in answer.feed(data[at : at + size])]
    return deltas + list(answer.end())


@pytest.mark.parametrize("size", [1, 11, 1 << 20])
def test_events_become_deltas_however_they_are_cut(size: int) -> None:
    call = {"index": 0, "id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert read(GOLDEN, size) == [
        Delta(message={"thinking_blocks": [{"type": "redacted_thinking", "data": "eA=="}]}),
        Delta(text="Grüße"),
        Delta(message={"tool_calls": [call]}),
        Delta(message={"tool_calls": [{"index": 0, "function": {"arguments": '{"a": 1}'}}]}),
        Delta(finish_reason="stop", stop="END"),
        Delta(usage=Usage(32, 15, 4, cache_write_tokens=3)),
    ]


def test_an_end_that_comes_too_early_is_a_failure() -> None:
    with pytest.raises(BackendFailed, match="without message_stop"):
        read(GOLDEN[: GOLDEN.index(b"event: message_stop")])


@pytest.mark.parametrize(
    "data", [b"x", b"[]", b"{}", b'{"type":"content_block_delta","delta":{"type":"thinking_delta","thinking":"a"}}']
)
def test_nonsense_is_a_failure(data: bytes) -> None:
    with pytest.raises(BackendFailed, match="nonsense"):
        read(b"data: " + data + b"\n\n")


@pytest.mark.parametrize(
    ("kind", "message", "means"),
    [
        ("overloaded_error", "Overloaded", Overloaded),
        ("rate_limit_error", "slow down", Overloaded),
        ("invalid_request_error", "no", InvalidRequest),
        ("invalid_request_error", "prompt is too long: 9 tokens > 4 maximum", ContextExceeded),
        ("api_error", "oops", BackendErred),
        ("something_new", "oops", BackendErred),
    ],
)
def test_error_events_mean_what_they_say(kind: str, message: str, means: type[ExpectedError]) -> None:
    error = error_in_stream("b", {"type": "error", "error": {"type": kind, "message": message}})
    assert type(error) is means
    assert message in error.message

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.anthropic.backend import Anthropic
from backends.http.exchange import Answer
from backends.http.passed import MOST_HELD_BYTES
from backends.messages.answer import AnthropicAnswer
from backends.messages.passed import PassedMessage, PassedWholeMessage
from policies.errors import BackendFailed, Overloaded
from policies.nouns import Delta, Native, Prompt, Usage
from tests.backends.parts import a_request, everything
from tests.standins.anthropic import AnthropicServer
from tests.standins.standin import TEXT, running


def block(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n".encode()


START = block("message_start", message={"model": "theirs", "usage": {"input_tokens": 4, "cache_read_input_tokens": 3}})
OPEN = block("content_block_start", index=0, content_block={"type": "text", "text": ""}) + block("ping")
PIECE = block("content_block_delta", index=0, delta={"type": "text_delta", "text": "Gr\xfc\xdfe", "vendor": 1})
CLOSE = block("content_block_stop", index=0)
END = block("message_delta", delta={"stop_reason": "max_tokens"}, usage={"output_tokens": 7})
STOP = block("message_stop")
STREAM = START + OPEN + PIECE * 3 + CLOSE + END + STOP


def heard(answer: Answer, pieces: Sequence[bytes]) -> list[Delta]:
    return [*(delta for piece in pieces for delta in answer.feed(piece)), *answer.end()]


def raw_of(deltas: Sequence[Delta]) -> bytes:
    return b"".join(delta.raw or b"" for delta in deltas)


@given(st.lists(st.integers(0, len(STREAM))))
def test_however_a_message_is_cut_bytes_and_accounting_stay_the_same(cuts: list[int]) -> None:
    ends = sorted({0, len(STREAM), *cuts})
    deltas = heard(PassedMessage("a"), [STREAM[at:end] for at, end in pairwise(ends)])
    assert raw_of(deltas) == STREAM
    assert sum(delta.tokens for delta in deltas) == 3
    assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert deltas[-1].usage == heard(AnthropicAnswer("a"), [STREAM])[-1].usage == Usage(7, 7, 3)


def test_nothing_goes_out_before_the_first_piece() -> None:
    answer = PassedMessage("a")
    assert list(answer.feed(START + OPEN)) == []
    assert list(answer.feed(PIECE)) == [Delta(raw=START + OPEN + PIECE, tokens=1)]


def test_the_model_has_the_name_that_the_client_knows() -> None:
    assert raw_of(heard(PassedMessage("a", shown_model="mine"), [STREAM])) == STREAM.replace(b"theirs", b"mine")


def test_an_error_is_raised_after_the_pieces_before_it_for_clients_that_have_seen_the_beginning() -> None:
    error = block("error", error={"type": "overloaded_error", "message": "Overloaded"})
    for begins, goes in ((b"", b""), (START + PIECE, PIECE)):
        answer, passed = PassedMessage("a"), list[Delta]()
        list(answer.feed(begins))
        with pytest.raises(Overloaded):
            passed.extend(answer.feed(PIECE + error))
        assert raw_of(passed) == goes


DEEP = b'data: {"x":' + b"[" * 9999 + b"]" * 9999 + b"}\n\n"


@pytest.mark.parametrize("bad", [b"data: {\n\n", b"data: {}\n\n", b"data: []\n\n", DEEP, PIECE])
def test_nonsense_and_an_early_end_have_failed(bad: bytes) -> None:
    with pytest.raises(BackendFailed):
        heard(PassedMessage("a"), [START, bad])


@pytest.mark.parametrize("bad", [b"", b"[]", b"{}", b'{"type": "message"}', b'{"type": "error", "error": {}}'])
def test_what_is_no_message_has_failed(bad: bytes) -> None:
    with pytest.raises(BackendFailed):
        PassedWholeMessage("a").read(bad)


def test_what_is_held_before_the_first_piece_has_a_bound() -> None:
    answer, ping = PassedMessage("a"), b'event: ping\ndata: {"type": "ping"}\n\n'
    count = MOST_HELD_BYTES // len(ping) + 1
    assert raw_of([delta for _ in range(count) for delta in answer.feed(ping)]) == ping * count


@pytest.mark.parametrize("name", ["m", "mine"])
async def test_anthropics_own_clients_send_and_get_their_own_bytes(name: str) -> None:
    raw = b'{ "model": "%s","max_tokens":99, "messages":[{"role":"user","content":"Hell\\u006f"}], "x":1e2 }'
    sent = raw % name.encode()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(running(AnthropicServer()))
        backend = Anthropic("a", server.url, pool="p", options=Anthropic.options_type(models={"mine": "m"}))
        stack.push_async_callback(backend.close)
        prompt = Prompt(body={}, native=Native("/v1/messages", json.loads(sent), sent))
        deltas = await everything(backend, a_request(model=name), prompt)
        post = backend.exchange(a_request(model=name), prompt).post
    assert post.content == raw % b"m"
    raw_twice = b'{"model":"secret",' + sent[1:]
    twice = Prompt(body={}, native=Native("/v1/messages", json.loads(sent), raw_twice))
    assert b"secret" not in backend.exchange(a_request(model=name), twice).post.content
    assert not post.is_streamed
    whole = json.loads(deltas[0].body or b"")
    assert (whole["model"], whole["content"]) == (name, [{"type": "text", "text": TEXT}])
    assert deltas[0].is_whole
    assert deltas[-1].usage == Usage(5, len(TEXT))

"""A stream that loses its backend goes on at another one; its client sees one answer and pays once."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from msgspec.structs import replace

from policies.errors import BackendFailed, InvalidRequest
from policies.nouns import Beginning, Delta, Usage
from router.call.admission import Permit
from router.call.so_far import MOST_BYTES, SoFar
from router.protocols.openai.request import chat_ask, completion_ask
from tests.router.callers import Listener, a_gateway, ended, well
from tests.router.parts import MODEL, ScriptedBackend, Step, a_chat, a_client, a_router, an_answer

GONE = BackendFailed("gone")


def drawn(*numbers: int) -> list[Step]:
    """A Delta for each token id."""
    return [Delta(text=f"{number} ", token_ids=(number,)) for number in numbers]


def an_end(tokens: int) -> Step:
    return Delta(finish_reason="stop", usage=Usage(7, tokens, 3))


def text_of(caller: Listener) -> str:
    return "".join(delta.text for delta in caller.heard)


async def test_tokens_that_the_client_has_go_to_the_next_backend_which_draws_the_rest() -> None:
    cut, other = ScriptedBackend("b0", scripts=[[*drawn(5, 6), GONE]]), ScriptedBackend("b1")
    other.scripts = [[Delta(text="5 6 ", token_ids=(5, 6), is_repeat=True), *drawn(8), an_end(3)]]
    gateway = await well(a_gateway(cut, other), "b0", "b1")
    gateway.cluster.drain("b1")
    caller = Listener(chat_ask(a_chat(stream=True)))
    asked = asyncio.create_task(ended(caller, gateway))
    await asyncio.wait_for(cut.began.wait(), 5)
    gateway.cluster.drain("b1", False)
    assert await asyncio.wait_for(asked, 5) is None
    assert caller.placed == ["b0", "b1"]
    assert text_of(caller) == "5 6 8 "
    assert other.prompts[0].beginning == Beginning(2, "5 6 ", b"\5\0\0\0\6\0\0\0")
    assert other.prompts[0].token_ids == cut.prompts[0].token_ids
    assert other.requests[0].max_new_tokens == cut.requests[0].max_new_tokens
    gateway.check()
    await gateway.tokenizers.close()


async def usage_after(*scripts: list[Step], hangs_up_after: int | None = None) -> Usage:
    """What is charged for a stream that these backends answer in turn."""
    shared = list(scripts)
    backends = [ScriptedBackend(f"b{at}", scripts=shared) for at in range(len(scripts))]
    gateway = await well(a_gateway(*backends), *(backend.name for backend in backends))
    spent: list[Usage] = []
    close = gateway.admission.close

    def noted(permit: Permit) -> None:
        assert permit.usage is not None
        spent.append(permit.usage)
        close(permit)

    gateway.admission.close = noted  # type: ignore[method-assign]
    await ended(Listener(chat_ask(a_chat(stream=True)), hangs_up_after=hangs_up_after), gateway)
    gateway.check()
    await gateway.tokenizers.close()
    return replace(spent[0], backend_ms=0)


async def test_the_whole_answer_is_charged_once() -> None:
    assert await usage_after([*drawn(5, 6), GONE], [*drawn(7), an_end(3)]) == Usage(7, 3, 3)


async def test_an_answer_that_no_backend_can_finish_is_charged_as_far_as_it_came() -> None:
    used = await usage_after([*drawn(5, 6), GONE], [*drawn(7), BackendFailed("gone too")])
    assert used.completion_tokens == 3
    used = await usage_after([*drawn(5, 6), GONE], [BackendFailed("gone at once")])
    assert used.completion_tokens == 2


async def test_a_client_that_leaves_a_continued_answer_pays_for_what_it_got() -> None:
    used = await usage_after([*drawn(5, 6), GONE], [*drawn(7, 8, 9), an_end(5)], hangs_up_after=4)
    assert used.completion_tokens == 5


async def test_backends_that_add_to_the_answer_are_no_failed_tries() -> None:
    scripts = [[*drawn(number), BackendFailed("gone")] for number in range(5)]
    order: list[list[Step]] = [*scripts, [*drawn(9), an_end(6)]]
    backends = [ScriptedBackend(f"b{at}", scripts=order) for at in range(6)]
    gateway = await well(a_gateway(*backends), *(backend.name for backend in backends))
    caller = Listener(chat_ask(a_chat(stream=True)))
    assert await ended(caller, gateway) is None
    assert text_of(caller) == "0 1 2 3 4 9 "
    await gateway.tokenizers.close()


@pytest.mark.parametrize(
    "pieces",
    [
        [Delta(text="a", message={"reasoning_content": "hm"})],
        [Delta(text="a"), Delta(message={"tool_calls": []})],
        [Delta(text="a"), Delta(finish_reason="stop")],
        [Delta(raw=b"x", tokens=1)],
        [Delta(raw=b"x", tokens=1, text="a", message={})],
        [Delta(text="a" * (MOST_BYTES + 1))],
        [],
    ],
    ids=["reasoning", "tool calls", "ended", "unparsed", "more than text", "too long", "nothing yet"],
)
async def test_what_cannot_be_repeated_to_another_backend_is_not_continued(pieces: list[Delta]) -> None:
    so_far = SoFar()
    for piece in pieces:
        so_far.add(piece)
    backend = ScriptedBackend()
    gateway = await well(a_gateway(backend), "b0")
    await ended(Listener(chat_ask(a_chat())), gateway)
    assert so_far.beginning(backend.requests[0], {"messages": []}) is None
    await gateway.tokenizers.close()


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [], "response_format": {"type": "json_object"}},
        {"messages": [], "structured_outputs": {"regex": "a"}},
        {"messages": [], "tool_choice": "required"},
        {"prompt": [1, 2, 3]},
        None,
    ],
)
async def test_by_text_alone_no_forced_answer_is_continued_and_none_to_ids(body: dict[str, Any] | None) -> None:
    backend = ScriptedBackend()
    gateway = await well(a_gateway(backend), "b0")
    await ended(Listener(chat_ask(a_chat())), gateway)
    by_text, by_ids = SoFar(), SoFar()
    by_text.add(Delta(text="a"))
    by_ids.add(Delta(text="a", token_ids=(1,)))
    assert by_text.beginning(backend.requests[0], body) is None
    assert by_text.beginning(backend.requests[0], {"messages": []}) == Beginning(1, "a")
    assert by_ids.beginning(backend.requests[0], body) == Beginning(1, "a", b"\1\0\0\0")
    await gateway.tokenizers.close()


def passed(text: str) -> Delta:
    """An event of a server with OpenAI's API, passed on unchanged."""
    chunk = {"id": "theirs", "object": "chat.completion.chunk", "created": 5, "model": MODEL, "system_fingerprint": "f"}
    delta = {"role": "assistant", "content": text} if text == "one " else {"content": text}
    raw = json.dumps({**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
    return Delta(text=text, raw=f"data: {raw}\n\n".encode(), tokens=1)


async def test_a_stream_of_another_server_goes_on_in_the_form_that_its_client_knows() -> None:
    order: list[list[Step]] = [[passed("one "), passed("two "), GONE], [Delta(text="three"), an_end(3)]]
    backends = [ScriptedBackend(f"b{at}", scripts=order, speaks_tokens=False) for at in range(2)]
    body = a_chat(stream=True, max_tokens=8)
    async with (
        a_router(*backends) as router,
        a_client(router) as client,
        client.post("/v1/chat/completions", body) as reply,
    ):
        events = [line[6:] for line in (await reply.text()).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    opened = {(chunk["id"], chunk["created"], chunk["system_fingerprint"], chunk["model"]) for chunk in chunks}
    assert opened == {("theirs", 5, "f", MODEL)}
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("content") for delta in deltas] == ["one ", "two ", "three", None]
    assert [delta.get("role") for delta in deltas] == ["assistant", None, None, None]


async def test_without_another_backend_the_client_gets_the_error_of_the_first() -> None:
    gateway = await well(a_gateway(ScriptedBackend(scripts=[[*drawn(5), GONE]])), "b0")
    assert await ended(Listener(chat_ask(a_chat(stream=True))), gateway) is GONE
    gateway.check()
    await gateway.tokenizers.close()


async def test_an_error_that_every_backend_would_give_ends_the_stream() -> None:
    bad = InvalidRequest("bad")
    backends = [ScriptedBackend(f"b{at}", scripts=[[*drawn(5), bad]]) for at in range(2)]
    gateway = await well(a_gateway(*backends), "b0", "b1")
    assert await ended(Listener(completion_ask({"model": MODEL, "prompt": "x", "stream": True})), gateway) is bad
    assert sum(len(backend.requests) for backend in backends) == 1
    await gateway.tokenizers.close()


async def test_an_echo_is_not_repeated() -> None:
    order: list[list[Step]] = [[*drawn(5), GONE], [*drawn(6), an_end(2)]]
    backends = [ScriptedBackend(f"b{at}", scripts=order) for at in range(2)]
    gateway = await well(a_gateway(*backends), "b0", "b1")
    caller = Listener(completion_ask({"model": MODEL, "prompt": "hey", "echo": True, "stream": True}))
    assert await ended(caller, gateway) is None
    assert text_of(caller) == "hey5 6 "
    await gateway.tokenizers.close()


async def test_an_answer_that_is_not_streamed_begins_anew() -> None:
    order: list[list[Step]] = [[*drawn(5), GONE], an_answer("a", "b")]
    backends = [ScriptedBackend(f"b{at}", scripts=order) for at in range(2)]
    gateway = await well(a_gateway(*backends), "b0", "b1")

    class Collecting(Listener):
        def has_seen(self, index: int) -> bool:
            return False

    assert await ended(Collecting(chat_ask(a_chat())), gateway) is None
    assert all(prompt.beginning is None for backend in backends for prompt in backend.prompts)
    await gateway.tokenizers.close()


STOPPED: Step = Delta(finish_reason="stop")


async def test_an_answer_that_was_whole_ends_well_though_its_backend_failed_before_it_reported_the_usage() -> None:
    backends = [ScriptedBackend(f"b{at}", scripts=[[*drawn(5, 6), STOPPED, GONE]]) for at in range(2)]
    gateway = await well(a_gateway(*backends), "b0", "b1")
    caller = Listener(chat_ask(a_chat(stream=True)))
    assert await ended(caller, gateway) is None
    assert text_of(caller) == "5 6 "
    assert [delta.usage.completion_tokens for delta in caller.heard if delta.usage is not None] == [2]
    assert sum(len(backend.requests) for backend in backends) == 1
    gateway.check()
    await gateway.tokenizers.close()
    assert (await usage_after([*drawn(5, 6), STOPPED, GONE])).completion_tokens == 2


async def test_a_failure_behind_the_usage_changes_nothing_for_the_client() -> None:
    assert await usage_after([*drawn(5, 6), an_end(2), GONE]) == Usage(7, 2, 3)


@pytest.mark.parametrize("has_usage", [False, True])
async def test_a_stream_that_is_passed_on_ends_with_the_routers_own_events_where_the_backends_are_missing(
    has_usage: bool,
) -> None:
    end = json.dumps(
        {
            "id": "theirs",
            "object": "chat.completion.chunk",
            "created": 5,
            "model": MODEL,
            "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}],
        }
    )
    stopped = Delta(finish_reason="stop", raw=f"data: {end}\n\n".encode())
    backend = ScriptedBackend(scripts=[[passed("one "), stopped, GONE]], speaks_tokens=False)
    body = a_chat(stream=True, max_tokens=8, stream_options={"include_usage": has_usage})
    async with (
        a_router(backend) as router,
        a_client(router) as client,
        client.post("/v1/chat/completions", body) as reply,
    ):
        events = [line[6:] for line in (await reply.text()).splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk["choices"]] == [None, "stop"]
    used = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    assert [each["completion_tokens"] for each in used] == ([1] if has_usage else [])

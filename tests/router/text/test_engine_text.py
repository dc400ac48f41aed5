"""Asking engines for tokens: bounded in time, in size and in number, and never twice for the same prompt."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from backends.base import Tokenized
from policies.errors import BackendFailed
from router.ask import Ask, Chat, Reading
from router.text.engine_text import ANSWER_S, MOST_AT_ONCE, MOST_CHARACTERS, PAUSE_S, EngineText, first_reply
from router.text.text_tokenizer import ChunkCache
from router.text.token_ids import pack, unpack
from router.text.tokenize import How, Tokens
from shards.kv.keys import block_keys
from tests.virtual_time import run_virtually


class Reader:
    """Makes a token of each character, when it may go on."""

    def __init__(self) -> None:
        self.asked: list[Mapping[str, Any]] = []
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.fails = False

    async def tokenize(self, body: Mapping[str, Any], *, model: str) -> Tokenized | None:
        self.asked.append(body)
        await self.goes_on.wait()
        if self.fails:
            raise BackendFailed("away")
        return Tokenized([ord(letter) for letter in body.get("prompt") or "chat"])

    async def detokenize(self, token_ids: Sequence[int], *, model: str) -> str | None:
        return None


def an_ask(*texts: str, **fields: Any) -> Ask:
    return Ask("m", texts, tuple({"model": "m", "prompt": text} for text in texts), "/", **fields)


def counts(tokens: list[Tokens] | None) -> list[int] | None:
    return None if tokens is None else [token.count for token in tokens]


async def test_tokens_from_an_engine_are_cached_for_their_domain_only() -> None:
    reader, cache = Reader(), ChunkCache()
    text = EngineText(cache)
    for root in (1, 1, 2):
        (tokens,) = await text.tokens(an_ask("abc" * 50), {"a": reader}, How(root)) or []
        assert (tokens.count, tokens.keys, tokens.least) == (150, block_keys(tokens.token_ids, root), None)
    assert len(reader.asked) == 2
    cache.forget(lambda owner: isinstance(owner, tuple) and owner[1] == 1)
    await text.tokens(an_ask("abc" * 50), {"a": reader}, How(1))
    assert len(reader.asked) == 3
    text.check()


async def test_several_prompts_and_ids_among_them_are_cut_as_the_client_wants() -> None:
    ask = Ask("m", ("abc", pack([1, 2, 3, 4])), ({"prompt": "abc"}, {"prompt": [1, 2, 3, 4]}), "/")
    tokens = await EngineText(ChunkCache()).tokens(ask, {"a": Reader()}, How(1, reading=Reading(most_tokens=2)))
    assert [unpack(prompt.token_ids).tolist() for prompt in tokens or []] == [[98, 99], [3, 4]]


async def test_tools_that_must_not_be_called_are_sent_where_the_model_sees_them() -> None:
    reader, tools = Reader(), [{"type": "function", "function": {"name": "f"}}]
    chat = Chat([{"role": "user", "content": "u"}], tools, bars_tools=True)
    ask = Ask("m", (chat,), ({"messages": [], "tools": tools, "tool_choice": "none", "max_tokens": 1},), "/")
    for shows in (True, False):
        await EngineText(ChunkCache()).tokens(ask, {"a": reader}, How(1, shows_barred_tools=shows))
    assert ["tools" in body for body in reader.asked] == [True, False]
    assert all("max_tokens" not in body for body in reader.asked)


async def test_large_prompts_are_not_sent_unless_the_client_asked_for_their_tokens() -> None:
    reader = Reader()
    text, ask = EngineText(ChunkCache()), an_ask("x" * (MOST_CHARACTERS + 1))
    assert await text.tokens(ask, {"a": reader}, How(1)) is None
    assert reader.asked == []
    assert counts(await text.tokens(ask, {"a": reader}, How(1), is_patient=True)) == [MOST_CHARACTERS + 1]


async def test_one_that_fails_is_left_alone_for_a_while_and_another_is_asked() -> None:
    now, bad, good = [100.0], Reader(), Reader()
    bad.fails = True
    text = EngineText(ChunkCache(), clock=lambda: now[0])
    assert await text.tokens(an_ask("a"), {"bad": bad, "good": good}, How(1)) is None
    assert counts(await text.tokens(an_ask("a"), {"bad": bad, "good": good}, How(1))) == [1]
    assert await text.tokens(an_ask("b"), {"bad": bad}, How(1)) is None
    assert (len(bad.asked), len(good.asked)) == (1, 1)
    now[0] += PAUSE_S
    bad.fails = False
    assert counts(await text.tokens(an_ask("b"), {"bad": bad}, How(1))) == [1]
    bad.fails = True
    with pytest.raises(BackendFailed):
        await text.tokens(an_ask("c"), {"bad": bad}, How(1), is_patient=True)


def test_one_that_is_slow_holds_no_request_for_long() -> None:
    async def asked() -> float:
        reader = Reader()
        reader.goes_on.clear()
        text = EngineText(ChunkCache())
        assert await text.tokens(an_ask("a"), {"a": reader}, How(1)) is None
        text.check()
        return asyncio.get_running_loop().time()

    assert run_virtually(asked()) == ANSWER_S


async def test_the_first_reader_with_a_reply_answers_and_the_next_ones_are_not_asked() -> None:
    asked: list[str] = []
    replies: dict[str, list[int] | None] = {"a": None, "b": [], "c": [3]}
    readers = {name: Reader() for name in replies}

    async def ask(reader: object) -> list[int] | None:
        (name,) = [name for name, known in readers.items() if known is reader]
        asked.append(name)
        return replies[name]

    assert await first_reply(readers, ask) == []
    assert asked == ["a", "b"]
    assert await first_reply({"a": readers["a"]}, ask) is None
    assert await first_reply({}, ask) is None


async def test_so_many_are_asked_for_at_once_and_no_more() -> None:
    reader = Reader()
    reader.goes_on.clear()
    text = EngineText(ChunkCache())
    waiting = [asyncio.create_task(text.tokens(an_ask(f"{at}"), {"a": reader}, How(1))) for at in range(MOST_AT_ONCE)]
    await asyncio.sleep(0)
    assert len(reader.asked) == MOST_AT_ONCE
    assert await text.tokens(an_ask("more"), {"a": reader}, How(1)) is None
    reader.goes_on.set()
    assert all(await asyncio.gather(*waiting))
    text.check()

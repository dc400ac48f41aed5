"""Prompts as the engine itself tokenizes them, for models without a tokenizer here.

Engines tokenize beside the requests that they answer, so this asks little of them: results are cached for each cache
domain, large prompts are not sent, and an engine that is slow or fails is not asked for a while.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from backends.base import TextReader, Tokenized
from policies.errors import BackendFailed, ExpectedError, InvalidRequest
from router.ask import Ask, Chat, Input
from router.text.text_tokenizer import ChunkCache
from router.text.token_ids import count, pack
from router.text.tokenize import How, Tokens, shortened, size_of
from shards.kv.keys import block_keys

MOST_CHARACTERS = 256 * 2**10
"""Longest prompt that is sent to an engine for its tokens before it is sent for its answer."""

MOST_AT_ONCE = 32
"""Most prompts that engines tokenize at the same time; all others are estimated."""

ANSWER_S = 0.5
"""Most time of an engine while a request waits: 1,500 tokens take some 4 ms, 100,000 some 200."""

PATIENT_S = 10.0
"""Most time of an engine for a client that asked for tokens only."""

PAUSE_S = 10.0
"""Pause without questions to an engine that failed or was slow."""

_Found = TypeVar("_Found")

READ = (
    *("messages", "prompt", "tools", "tool_choice", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "chat_template", "chat_template_kwargs", "documents", "reasoning_effort"),
)
"""Fields of a body that change how its prompt is read."""


class EngineText:
    """Asks engines for tokens and caches them in `cache`. `clock` is in seconds."""

    def __init__(self, cache: ChunkCache, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache, self._clock = cache, clock
        self._asking = 0
        self._not_before: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"<EngineText asks for {self._asking} prompts>"

    def check(self) -> None:
        """Assert that no question is under way; for an idle router."""
        assert self._asking == 0, f"{self!r}: engines are still asked"

    async def tokens(
        self, ask: Ask, readers: Mapping[str, TextReader], how: How, *, is_patient: bool = False
    ) -> list[Tokens] | None:
        """Every input of `ask` as tokens, by the first of `readers` (backend -> itself) that may be asked now.

        None if no engine gives them in time. A caller that `is_patient` waits longer, for prompts of any size, and
        gets the engine's objections: raises BackendFailed, InvalidRequest, BackendRefused.
        """
        found = []
        for given, body in zip(ask.inputs, ask.bodies, strict=True):
            ids = await self._ids(given, _read(given, body, how), ask.model, readers, how.root, is_patient=is_patient)
            if not ids:
                return None
            ids = shortened(ids, how.reading)
            echo = given if how.echo and isinstance(given, str) else ""
            found.append(Tokens(count(ids), ids, block_keys(ids, how.root), echo))
        return found

    async def _ids(
        self,
        given: Input,
        body: Mapping[str, Any],
        model: str,
        readers: Mapping[str, TextReader],
        root: int,
        *,
        is_patient: bool,
    ) -> bytes | None:
        if isinstance(given, bytes):
            return given
        key, text = ("engine", root), msgspec.json.encode(body).decode()
        if (known := self._cache.get(key, text)) is not None:
            return known
        if not is_patient and size_of(given, MOST_CHARACTERS) > MOST_CHARACTERS:
            return None
        tokenized = await self._asked(body, model, readers, is_patient=is_patient)
        if tokenized is None:
            return None
        ids = pack(tokenized.ids)
        self._cache.put(key, text, ids)
        return ids

    async def _asked(
        self, body: Mapping[str, Any], model: str, readers: Mapping[str, TextReader], *, is_patient: bool
    ) -> Tokenized | None:
        """The tokens of `body` from the first of `readers` that may be asked now."""
        now = self._clock()
        name = next((reader for reader in readers if is_patient or now >= self._not_before.get(reader, now)), None)
        if name is None or (self._asking >= MOST_AT_ONCE and not is_patient):
            return None
        self._asking += 1
        try:
            return await _in_time(readers[name].tokenize(body, model=model), PATIENT_S if is_patient else ANSWER_S)
        except ExpectedError as error:
            if is_patient:
                raise
            # an InvalidRequest says nothing about the engine: it would reject the request itself too
            if not isinstance(error, InvalidRequest):
                self._not_before[name] = now + PAUSE_S
            return None
        finally:
            self._asking -= 1


async def first_reply(
    readers: Mapping[str, TextReader], ask: Callable[[TextReader], Awaitable[_Found | None]]
) -> _Found | None:
    """The first result of `readers` that is not None; None if there is none. Raises a reader's error, and BackendFailed
    if it takes too long.
    """
    for reader in readers.values():
        if (found := await _in_time(ask(reader), PATIENT_S)) is not None:
            return found
    return None


async def _in_time(answer: Awaitable[_Found], seconds: float) -> _Found:
    try:
        async with asyncio.timeout(seconds):
            return await answer
    except TimeoutError as error:
        raise BackendFailed(f"no tokens came in {seconds:g} s") from error


def _read(given: Input, body: Mapping[str, Any], how: How) -> Mapping[str, Any]:
    """The fields of `body` that the engine needs to tokenize the prompt."""
    read = {name: body[name] for name in READ if body.get(name) is not None}
    if isinstance(given, Chat) and given.bars_tools and not how.shows_barred_tools:
        read.pop("tools", None)
    return read

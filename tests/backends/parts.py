"""Parts of tests of backends."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any, cast

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from backends.base import Backend
from policies.nouns import ACCEPTED, Delta, Native, Prompt, Request
from shards.wire.translate import pack_ids

END = "<end>"


@functools.cache
def a_tokenizer() -> Tokenizer:
    """A token for each byte, and a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return tokenizer


def ids_of(text: str) -> tuple[int, ...]:
    return tuple(a_tokenizer().encode(text).ids)


def a_model_folder(folder: Path) -> Path:
    a_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text("{}")
    return folder


def a_request(**fields: Any) -> Request:
    stated = {"id": "r", "tenant": "t", "model": "m", "domain": "d", "prompt_tokens": 5, "max_new_tokens": 100}
    return Request(**{**stated, "service_class": "interactive", **fields})


def a_prompt(text: str = "Hello", **fields: Any) -> Prompt:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "stream": True}
    return Prompt(**{"token_ids": pack_ids(ids_of(text)), "body": body, **fields})


def a_native_prompt(raw: bytes, path: str = "/v1/chat/completions") -> Prompt:
    """The Prompt of a client's chat or text with the bytes `raw`."""
    body = json.loads(raw)
    return Prompt(body=body, path=path, native=Native(path, body, raw))


class Taken:
    """A Taker that keeps what it gets; a slow one has to be awaited before each further Delta."""

    def __init__(self, *, is_slow: bool = False) -> None:
        self.deltas: list[Delta] = []
        self._is_slow, self._is_ready = is_slow, True

    def take(self, delta: Delta) -> bool:
        assert self._is_ready, "it was not awaited"
        if delta is not ACCEPTED:
            self.deltas.append(delta)
        self._is_ready = not self._is_slow
        return self._is_ready

    async def ready(self) -> None:
        await asyncio.sleep(0)
        self._is_ready = True


async def everything(backend: Backend, request: Request | None = None, prompt: Prompt | None = None) -> list[Delta]:
    """All Deltas of one answer without ACCEPTED, which not every backend sends."""
    deltas = backend.generate(request or a_request(), prompt or a_prompt())
    async with aclosing(cast("AsyncGenerator[Delta]", deltas)):
        return [delta async for delta in deltas if delta is not ACCEPTED]


def text_of(deltas: list[Delta], choice: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.choice == choice)

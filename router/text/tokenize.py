"""Text to token ids: off the event loop, and without doing again what was done before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from policies.errors import InvalidRequest, Overloaded
from policies.learning.text_length import Measured
from policies.nouns import Grammar
from router.ask import Ask, Chat, Input, Reading
from router.text.chat_template import ChatTemplate
from router.text.checkpoint import FILES
from router.text.forced_calls import grammar_of, with_tools_listed
from router.text.text_tokenizer import ChunkCache, TextTokenizer
from router.text.token_ids import count, unpack
from router.text.tool_calls import HERMES, ToolSyntax, syntax_of
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES, block_keys

INLINE_CHARACTERS = 512
"""Shorter texts are tokenized on the event loop: 0.1 ms, about what the way to a thread and back costs."""

MOST_WAITING_CHARACTERS = 256 * 2**20
"""Text that may wait for or be under tokenization, all calls together."""

_Result = TypeVar("_Result")


class UnreadableTokenizerError(Exception):
    """Files of a model's text that are there and cannot be used. The message says what is wrong."""


class Tokens(msgspec.Struct, frozen=True):
    """One input ready for a backend: `count` tokens, exactly where `least` is None. Else `count` is the best estimate,
    nine of ten such prompts have as many as the two of `likely` and what lies between, and all have at least `least`;
    `measured` is what the estimate rests on.

    `keys` are its block keys, each of `key_tokens` tokens on average. `echo` is its text, where the client
    wants it back. `tools` is how it may call some, and `calls` what its answer must be if it has to.
    """

    count: int
    token_ids: bytes = b""
    keys: tuple[int, ...] = ()
    echo: str = ""
    tools: ToolSyntax | None = None
    calls: Grammar | None = None
    least: int | None = None
    likely: tuple[int, int] | None = None
    measured: Measured | None = None
    key_tokens: float = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class How:
    """How the prompts of one call become tokens: with block keys below `root`, which is its cache domain's.

    `is_sent`: a backend takes the ids and not the client's own body, so that the router has to refuse unknown ids
    and to see to calls of tools. `vocabulary` is the number of ids, where backends tell it. `shows_barred_tools`: the
    model sees tools that the client forbids to call.
    """

    root: int
    vocabulary: int | None = None
    echo: bool = False
    is_sent: bool = True
    shows_barred_tools: bool = False
    reading: Reading = field(default_factory=Reading)


@dataclass(frozen=True, slots=True)
class ModelText:
    """How one model reads: its tokenizer and chat template, made from `assets`."""

    assets: Mapping[str, bytes]
    tokenizer: TextTokenizer
    template: ChatTemplate

    def tokens(self, given: Input, how: How) -> Tokens:
        """`given` as tokens with block keys. Raises InvalidRequest."""
        tool_format = self.template.tool_format
        if isinstance(given, Chat) and given.bars_tools and not how.shows_barred_tools:
            given = replace(given, tools=None)
        if isinstance(given, Chat) and given.forced and how.is_sent and tool_format is None:
            # the client asked for a call, and a model that was taught no format can be held to any
            tool_format = HERMES
            given = given if self.template.shows_tools else with_tools_listed(given)
        ids = self._ids(given, how)
        if not ids:
            raise InvalidRequest("the prompt is empty", hint="send at least one token", param="prompt")
        text = (given if isinstance(given, str) else self.tokenizer.decode(ids)) if how.echo else ""
        keys = block_keys(ids, how.root)
        if not isinstance(given, Chat) or not how.is_sent:
            return Tokens(count(ids), ids, keys, text)
        calls = grammar_of(given, tool_format, self.tokenizer.id_of)
        return Tokens(count(ids), ids, keys, text, syntax_of(given, tool_format), calls)

    def _ids(self, given: Input, how: How) -> bytes:
        reading = how.reading
        if isinstance(given, bytes):
            if how.is_sent:
                require_known_ids(given, how.vocabulary or self.tokenizer.vocabulary)
            return shortened(given, reading)
        has_ends = isinstance(given, str) if reading.adds_special is None else reading.adds_special
        ids = self.tokenizer.encode(given if isinstance(given, str) else self.template.render(given), how.root)
        if has_ends and reading.most_tokens is not None and reading.keeps_start is None:
            inside = replace(reading, most_tokens=max(0, reading.most_tokens - self.tokenizer.ends))
            return self.tokenizer.with_ends(shortened(ids, inside))
        return shortened(self.tokenizer.with_ends(ids) if has_ends else ids, reading)


def shortened(token_ids: bytes, reading: Reading) -> bytes:
    """`token_ids` cut to the length that `reading` wants, which is no longer -1."""
    most = reading.most_tokens
    if most is None or count(token_ids) <= most:
        return token_ids
    size = most * TOKEN_BYTES
    return token_ids[:size] if reading.keeps_start else token_ids[len(token_ids) - size :]


def require_known_ids(token_ids: bytes, vocabulary: int) -> None:
    """Raise InvalidRequest unless all ids are below `vocabulary`."""
    ids = unpack(token_ids)
    if ids and max(ids) >= vocabulary:
        hint = f"the model knows ids from 0 to {vocabulary - 1}"
        raise InvalidRequest(f"prompt: token id {max(ids)} is out of range", hint=hint, param="prompt")


def size_of(given: Input) -> int:
    """How much work `given` is: its characters, or 4 for each token id."""
    if isinstance(given, Chat):
        return (
            sum(len(message["content"]) for message in given.messages)
            + 64 * len(given.messages)
            + _size_of_tools(given)
        )
    return len(given)


def _size_of_tools(chat: Chat) -> int:
    return 1000 * len(chat.tools or ())


class Tokenizers:
    """The tokenizers of all models, and the threads that they run in."""

    def __init__(self, *, threads: int = 2, cache_bytes: int = 64 * 2**20) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self.cache = ChunkCache(cache_bytes)
        self._models: dict[str, ModelText] = {}
        self._failed: dict[str, tuple[Mapping[str, bytes], str]] = {}
        self._loading: dict[str, asyncio.Task[ModelText]] = {}
        self._loaded, self._waiting_characters = 0, 0

    def __repr__(self) -> str:
        return f"<Tokenizers of {len(self._models)} models, {self._waiting_characters} characters wait, {self.cache!r}>"

    def check(self) -> None:
        """The cache is sound, and nothing waits; for an idle router."""
        self.cache.check()
        assert self._waiting_characters == 0, f"{self!r}: text is waiting"

    async def model(self, name: str, assets: Mapping[str, bytes]) -> ModelText:
        """The tokenizer and template of model `name`, made anew when its files have changed.

        Raises UnreadableTokenizerError.
        """
        known = self._models.get(name)
        if known is not None and _same_text(known.assets, assets):
            return known
        failed = self._failed.get(name)
        if failed is not None and _same_text(failed[0], assets):
            raise UnreadableTokenizerError(failed[1])
        loading = self._loading.get(name)
        if loading is None:
            loading = self._loading[name] = asyncio.create_task(self._load(name, assets))
        return await asyncio.shield(loading)

    async def tokens(self, ask: Ask, text: ModelText, how: How) -> list[Tokens]:
        """Every input of `ask` as `text` has it, in order. Raises InvalidRequest, Overloaded."""

        def work() -> list[Tokens]:
            return [text.tokens(given, how) for given in ask.inputs]

        size = sum(map(size_of, ask.inputs))
        return work() if size <= INLINE_CHARACTERS else await self._in_thread(work, size)

    def forget(self, roots: Collection[int]) -> None:
        """Forget the text that was tokenized for the cache domains of `roots`."""
        self.cache.forget(lambda owner: isinstance(owner, tuple) and owner[1] in roots)

    async def close(self) -> None:
        """End the threads."""
        for loading in self._loading.values():
            loading.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def _load(self, name: str, assets: Mapping[str, bytes]) -> ModelText:
        self._loaded += 1
        number = self._loaded

        def work() -> ModelText:
            settings = json.loads(assets.get("tokenizer_config.json") or b"{}")
            tokenizer = TextTokenizer(assets["tokenizer.json"], self.cache, number, settings)
            return ModelText(assets, tokenizer, ChatTemplate(assets))

        try:
            text = await self._in_thread(work, 0)
            self._models[name] = text
            return text
        except Exception as error:
            # tokenizers raises nothing narrower for whatever is wrong with a file
            self._failed[name] = (assets, str(error) or type(error).__name__)
            raise UnreadableTokenizerError(self._failed[name][1]) from error
        finally:
            del self._loading[name]

    async def _in_thread(self, work: Callable[[], _Result], size: int) -> _Result:
        if size and self._waiting_characters + size > MOST_WAITING_CHARACTERS:
            raise Overloaded("too much text waits to be tokenized", hint="try again in a moment", retry_after_s=1.0)
        self._waiting_characters += size
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self._waiting_characters -= size


def _same_text(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> bool:
    return one is other or all(one.get(name) == other.get(name) for name in FILES)

"""Text to token ids: off the event loop, and without doing again what was done before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec.structs import replace

from policies.errors import InvalidRequest
from policies.learning.text_length import Measured
from policies.nouns import Grammar
from router.ask import Ask, Chat, Input, Reading
from router.text.chat_template import ChatTemplate
from router.text.checkpoint import FILES
from router.text.forced_calls import grammar_of, with_tools_listed
from router.text.text_tokenizer import ChunkCache, TextTokenizer, TooManyTokensError
from router.text.thoughts import ThoughtSyntax, thoughts_behind
from router.text.token_ids import count, unpack
from router.text.tool_formats import HERMES, ToolSyntax, syntax_of
from router.text.turns import Turns, at_once, once
from shards.kv.keys import BLOCK_TOKENS, TOKEN_BYTES, block_keys

INLINE_CHARACTERS = 512
"""Shorter texts are tokenized on the event loop: 0.1 ms, about what the way to a thread and back costs."""

TURN_CHARACTERS = 32 * 2**10
"""A thread turns to another prompt after so many characters: 15 ms."""

_END_BYTES = 8 * TOKEN_BYTES
"""The end of a prompt in which a mark of reasoning is looked for."""

_OTHER_SIZE = 64
"""What each number and object counts beside its texts, so that many tiny messages are not free."""


class UnreadableTokenizerError(Exception):
    """Files of a model's text that are there and cannot be used. The message says what is wrong."""


class Tokens(msgspec.Struct, frozen=True):
    """One input ready for a backend: `count` tokens, exactly where `least` is None. Else `count` is the best estimate,
    nine of ten such prompts have as many as the two of `likely` and what lies between, and all have at least `least`;
    `measured` is what the estimate rests on.

    `keys` are its block keys, each of `key_tokens` tokens on average. `echo` is its text, where the client
    wants it back. `tools` is how it may call some, and `calls` what its answer must be if it has to. `thoughts` is how
    its answer may contain reasoning.
    """

    count: int
    token_ids: bytes = b""
    keys: tuple[int, ...] = ()
    echo: str = ""
    tools: ToolSyntax | None = None
    calls: Grammar | None = None
    thoughts: ThoughtSyntax | None = None
    least: int | None = None
    likely: tuple[int, int] | None = None
    measured: Measured | None = None
    key_tokens: float = BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class How:
    """How the prompts of one call become tokens: with block keys below `root`, which is its cache domain's.

    `is_sent`: a backend takes the ids and not the client's own body, so that the router has to refuse unknown ids
    and to see to calls of tools. `vocabulary` is the number of ids, where backends tell it. `shows_barred_tools`: the
    model sees tools that the client forbids to call. A prompt of more than `most_tokens` is refused.
    """

    root: int
    vocabulary: int | None = None
    echo: bool = False
    is_sent: bool = True
    shows_barred_tools: bool = False
    reading: Reading = field(default_factory=Reading)
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ModelText:
    """How one model reads: its tokenizer and chat template, made from `assets`."""

    assets: Mapping[str, bytes]
    tokenizer: TextTokenizer
    template: ChatTemplate

    def tokens(self, given: Input, how: How) -> Tokens:
        """See `in_turns`. All at once, however long it takes."""
        return at_once(self.in_turns(given, how))

    def in_turns(self, given: Input, how: How) -> Generator[int, None, Tokens]:
        """`given` as tokens with block keys; yields now and then the number of characters that were done since.

        Raises InvalidRequest, TooManyTokensError, UncuttableError.
        """
        tool_format = self.template.tool_format
        if isinstance(given, Chat):
            given = self._seen(given, how)
            if self._needs_format(given, how):
                tool_format = HERMES
        ids = yield from self._ids(given, how)
        if not ids:
            raise InvalidRequest("the prompt is empty", hint="send at least one token", param="prompt")
        text = (
            (given if isinstance(given, str) else (yield from self.tokenizer.decoded_in_turns(ids))) if how.echo else ""
        )
        keys = block_keys(ids, how.root)
        if not isinstance(given, Chat) or not how.is_sent:
            return Tokens(count(ids), ids, keys, text)
        calls = grammar_of(given, tool_format, self.tokenizer.id_of)
        thoughts = self.template.thoughts
        if thoughts is not None:
            end = yield from self.tokenizer.decoded_in_turns(ids[-_END_BYTES:])
            thoughts = thoughts_behind(thoughts, end, _continued(given))
        return Tokens(count(ids), ids, keys, text, syntax_of(given, tool_format), calls, thoughts)

    def apart_in_turns(
        self, given: Chat, how: How, mark: str, texts: Sequence[str]
    ) -> Generator[int, None, list[bytes] | None]:
        """The ids of the prompt of `given` up to `mark` with the first of `texts`, and those of each other text.

        They are the ids of prompts with these texts in any order behind the first; None if this model's tokens are not
        separate so. Raises InvalidRequest, UncuttableError.
        """
        prompt, found, _ = "".join(self.template.parts(self._seen(given, how))).partition(mark)
        if not found or how.reading.adds_special:
            return None
        start, *others = map(self.tokenizer.inert.text, texts) if how.is_sent else texts
        return (yield from self.tokenizer.apart_in_turns([prompt + start, *others], given.starts, how.root))

    def _needs_format(self, given: Chat, how: How) -> bool:
        """Whether the client asked for a call of a model that was taught no format: it can be held to any."""
        return bool(given.forced) and how.is_sent and self.template.tool_format is None

    def _seen(self, given: Chat, how: How) -> Chat:
        """`given` with the tools that the model sees."""
        if given.bars_tools and not how.shows_barred_tools:
            given = replace(given, tools=None)
        if self._needs_format(given, how) and not self.template.shows_tools:
            given = with_tools_listed(given)
        return self.tokenizer.inert.chat(self.template.with_calls(given)) if how.is_sent else given

    def _ids(self, given: Input, how: How) -> Generator[int, None, bytes]:
        reading, most = how.reading, how.most_tokens
        if isinstance(given, bytes):
            if most is not None and count(given) > most:
                raise TooManyTokensError(count(given), is_exact=True)
            if how.is_sent:
                require_known_ids(given, how.vocabulary or self.tokenizer.vocabulary)
            return shortened(given, reading)
        has_ends = isinstance(given, str) if reading.adds_special is None else reading.adds_special
        ends = self.tokenizer.ends if has_ends else 0
        parts = [given] if isinstance(given, str) else self.template.parts(given)
        try:
            starts = given.starts if isinstance(given, Chat) else ""
            left = None if most is None else most - ends
            ids = yield from self.tokenizer.in_turns(parts, how.root, left, starts=starts)
        except TooManyTokensError as error:
            raise TooManyTokensError(error.least + ends, is_exact=error.is_exact) from None
        if has_ends and reading.most_tokens is not None and reading.keeps_start is None:
            inside = replace(reading, most_tokens=max(0, reading.most_tokens - self.tokenizer.ends))
            return self.tokenizer.with_ends(shortened(ids, inside))
        return shortened(self.tokenizer.with_ends(ids) if has_ends else ids, reading)


def _continued(chat: Chat) -> str:
    return str(chat.messages[-1]["content"] or "") if chat.continues else ""


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


def size_of(given: Input, most: int | None = None) -> int:
    """How much work `given` is: its characters wherever they stand, and _OTHER_SIZE for all that is no text; 4 for each
    token id. Above `most`, any number that is larger.
    """
    if isinstance(given, bytes):
        return len(given)
    if isinstance(given, str):
        return len(given)
    size, rest = 0, [*given.messages, *(given.tools or ()), *given.variables, *given.variables.values()]
    while rest and (most is None or size <= most):
        value: object = rest.pop()
        if isinstance(value, str):
            size += len(value)
        else:
            size += _OTHER_SIZE
            if isinstance(value, Mapping):
                rest += value.keys()
                rest += value.values()
            elif isinstance(value, list | tuple):
                rest += value
    return size


class Tokenizers:
    """The tokenizers of all models, and the threads that they run in."""

    def __init__(self, *, threads: int = 2, cache_bytes: int = 64 * 2**20) -> None:
        self._turns = Turns(threads, TURN_CHARACTERS, name="tokenize")
        self.cache = ChunkCache(cache_bytes)
        self._models: dict[str, ModelText] = {}
        self._failed: dict[str, tuple[Mapping[str, bytes], str]] = {}
        self._loading: dict[str, asyncio.Task[ModelText]] = {}
        self._loaded = 0

    def __repr__(self) -> str:
        return f"<Tokenizers of {len(self._models)} models, {self.cache!r}, {self._turns!r}>"

    def check(self) -> None:
        """The cache is sound."""
        self.cache.check()

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

    async def tokens(self, ask: Ask, text: ModelText, how: How, tenant: str) -> list[Tokens]:
        """Every input of `ask`, which is a call of `tenant`, as `text` has it, in order.

        Raises InvalidRequest, TooManyTokensError, UncuttableError.
        """
        for given in ask.inputs:
            if isinstance(given, str):
                text.tokenizer.require_room(len(given), how.most_tokens)
        work = _all_of(ask, text, how)
        if sum(size_of(given, INLINE_CHARACTERS) for given in ask.inputs) <= INLINE_CHARACTERS:
            return at_once(work)
        return await self._turns.run(tenant, work)

    async def apart(
        self, given: Chat, text: ModelText, how: How, tenant: str, *, mark: str, texts: Sequence[str]
    ) -> list[bytes] | None:
        """See `ModelText.apart_in_turns`; the call is one of `tenant`. Raises InvalidRequest, UncuttableError."""
        work = text.apart_in_turns(given, how, mark, texts)
        if size_of(given, INLINE_CHARACTERS) + sum(map(len, texts)) <= INLINE_CHARACTERS:
            return at_once(work)
        return await self._turns.run(tenant, work)

    def forget(self, roots: Collection[int]) -> None:
        """Forget the text that was tokenized for the cache domains of `roots`."""
        self.cache.forget(lambda owner: isinstance(owner, tuple) and owner[1] in roots)

    async def close(self) -> None:
        """End the threads."""
        for loading in self._loading.values():
            loading.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        self._turns.close()

    async def _load(self, name: str, assets: Mapping[str, bytes]) -> ModelText:
        self._loaded += 1
        number = self._loaded

        def work() -> ModelText:
            settings = json.loads(assets.get("tokenizer_config.json") or b"{}")
            tokenizer = TextTokenizer(assets["tokenizer.json"], self.cache, number, settings)
            return ModelText(assets, tokenizer, ChatTemplate(assets))

        try:
            text = await self._turns.run(None, once(work))
            self._models[name] = text
            return text
        except Exception as error:
            # tokenizers raises nothing narrower for whatever is wrong with a file
            self._failed[name] = (assets, str(error) or type(error).__name__)
            raise UnreadableTokenizerError(self._failed[name][1]) from error
        finally:
            del self._loading[name]


def _all_of(ask: Ask, text: ModelText, how: How) -> Generator[int, None, list[Tokens]]:
    found = []
    for given in ask.inputs:
        tokens = yield from text.in_turns(given, how)
        found.append(tokens)
    return found


def _same_text(one: Mapping[str, bytes], other: Mapping[str, bytes]) -> bool:
    return one is other or all(one.get(name) == other.get(name) for name in FILES)

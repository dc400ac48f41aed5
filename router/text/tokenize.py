"""Text to token ids: off the event loop, and without doing again what was done before."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import msgspec
from tokenizers import Tokenizer

from policies.errors import InvalidRequest, Overloaded
from policies.nouns import Capability, Grammar
from policies.prefix.text_keys import text_keys
from router.ask import Ask, Chat, Input
from router.text.chat_template import ChatTemplate
from router.text.forced_calls import grammar_of
from router.text.token_ids import count, pack, unpack
from router.text.tool_calls import ToolSyntax, syntax_of
from shards.kv.keys import block_keys

CHUNK_CHARACTERS = 4096
"""Texts are cut at the first safe newline after so many characters; each piece is tokenized and cached by itself."""

INLINE_CHARACTERS = 512
"""Shorter texts are tokenized on the event loop: 0.1 ms, about what the way to a thread and back costs."""

MEDIA_TOKENS = 1024
"""What an image, a sound or a file is taken for: models make 85 to some 3,000 tokens of one."""

LONGEST_TOKEN_CHARACTERS = 64
"""No usual prompt has so many characters for each of its tokens."""

MOST_WAITING_CHARACTERS = 256 * 2**20
"""Text that may wait for or be under tokenization, all calls together."""

# Before a newline that is followed by a letter or digit every tokenizer we know has a token boundary behind it; each
# is verified all the same when it is loaded.
_CUT = re.compile(r"\n(?=\w)")
_PROBE = "One, two. 3 4\nfive\n\n  six: 7\t8;\nÄä 九十 \U0001f600!\nThe end.\n- a\n# b\n{'c': \"d\"}\n\n\ne\r\nf"

_MEDIA_MARK = re.compile("\x1d[^\x1d]{1,40}\x1d")
"""What stands for an image, a sound or a file in the text of a chat: its kind and a hash of its bytes."""

MOST_LONG_MEDIA = 64
"""So many images of one prompt are as long as their tokens in its keys; of more the text would become too long."""

_Result = TypeVar("_Result")


class UnreadableTokenizerError(Exception):
    """Files of a model's text that are there and cannot be used. The message says what is wrong."""


class ChunkCache:
    """Token ids of pieces of text seen lately; the oldest go when `most_bytes` are passed. Safe between threads.

    Keyed by its owner (a tokenizer and a cache domain) and the text itself, which is compared: nobody can craft a piece
    that passes for another tenant's, or tell by the time of an answer what another tenant has sent.
    """

    def __init__(self, most_bytes: int = 64 * 2**20) -> None:
        self.most_bytes, self.bytes = most_bytes, 0
        self._ids: OrderedDict[tuple[Hashable, str], bytes] = OrderedDict()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<ChunkCache {len(self._ids)} chunks, {self.bytes} of {self.most_bytes} bytes>"

    def get(self, owner: Hashable, text: str) -> bytes | None:
        """The ids of `text` of this owner, if they are here."""
        with self._lock:
            ids = self._ids.get((owner, text))
            if ids is not None:
                self._ids.move_to_end((owner, text))
            return ids

    def put(self, owner: Hashable, text: str, ids: bytes) -> None:
        """Remember the ids of `text`."""
        with self._lock:
            if (owner, text) not in self._ids:
                self._ids[owner, text] = ids
                self.bytes += _size(text, ids)
            while self.bytes > self.most_bytes:
                (_, old), gone = self._ids.popitem(last=False)
                self.bytes -= _size(old, gone)

    def forget(self, is_gone: Callable[[Hashable], bool]) -> None:
        """Forget the text of every owner that `is_gone`."""
        with self._lock:
            for key in [key for key in self._ids if is_gone(key[0])]:
                self.bytes -= _size(key[1], self._ids.pop(key))

    def check(self) -> None:
        """`bytes` is what the chunks take, and within the bound."""
        assert self.bytes == sum(_size(text, ids) for (_, text), ids in self._ids.items()), f"{self!r}: bytes are wrong"
        assert self.bytes <= self.most_bytes, f"{self!r}: over its bound"


def _size(text: str, ids: bytes) -> int:
    return sys.getsizeof(text) + sys.getsizeof(ids)


class TextTokenizer:
    """One model's tokenizer. `chunked` says whether it may work piece by piece: cutting changes nothing on a probe."""

    def __init__(self, tokenizer_json: bytes, cache: ChunkCache, number: int = 0) -> None:
        self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        # a tokenizer file may ask for truncation or padding, which prompts must not get
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cache, self._number = cache, number
        self.vocabulary: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        self.chunked = self._is_indifferent_to_cuts()
        self._around = self._surroundings()

    def __repr__(self) -> str:
        return f"<TextTokenizer of {self.vocabulary} ids, {'chunked' if self.chunked else 'whole texts only'}>"

    def encode(self, text: str, domain: int = 0) -> bytes:
        """The ids of `text` as it is, without the tokens that the tokenizer would put around it.

        What was seen before is remembered for its cache `domain` alone.
        """
        owner = (self._number, domain)
        pieces = cut(text) if self.chunked else [text]
        found = [self._cache.get(owner, piece) for piece in pieces]
        missing = [piece for piece, ids in zip(pieces, found, strict=True) if ids is None]
        fresh = iter(self._encoded(missing))
        ids = [next(fresh) if known is None else known for known in found]
        # the last piece grows with the text: it is worth keeping only once it is full
        for piece, known, new in zip(pieces[:-1], found, ids, strict=False):
            if known is None:
                self._cache.put(owner, piece, new)
        return b"".join(ids)

    def encode_document(self, text: str, domain: int = 0) -> bytes:
        """The ids of `text`, as `encode` has them, with the special tokens that begin and end a text of this model."""
        before, after = self._around
        return before + self.encode(text, domain) + after

    def decode(self, token_ids: bytes) -> str:
        """The text of `token_ids`."""
        return str(self._tokenizer.decode(list(unpack(token_ids)), skip_special_tokens=False))

    def id_of(self, text: str) -> int | None:
        """The token that is exactly `text`; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def _encoded(self, texts: Sequence[str], *, specials: bool = False) -> list[bytes]:
        return [pack(one.ids) for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=specials)]

    def _surroundings(self) -> tuple[bytes, bytes]:
        (plain,), (dressed,) = self._encoded(["a"]), self._encoded(["a"], specials=True)
        at = dressed.find(plain)
        return (dressed[:at], dressed[at + len(plain) :]) if plain and at >= 0 else (b"", b"")

    def _is_indifferent_to_cuts(self) -> bool:
        text = "\n".join([_PROBE] * 3)
        pieces = cut(text, every=1)
        return b"".join(self._encoded(pieces)) == self._encoded([text])[0]


def cut(text: str, every: int = CHUNK_CHARACTERS) -> list[str]:
    """`text` in pieces of at least `every` characters, cut behind newlines. A longer text has the same first pieces."""
    pieces, start = [], 0
    while found := _CUT.search(text, start + every - 1):
        pieces.append(text[start : found.end()])
        start = found.end()
    return [*pieces, text[start:]]


class Tokens(msgspec.Struct, frozen=True):
    """One input ready for a backend: `count` tokens, exactly where `least` is None. Else `count` is the best estimate,
    and the prompt has at least `least` tokens.

    `keys` are its block keys. `echo` is its text, where the client wants it back. `tools` is how it may call some, and
    `calls` what its answer must be if it has to.
    """

    count: int
    token_ids: bytes = b""
    keys: tuple[int, ...] = ()
    echo: str = ""
    tools: ToolSyntax | None = None
    calls: Grammar | None = None
    least: int | None = None


@dataclass(frozen=True, slots=True)
class ModelText:
    """How one model reads: its tokenizer and chat template, made from `assets`."""

    assets: Mapping[str, bytes]
    tokenizer: TextTokenizer
    template: ChatTemplate

    def tokens(self, given: Input, *, root: int, vocabulary: int | None, echo: bool, is_sent: bool = True) -> Tokens:
        """`given` as tokens with block keys below `root`, which is its cache domain's. Raises InvalidRequest.

        `is_sent`: a backend takes the ids and not the client's own body, so that the router has to refuse unknown ids
        and to see to calls of tools. `vocabulary` is the number of ids, where backends tell it.
        """
        if isinstance(given, bytes):
            ids = given
            if is_sent:
                require_known_ids(ids, vocabulary or self.tokenizer.vocabulary)
        elif isinstance(given, str):
            ids = self.tokenizer.encode_document(given, root)
        else:
            ids = self.tokenizer.encode(self.template.render(given), root)
        if not ids:
            raise InvalidRequest("the prompt is empty", hint="send at least one token", param="prompt")
        text = (given if isinstance(given, str) else self.tokenizer.decode(ids)) if echo else ""
        keys, tool_format = block_keys(ids, root), self.template.tool_format
        if not isinstance(given, Chat) or not is_sent:
            return Tokens(count(ids), ids, keys, text)
        calls = grammar_of(given, tool_format, self.tokenizer.id_of)
        return Tokens(count(ids), ids, keys, text, syntax_of(given, tool_format), calls)


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
            + 4 * MEDIA_TOKENS * given.media
            + _size_of_tools(given)
        )
    return len(given)


def _size_of_tools(chat: Chat) -> int:
    return 1000 * len(chat.tools or ())


class Tokenizers:
    """The tokenizers of all models, and the threads that they run in."""

    def __init__(self, *, threads: int = 2, cache_bytes: int = 64 * 2**20) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._cache = ChunkCache(cache_bytes)
        self._models: dict[str, ModelText] = {}
        self._failed: dict[str, tuple[Mapping[str, bytes], str]] = {}
        self._loading: dict[str, asyncio.Task[ModelText]] = {}
        self._loaded, self._waiting_characters = 0, 0

    def __repr__(self) -> str:
        return (
            f"<Tokenizers of {len(self._models)} models, {self._waiting_characters} characters wait, {self._cache!r}>"
        )

    def check(self) -> None:
        """The cache is sound, and nothing waits; for an idle router."""
        self._cache.check()
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

    async def tokens(
        self, ask: Ask, text: ModelText, *, root: int, vocabulary: int | None, is_sent: bool = True
    ) -> list[Tokens]:
        """Every input of `ask` as `ModelText.tokens` has it, in order. Raises InvalidRequest, Overloaded."""

        def work() -> list[Tokens]:
            return [
                text.tokens(given, root=root, vocabulary=vocabulary, echo=ask.echo, is_sent=is_sent)
                for given in ask.inputs
            ]

        size = sum(map(size_of, ask.inputs))
        return work() if size <= INLINE_CHARACTERS else await self._in_thread(work, size)

    def forget(self, roots: Collection[int]) -> None:
        """Forget the text that was tokenized for the cache domains of `roots`."""
        self._cache.forget(lambda owner: isinstance(owner, tuple) and owner[1] in roots)

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
            tokenizer = TextTokenizer(assets["tokenizer.json"], self._cache, number)
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
    names = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
    return one is other or all(one.get(name) == other.get(name) for name in names)


def estimated(ask: Ask, root: int) -> list[Tokens]:
    """Every input of `ask` with a guess of its length, for models whose tokenizer nobody has: 4 characters a token.

    Keys are those of its text below `root`, or of its token ids where it has some. Those are counted and not estimated,
    but in the many texts of one call for embeddings, each of which has to fit by itself.
    """
    is_one_text = Capability.EMBEDDINGS not in ask.needs
    return [
        Tokens(
            count=max(1, size_of(given) // 4),
            least=None
            if isinstance(given, bytes) and is_one_text
            else max(1, size_of(given) // LONGEST_TOKEN_CHARACTERS),
            keys=block_keys(given, root) if isinstance(given, bytes) else text_keys(_keyed_text(given), root),
            echo=given if ask.echo and isinstance(given, str) else "",
        )
        for given in ask.inputs
    ]


def _text_of(given: Chat | str) -> str:
    """What begins alike for prompts that begin alike: tools, then message by message."""
    if isinstance(given, str):
        return given
    tools = [msgspec.json.encode(given.tools).decode()] if given.tools else []
    return "\x1e".join([*tools, *(f"{message['role']}\x1f{message['content']}" for message in given.messages)])


def _keyed_text(given: Chat | str) -> str:
    """The text that `given` is keyed by. In it an image is about as long as the text of the tokens that it becomes.

    Otherwise a short question about an image would be shorter than one key, and the image would never be found again.
    """
    text = _text_of(given)
    if isinstance(given, str) or not given.media:
        return text
    repeated = min(given.media, MOST_LONG_MEDIA)
    return _MEDIA_MARK.sub(lambda mark: mark.group() * (4 * MEDIA_TOKENS // len(mark.group())), text, count=repeated)

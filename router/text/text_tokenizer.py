"""One model's tokenizer, and pieces of text that it need not do again."""

from __future__ import annotations

import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer

from router.text.chat_template import SPECIAL_TOKENS, text_of_token
from router.text.token_ids import count, pack, unpack

CHUNK_CHARACTERS = 4096
"""Texts are cut at the first safe newline after so many characters; each piece is tokenized and cached by itself."""

# Before a newline that is followed by a letter or digit every tokenizer we know has a token boundary behind it; each
# is verified all the same when it is loaded.
_CUT = re.compile(r"\n(?=\w)")
_PROBE = "One, two. 3 4\nfive\n\n  six: 7\t8;\nÄä 九十 \U0001f600!\nThe end.\n- a\n# b\n{'c': \"d\"}\n\n\ne\r\nf"


class ChunkCache:
    """Token ids of pieces of text seen lately; the oldest go when `most_bytes` are passed. Safe between threads.

    Keyed by its owner (a tokenizer and a cache domain) and the text itself, which is compared: no client can craft a
    piece that passes for another tenant's, or tell by the time of an answer what another tenant has sent.
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

    def __init__(
        self, tokenizer_json: bytes, cache: ChunkCache, number: int = 0, settings: Mapping[str, Any] | None = None
    ) -> None:
        self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        self._tokenizer.add_tokens(_missing_tokens(self._tokenizer, settings or {}))
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

    def with_ends(self, token_ids: bytes) -> bytes:
        """`token_ids` with the special tokens that begin and end a text of this model."""
        before, after = self._around
        return before + token_ids + after

    @property
    def ends(self) -> int:
        """How many special tokens `with_ends` adds."""
        return sum(map(count, self._around))

    def decode(self, token_ids: bytes) -> str:
        """The text of `token_ids`."""
        return str(self._tokenizer.decode(list(unpack(token_ids)), skip_special_tokens=False))

    def token_of(self, token_id: int) -> str:
        """The token with this id as the vocabulary has it; empty if there is none."""
        return self._tokenizer.id_to_token(token_id) or ""

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


def _missing_tokens(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> list[AddedToken]:
    """Tokens that tokenizer_config.json alone names, in the order in which transformers adds them."""
    there = {one.content for one in tokenizer.get_added_tokens_decoder().values()}
    decoder = settings.get("added_tokens_decoder") or {}
    members = ("content", "single_word", "lstrip", "rstrip", "normalized", "special")
    found = [
        AddedToken(**{name: one[name] for name in members if name in one})
        for _, one in sorted(decoder.items(), key=lambda item: int(item[0]))
        if one["content"] not in there
    ]
    there |= {one.content for one in found}
    more = [*(settings.get("additional_special_tokens") or ()), *_own_tokens(settings.get("extra_special_tokens"))]
    named = [*(settings[name] for name in SPECIAL_TOKENS if settings.get(name) is not None), *more]
    contents = [content for content in dict.fromkeys(map(text_of_token, named)) if content not in there]
    return [*found, *(AddedToken(content, special=True) for content in contents)]


def _own_tokens(configured: Mapping[str, Any] | Sequence[Any] | None) -> list[Any]:
    return list(configured.values()) if isinstance(configured, Mapping) else list(configured or ())


def cut(text: str, every: int = CHUNK_CHARACTERS) -> list[str]:
    """`text` in pieces of at least `every` characters, cut behind newlines. A longer text has the same first pieces."""
    pieces, start = [], 0
    while found := _CUT.search(text, start + every - 1):
        pieces.append(text[start : found.end()])
        start = found.end()
    return [*pieces, text[start:]]

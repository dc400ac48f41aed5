"""One model's tokenizer, and pieces of text that it need not do again."""

from __future__ import annotations

import re
import sys
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from tokenizers import AddedToken, Tokenizer

from router.text.characters import most_characters_of_a_token
from router.text.chat_template import SPECIAL_TOKENS, text_of_token
from router.text.cuts import PLACES, SUSPECT, Piece, cut
from router.text.inert import SEAM, Inert
from router.text.token_ids import count, pack, unpack
from router.text.turns import at_once
from shards.kv.keys import TOKEN_BYTES

BATCH_CHARACTERS = 32 * 2**10
"""Pieces that are tokenized together have about so many characters: 15 ms and 5 MB."""

DECODED_TOKENS = 16 * 2**10
"""Ids that are decoded at a time: 5 ms."""

_CONTEXT_TOKENS = 8
"""Ids before a slice that its text may depend on. A character has at most 4 bytes, each of them perhaps a token."""

_PROBE = (
    "One, two. 3 4\nfive\n\n  six: 7\t8;\nÄä 九十 \U0001f600!\nThe end.\n- a\n# b\n{'c': \"d\"}\n\n\ne\r\nf\n"
    'Mr. Ö said:"No, it\'s g.h(i)=j/k+l[m]{n}; x  y 1.5e-3", ab九 ж\n'
)

_MOST_PROBED = 1024
"""Added tokens in the probe; of more it would become too long."""

_Result = TypeVar("_Result")


class TooManyTokensError(Exception):
    """A text has more tokens than it may have: `least`, or more unless that `is_exact`."""

    def __init__(self, least: int, *, is_exact: bool) -> None:
        super().__init__(f"{'' if is_exact else 'at least '}{least} tokens")
        self.least, self.is_exact = least, is_exact


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
    """One model's tokenizer. `places` are those at which its texts can be cut, None if there are none.

    `most_characters` is the longest text that one token can stand for, None if that is not known.
    """

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
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self.most_characters = most_characters_of_a_token(self._tokenizer, vocabulary)
        self.places = self._safe_places(vocabulary)
        self._lead = b""
        if self._tokenizer.encode("a", add_special_tokens=False).tokens[:1] in (["▁a"], ["▁"]):
            (self._lead,) = self._encoded_whole([SEAM], specials=False)
        self._around = self._surroundings()
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.inert = Inert(token.content for token in added)
        """Makes contents of which nothing becomes a token of the chat template."""

    def __repr__(self) -> str:
        return f"<TextTokenizer of {self.vocabulary} ids, {'whole texts only' if self.places is None else 'in pieces'}>"

    def encode(self, text: str, domain: int = 0) -> bytes:
        """See `in_turns`. All at once, however long it takes."""
        return at_once(self.in_turns([text], domain))

    def in_turns(
        self, texts: Iterable[str], domain: int = 0, most_tokens: int | None = None, *, starts: str = ""
    ) -> Generator[int, None, bytes]:
        """The ids of the text that `texts` are the parts of, without the tokens that the tokenizer would put around it.

        Yields after each batch the number of its characters. What was seen before is remembered for its cache `domain`
        alone; texts that begin with the word `starts` in a new line are, wherever they stand.
        Raises TooManyTokensError as soon as there are more than `most_tokens`, and UncuttableError.
        """
        owner, found, total = (self._number, domain), list[bytes](), 0
        for batch in _batches(cut(self._bounded(texts, most_tokens), self.places, starts=starts)):
            ids = self._known_or_encoded(batch, owner)
            found += ids
            total += sum(map(count, ids))
            if most_tokens is not None and total > most_tokens:
                raise TooManyTokensError(total, is_exact=batch[-1].is_last)
            yield sum(len(piece.text) for piece in batch)
        return b"".join(found)

    def apart_in_turns(
        self, texts: Iterable[str], starts: str, domain: int = 0
    ) -> Generator[int, None, list[bytes] | None]:
        """The ids of each of `texts`, which ends with a line break and is followed by the word `starts` in some prompt:
        joined, they are the ids of that prompt. None if this tokenizer has no boundary there.

        Yields and remembers as `in_turns` does. Raises UncuttableError.
        """
        if self.places is None or not self.places.match(f"\n{starts}"):
            return None
        found, owner = list[bytes](), (self._number, domain)
        for text in texts:
            pieces = [Piece(piece.text, is_last=False) for piece in cut([text], self.places, starts=starts)]
            found.append(b"".join(self._known_or_encoded(pieces, owner)))
            yield len(text)
        return found

    def require_room(self, characters: int, most_tokens: int | None) -> None:
        """Raise TooManyTokensError if a text of so many `characters` surely has more than `most_tokens`."""
        if most_tokens is not None and self.most_characters is not None:
            least = -(-characters // self.most_characters)
            if least > most_tokens:
                raise TooManyTokensError(least, is_exact=False)

    def with_ends(self, token_ids: bytes) -> bytes:
        """`token_ids` with the special tokens that begin and end a text of this model."""
        before, after = self._around
        return before + token_ids + after

    @property
    def ends(self) -> int:
        """How many special tokens `with_ends` adds."""
        return sum(map(count, self._around))

    def decode(self, token_ids: bytes) -> str:
        """The text of `token_ids`. All at once, however long it takes."""
        return at_once(self.decoded_in_turns(token_ids))

    def decoded_in_turns(self, token_ids: bytes) -> Generator[int, None, str]:
        """The text of `token_ids`. Yields after each slice the number of its bytes."""
        ids, texts, begin = unpack(token_ids), list[str](), 0
        while begin < len(ids):
            end = self._end_of_character(ids, begin + DECODED_TOKENS)
            # with the tokens before it, because some decoders drop the space that begins a text
            before = ids[max(0, begin - _CONTEXT_TOKENS) : begin]
            texts.append(self._decoded(before + ids[begin:end])[len(self._decoded(before)) :])
            yield TOKEN_BYTES * (end - begin)
            begin = end
        return "".join(texts)

    def token_of(self, token_id: int) -> str:
        """The token with this id as the vocabulary has it; empty if there is none."""
        return self._tokenizer.id_to_token(token_id) or ""

    def id_of(self, text: str) -> int | None:
        """The token that is exactly `text`; None if there is none."""
        found: int | None = self._tokenizer.token_to_id(text)
        return found

    def _decoded(self, ids: array[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))

    def _end_of_character(self, ids: array[int], end: int) -> int:
        """The first place from `end` on where no character is cut; `end` itself if there is none near it."""
        for later in range(end, end + _CONTEXT_TOKENS):
            if later >= len(ids):
                return len(ids)
            if not self._decoded(ids[later - _CONTEXT_TOKENS : later]).endswith("\ufffd"):
                return later
        return min(end, len(ids))

    def _encoded(self, texts: Sequence[str], *, specials: bool = False) -> list[bytes]:
        if any(SEAM in text for text in texts):
            return [b"".join(self._apart(*text.split(SEAM), specials=specials)) for text in texts]
        return self._encoded_whole(texts, specials=specials)

    def _apart(self, first: str, *others: str, specials: bool) -> Iterator[bytes]:
        """The ids of texts that stand behind each other. Tokenizers of Llama 2's kind begin each text with a space, so
        the others are encoded behind the letter SEAM, which has tokens of its own.
        """
        led = [SEAM + text if self._lead else text for text in others]
        ids, *rest = self._encoded_whole([first, *led], specials=specials)
        yield ids
        for text, found in zip(others, rest, strict=True):
            if found.startswith(self._lead):
                yield found[len(self._lead) :]
            else:
                yield from self._encoded_whole([text], specials=specials)

    def _encoded_whole(self, texts: Sequence[str], *, specials: bool) -> list[bytes]:
        return [pack(one.ids) for one in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=specials)]

    def _surroundings(self) -> tuple[bytes, bytes]:
        (plain,), (dressed,) = self._encoded(["a"]), self._encoded(["a"], specials=True)
        at = dressed.find(plain)
        return (dressed[:at], dressed[at + len(plain) :]) if plain and at >= 0 else (b"", b"")

    def _bounded(self, texts: Iterable[str], most_tokens: int | None) -> Iterator[str]:
        """`texts`. Raises TooManyTokensError once they are surely too long together."""
        characters = 0
        for text in texts:
            characters += len(text)
            self.require_room(characters, most_tokens)
            yield text

    def _known_or_encoded(self, pieces: Sequence[Piece], owner: Hashable) -> list[bytes]:
        """The ids of each of `pieces`, from the cache or for it."""
        found = [self._cache.get(owner, piece.text) for piece in pieces]
        fresh = iter(self._encoded([piece.text for piece, ids in zip(pieces, found, strict=True) if ids is None]))
        ids = [next(fresh) if known is None else known for known in found]
        for piece, known, new in zip(pieces, found, ids, strict=True):
            # the last piece grows with the text: it is worth keeping only once it is full
            if known is None and not piece.is_last:
                self._cache.put(owner, piece.text, new)
        return ids

    def _safe_places(self, vocabulary: Iterable[str]) -> re.Pattern[str] | None:
        """Those of PLACES that no token continues behind, and where cutting changes nothing on a probe."""
        decoded = self._tokenizer.get_added_tokens_decoder().values()
        added = [token.content for token in islice(decoded, _MOST_PROBED)]
        probe = _PROBE * 3 + "".join(f"{token}a{token} a {token}\n{token}b\n" for token in added)
        (whole,) = self._encoded([probe])

        def changes_nothing(patterns: Sequence[str]) -> bool:
            pieces = cut([probe], re.compile("|".join(patterns)), every=1)
            return b"".join(self._encoded([piece.text for piece in pieces])) == whole

        suspects = [self._text_of(token) for token in vocabulary if SUSPECT.search(token)]
        safe = [place for place in PLACES if not any(map(place.is_inside, suspects))]
        patterns = [place.pattern for place in safe if changes_nothing([place.pattern])]
        return re.compile("|".join(patterns)) if patterns and changes_nothing(patterns) else None

    def _text_of(self, token: str) -> str:
        decoder = self._tokenizer.decoder
        return token if decoder is None else str(decoder.decode([token]))


def _batches(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """`pieces` in batches of at least BATCH_CHARACTERS; the last may be smaller."""
    batch, size = list[Piece](), 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


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

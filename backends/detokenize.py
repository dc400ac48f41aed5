"""Token ids to text, piece by piece: no half characters, no text that may turn out to be a stop string."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from types import MappingProxyType

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

TOOL_MARKS = (
    *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "<|python_tag|>"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    ),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|tool_call|>", "<|/tool_call|>"),
)
"""Marks around tool calls. They are special tokens in some models, and the parser of calls needs them as text."""

CHANNEL_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
"""Marks around the messages in an answer of gpt-oss: special tokens that the parser of channels needs as text."""


THOUGHT_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<seed:think>", "</seed:think>"))
"""Marks around reasoning, in pairs: special tokens in some models, and the parser of reasoning needs them as text."""


def marks_of(tokenizer: Tokenizer, *, has_tools: bool) -> dict[int, str]:
    """The marks that `tokenizer` has as one token, by their id: of channels and reasoning, and of calls if a request
    `has_tools`.
    """
    known = tokenizer.token_to_id
    channels = CHANNEL_MARKS if known("<|channel|>") is not None else ()
    marks = (*channels, *chain.from_iterable(THOUGHT_MARKS), *(TOOL_MARKS if has_tools else ()))
    return {number: mark for mark in marks if (number := known(mark)) is not None}


class TokenNames:
    """The text and the bytes of single tokens, as they stand inside a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # some decoders drop the space that begins a text, so there is a letter before each token
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._skipped = len(self._decoded([]))
        self._added = {number: token.content for number, token in tokenizer.get_added_tokens_decoder().items()}

    def text(self, token_id: int) -> str:
        """Its text, with U+FFFD for a part of a character."""
        return self._decoded([token_id])[self._skipped :]

    def octets(self, token_id: int, text: str) -> bytes | None:
        """Its bytes where they are not those of `text`, which is its text; None where they are."""
        if "\ufffd" not in text or token_id in self._added:
            return None
        name = self._tokenizer.id_to_token(token_id) or ""
        if _BYTE.fullmatch(name):
            return bytes([int(name[3:5], 16)])
        if all(letter in _BYTES_BY_LETTER for letter in name):
            return bytes(map(_BYTES_BY_LETTER.__getitem__, name))
        return None

    def _decoded(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(self._before + token_ids, skip_special_tokens=False))


_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""The name of a token that is one byte, in vocabularies with bytes for all that is not in them."""


def _bytes_by_letter() -> dict[str, int]:
    """The byte that each letter stands for in the vocabularies of byte-level BPE.

    Source: `bytes_to_unicode` of GPT-2's encoder.py.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES_BY_LETTER = _bytes_by_letter()


class TokenText:
    """The text of one choice's tokens as they come, behind the tokens `before`, the end of the prompt: some decoders
    drop the space that begins a text. Special tokens have no text, but for those `shown`: id to text.

    The results of `push` and `flush` join to `tokenizer.decode` of all tokens at once, except where a run of
    byte tokens is not UTF-8 and a decoder replaces the whole run.
    """

    def __init__(
        self, tokenizer: Tokenizer, shown: Mapping[int, str] = MappingProxyType({}), before: Sequence[int] = ()
    ) -> None:
        self._tokenizer, self._shown = tokenizer, shown
        # behind half a character nothing could be told apart from its rest
        self._spoken = [] if tokenizer.decode(list(before)).endswith("\ufffd") else list(before)
        self._stream = DecodeStream(self._spoken, skip_special_tokens=True)
        self._held: list[int] = []

    def __repr__(self) -> str:
        return f"<TokenText {len(self._held)} tokens held>"

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that is certain once `token_ids` are added; empty while a character is incomplete."""
        text, begin = "", 0
        for at, number in enumerate(token_ids if self._shown else ()):
            if number in self._shown:
                text += self._push(token_ids[begin:at]) + self.flush() + self._shown[number]
                self._stream, self._spoken = DecodeStream(skip_special_tokens=True), []
                begin = at + 1
        return text + self._push(token_ids[begin:])

    def _push(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        self._held += token_ids
        try:
            text = self._stream.step(self._tokenizer, list(token_ids))
        except Exception:  # noqa: BLE001 - tokenizers raises nothing narrower; here: earlier text would have to change
            text = self._tokenizer.decode(self._held)
            self._stream = DecodeStream(skip_special_tokens=True)
        if not text:
            return ""
        self._spoken, self._held = self._held, []
        return text

    def flush(self) -> str:
        """The text of tokens still held, with U+FFFD for incomplete characters."""
        before = self._tokenizer.decode(self._spoken)
        after = self._tokenizer.decode(self._spoken + self._held)
        text = after.removeprefix(before) if self._held else ""
        self._spoken, self._held = self._spoken + self._held, []
        return text


class StopCutter:
    """Passes text on up to the first of `stops`, which is swallowed unless it `shows` that; `found` is then that one.

    Holds back the longest end of the text that may be the beginning of a stop string. The stop string that is complete
    first wins, the longer of two, so that it does not matter how the text is cut into pieces.
    """

    def __init__(self, stops: Sequence[str], *, shows: bool = False) -> None:
        self.found: str | None = None
        self._shows = shows
        self._stops = tuple(_Begun(stop) for stop in stops if stop)
        self._held, self._passed = "", 0

    def __repr__(self) -> str:
        return f"<StopCutter holds {self._held!r}, found {self.found!r}>"

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """The text that is certain not to belong to a stop string, from the held text and `text`.

        A stop string that is complete within a `text` that may not stop is none.
        """
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        added, text = text, self._held + text
        self._passed = self._passed if may_stop else len(text)
        stops = (begun.stop for begun in self._stops)
        places = ((text.find(stop, max(0, self._passed - len(stop) + 1)), stop) for stop in stops)
        ends = [(at + len(stop), -len(stop), stop) for at, stop in places if at >= 0]
        if ends:
            end, _, self.found = min(ends)
            self._held = ""
            return text[: end if self._shows else end - len(self.found)]
        keep = max(begun.push(added) for begun in self._stops)
        self._held = text[len(text) - keep :]
        self._passed = max(0, self._passed - (len(text) - keep))
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held text, which turned out to be no stop string."""
        text, self._held = self._held, ""
        return text


class _Begun:
    """How much of `stop` the text so far ends with: work for each character, however often the stop string begins anew.

    Source: Knuth, Morris and Pratt, Fast pattern matching in strings, 1977.
    """

    def __init__(self, stop: str) -> None:
        self.stop, self._size = stop, 0

    def push(self, text: str) -> int:
        """The length of the longest end of the text that begins `stop` and is not all of it, after `text`."""
        stop, size, longest = self.stop, self._size, len(self.stop) - 1
        if len(text) >= longest:
            text, size = text[len(text) - longest :], 0
        if size or stop[0] in text:
            shorter = _shorter(stop)
            for character in text:
                while size and (size > longest or stop[size] != character):
                    size = shorter[size]
                if stop[size] == character:
                    size += 1
            self._size = shorter[size] if size > longest else size
        else:
            self._size = 0
        return self._size


@lru_cache(maxsize=256)
def _shorter(stop: str) -> Sequence[int]:
    """For each beginning of `stop`, by its length: the length of its longest end, not all of it, that begins `stop`."""
    lengths = [0, 0]
    for character in stop[1:]:
        size = lengths[-1]
        while size and stop[size] != character:
            size = lengths[size]
        lengths.append(size + (stop[size] == character))
    return tuple(lengths)

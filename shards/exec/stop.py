"""Detects stop strings in an answer while it is drawn."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class StopStrings:
    """Decodes one answer token by token and reports the first stop string that it contains.

    The text is what a reader sees: special tokens are left out. A stop string that is itself a special token (say
    `<|im_end|>`) is found by its id, since the text never shows it. Strings may span any number of tokens.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._stream = DecodeStream(skip_special_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        special = {token: found.content for token, found in added.items() if found.special}
        self._by_id = {token: content for token, content in special.items() if content in self._stops}
        self._kept_characters = max(map(len, self._stops)) - 1
        self._tail = ""

    def __repr__(self) -> str:
        return f"StopStrings({list(self._stops)}, tail {self._tail!r})"

    def push(self, token: int) -> str | None:
        """Take the next token; the stop string that it completed, the earliest in the text if several, or None."""
        if token in self._by_id:
            return self._by_id[token]
        seen = len(self._tail)
        text = self._tail + self._decode(token)
        # only matches that end in the new text: earlier ones were reported already
        places = [(text.find(stop, max(0, seen - len(stop) + 1)), -len(stop), stop) for stop in self._stops]
        self._tail = text[max(0, len(text) - self._kept_characters) :]
        return min((place for place in places if place[0] >= 0), default=(0, 0, None))[2]

    def _decode(self, token: int) -> str:
        """The text that `token` completes."""
        try:
            return self._stream.step(self._tokenizer, token) or ""
        except Exception:  # noqa: BLE001 - tokenizers raises nothing more specific
            # the decoder changed text that it had returned; the rest is decoded on its own
            self._stream = DecodeStream(skip_special_tokens=True)
            return self._stream.step(self._tokenizer, token) or ""

"""What the client of a stream has got so far, so that another backend can continue the answer."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from policies.nouns import Beginning, Capability, Delta, Request

MOST_BYTES = 1 << 20
"""Of an answer with more text or ids nothing is kept: such an answer is not continued."""

_JOINED = 64
"""Pieces of text that are joined: each by itself takes 50 bytes more than its characters."""

_LARGE = 4 << 10
"""Characters of a piece that is joined at once, so that pieces take little memory."""

_FORCING = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")


class SoFar:
    """The answer to one prompt, while it passes: token ids where they are known, and text.

    `tokens` are counted in any case. The rest `is_lost` once the answer holds anything that cannot be repeated to
    another backend: tool calls, reasoning, an end. `has_ended`: the client has the end, with its reason.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.is_lost = self.has_ended = False
        self._ids: array[int] | None = array("I")
        self._texts: list[str] = []

    def __repr__(self) -> str:
        return f"<SoFar {self.tokens} tokens{', lost' if self.is_lost else ''}>"

    def add(self, delta: Delta) -> None:
        """`delta` goes to the client."""
        text, texts = delta.text, self._texts
        if not text or delta.token_ids or delta.message is not None or delta.finish_reason or delta.body is not None:
            self._add_other(delta)
            return
        # text alone, as nearly all of them
        self.tokens += delta.tokens or 1
        if not self.is_lost:
            self._ids = None
            texts.append(text)
            if len(texts) == _JOINED or len(text) > _LARGE:
                self._join()

    def _add_other(self, delta: Delta) -> None:
        """The same for one that holds anything but text."""
        ids, text = delta.token_ids, delta.text
        tokens = delta.tokens or len(ids) or bool(text)
        self.tokens += tokens
        self.has_ended = self.has_ended or delta.finish_reason is not None
        if self.is_lost:
            return
        is_unparsed = bool(tokens) and not (ids or text)
        has_more = delta.body is not None or (delta.message is not None and not ids)
        if delta.finish_reason is not None or is_unparsed or has_more:
            self._lose()
            return
        if not ids and tokens:
            self._ids = None
        elif self._ids is not None:
            try:
                self._ids.extend(ids)
            except (TypeError, OverflowError):
                # no ids; its text may be continued
                self._ids = None
        if text or ids:
            self._texts.append(text)
            if len(self._texts) == _JOINED or len(text) > _LARGE:
                self._join()

    @property
    def characters(self) -> int | None:
        """Those of its text; None where it holds more than text."""
        return None if self.is_lost else sum(map(len, self._texts))

    def _join(self) -> None:
        ids_bytes = 0 if self._ids is None else 4 * len(self._ids)
        self._texts = ["".join(self._texts)]
        if len(self._texts[0]) + ids_bytes > MOST_BYTES:
            self._lose()

    def beginning(self, request: Request, body: Mapping[str, Any] | None) -> Beginning | None:
        """What another backend can continue; None if there is nothing, or none could.

        By text alone no answer is continued that is held to a grammar, which would begin anew, and none to a prompt of
        token ids.
        """
        if self.is_lost or not self.tokens:
            return None
        text = "".join(self._texts)
        if self._ids:
            return Beginning(self.tokens, text, self._ids.tobytes())
        if not text or body is None or Capability.STRUCTURED_OUTPUT in request.needs:
            return None
        if any(body.get(name) for name in _FORCING) or body.get("tool_choice") not in (None, "auto", "none"):
            return None
        if "messages" not in body and not isinstance(body.get("prompt"), str):
            return None
        return Beginning(self.tokens, text)

    def _lose(self) -> None:
        self.is_lost, self._ids = True, None
        self._texts.clear()

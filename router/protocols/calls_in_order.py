"""Deltas of an answer with one call of a tool at a time, for dialects in which the next item closes the one before it.

Engines write fragments of several calls alternately, and line breaks between the fragments of one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from backends.nesting import decode_json
from policies.nouns import Delta


class CallsInOrder:
    """Puts the calls of one answer one behind the other.

    A call is open until its arguments are a whole JSON object and something else begins. What comes before that waits
    for the end of the answer. White space behind a call waits for text, and is dropped without any: Anthropic takes no
    blank text back.
    """

    def __init__(self) -> None:
        self._open: int | None = None
        self._arguments = list[str]()
        self._closed = set[int]()
        self._blank = ""
        self._waiting = list[Delta]()

    def __repr__(self) -> str:
        return f"<CallsInOrder: call {self._open} open, {len(self._waiting)} pieces wait>"

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """`delta`, and whatever may be written with it now."""
        calls = None if delta.message is None else delta.message.get("tool_calls")
        if not calls and self._open is None:
            # as nearly every one
            return (delta,)
        return tuple(self._in_turn(delta, calls or ()))

    def end(self) -> Iterator[Delta]:
        """What waited: content, then each call."""
        waiting, self._waiting = self._waiting, []
        by_call: dict[int, list[Delta]] = {}
        for delta in waiting:
            by_call.setdefault(_number_of(delta), []).append(delta)
        for deltas in by_call.values():
            yield from deltas

    def _in_turn(self, delta: Delta, calls: Sequence[Mapping[str, Any]]) -> Iterator[Delta]:
        message = {name: value for name, value in (delta.message or {}).items() if name != "tool_calls" and value}
        content = replace(delta, message=message or None, finish_reason=None, stop=None)
        is_blank = not content.text.strip() and not message
        if self._open is not None and is_blank:
            self._blank += content.text
        elif not is_blank or content.text:
            if self._may_begin():
                self._shut()
                yield replace(content, text=self._blank + content.text)
                self._blank = ""
            else:
                self._waiting.append(content)
        for call in calls:
            yield from self._call(call, Delta(choice=delta.choice, message={"tool_calls": [call]}))
        if delta.finish_reason or delta.stop:
            yield Delta(choice=delta.choice, finish_reason=delta.finish_reason, stop=delta.stop)

    def _call(self, call: Mapping[str, Any], piece: Delta) -> Iterator[Delta]:
        number = call["index"]
        if number in self._closed:
            # nothing follows a whole object
            return
        if number != self._open:
            if not self._may_begin():
                self._waiting.append(piece)
                return
            self._shut()
            self._open = number
        self._arguments.append((call.get("function") or {}).get("arguments") or "")
        yield piece

    def _may_begin(self) -> bool:
        """Whether something else may follow now. Read once for each thing that begins, so the work is bounded."""
        if self._waiting:
            return False
        if self._open is None:
            return True
        try:
            return isinstance(decode_json("".join(self._arguments)), dict)
        except msgspec.MsgspecError:
            return False

    def _shut(self) -> None:
        if self._open is not None:
            self._closed.add(self._open)
        self._open, self._arguments = None, []


def _number_of(delta: Delta) -> int:
    """The number of the call that a waiting piece is of; -1 for content."""
    calls = (delta.message or {}).get("tool_calls")
    return calls[0]["index"] if calls else -1

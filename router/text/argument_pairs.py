"""Parses calls with arguments in pairs of marked texts, as GLM-4.5 writes them, while they stream. Pure but for its own
memory.

`<tool_call>name`, then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each argument, `</tool_call>`,
with or without newlines between them. A value is a text as it is, or JSON: the tool's schema tells which, and without
it a value that is JSON counts as that.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from backends.nesting import decode_json
from router.text.parsed_text import MOST_HELD_CHARACTERS, ParsedText, Unread, in_slices, overlap
from router.text.tool_formats import ToolSyntax

_OPENS, _CLOSES = "<tool_call>", "</tool_call>"
_KEY, _END_KEY, _VALUE, _END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"\s*([^\s<>{}\"]+)\s*")
_MAY_BECOME_NAME = re.compile(r"\s*(?:[^\s<>{}\"]{1,256}\s*)?")
_PAIR = re.compile(rf"\s*{_KEY}([^<]*){_END_KEY}\s*{_VALUE}")


class PairReader:
    """Parses one choice. The joined output does not depend on how the text is cut into pieces.

    White space around a call belongs to it. A text streams as it is drawn, any other value comes whole. `id_of` gives
    the ids of calls by their number.
    """

    def __init__(self, syntax: ToolSyntax, id_of: Callable[[int], str]) -> None:
        self.calls = 0
        self._schemas, self._id_of = syntax.schemas, id_of
        self._held, self._properties, self._pairs = "", dict[str, Any](), 0
        self._key = ""
        self._step: Callable[[ParsedText], bool] = self._seek
        self._is_last, self._is_cut, self._unread = False, False, Unread()

    def __repr__(self) -> str:
        return f"<PairReader {self.calls} calls, {len(self._held)} characters held>"

    def push(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> ParsedText:
        """See `CallReader.push`."""
        self._is_cut = is_cut
        return in_slices(self._push, text, is_last=is_last)

    def _push(self, text: str, is_last: bool) -> ParsedText:
        held, parsed = self._unread.with_held(self._held, text, is_last=is_last), ParsedText()
        if held is None:
            return parsed
        self._held, self._is_last = held, is_last
        while self._step(parsed):
            pass
        return parsed

    # Each step looks at the held text, adds to `parsed` what later text cannot change, and returns whether to go on.

    def _seek(self, parsed: ParsedText) -> bool:
        """Text, until an opening mark."""
        held = self._held
        at = held.find(_OPENS)
        if at >= 0:
            before = len(held[:at].rstrip())
            parsed.text, self._held = parsed.text + held[:before], held[before:]
            return self._go(self._begin)
        begun = overlap(held, _OPENS)
        if self._is_last and self._is_cut and begun:
            certain = len(held[:-begun].rstrip())
        elif self._is_last:
            certain = 0 if self.calls and not held.strip() else len(held)
        else:
            certain = len(held) - begun
            certain = certain if self._is_too_long() else len(held[:certain].rstrip())
        parsed.text, self._held = parsed.text + held[:certain], "" if self._is_last else held[certain:]
        return False

    def _begin(self, parsed: ParsedText) -> bool:
        """A possible call, behind white space and its opening mark: its name, and what follows it."""
        start = self._held.find(_OPENS) + len(_OPENS)
        body = self._held[start:]
        name = _NAME.match(body)
        rest = body[name.end() :] if name is not None else ""
        if name is not None and rest.startswith((_KEY, _CLOSES)):
            parsed.call(self.calls, self._id_of(self.calls), name[1])
            self.calls += 1
            schema = self._schemas.get(name[1])
            properties = schema.get("properties") if isinstance(schema, Mapping) else None
            self._properties = dict(properties) if isinstance(properties, Mapping) else {}
            self._held, self._pairs = rest, 0
            return self._go(self._pair)
        may_begin = any(mark.startswith(rest) for mark in (_KEY, _CLOSES)) if rest else _MAY_BECOME_NAME.fullmatch(body)
        if may_begin and not self._is_last and not self._is_too_long():
            return False
        if may_begin and self._is_cut and self._is_last:
            self._held = ""
            return False
        # not a call: its opening mark is text, and what follows may be
        parsed.text, self._held = parsed.text + self._held[:start], body
        return self._go(self._seek)

    def _pair(self, parsed: ParsedText) -> bool:
        """The next argument, or the end of the call."""
        held = self._held.lstrip()
        if held.startswith(_CLOSES):
            parsed.argue(self.calls - 1, "}" if self._pairs else "{}")
            self._held = held[len(_CLOSES) :]
            return self._go(self._seek)
        pair = _PAIR.match(held)
        if pair is None:
            # text that is no argument is dropped: a call has begun
            dropped = held.find("<", 1)
            if (held and not held.startswith("<")) or (held and not _may_be_pair(held)):
                self._held = held[dropped:] if dropped >= 0 else ""
                return bool(self._held)
            return False
        self._key = pair[1].strip()
        parsed.argue(self.calls - 1, f"{', ' if self._pairs else '{'}{_text(self._key)}: ")
        self._pairs += 1
        self._held = held[pair.end() :]
        if is_text(self._properties.get(self._key)):
            parsed.argue(self.calls - 1, '"')
            return self._go(self._stream)
        return self._go(self._value)

    def _stream(self, parsed: ParsedText) -> bool:
        """A value that is a text, passed on in pieces."""
        held = self._held
        at = held.find(_END_VALUE)
        certain = at if at >= 0 else len(held) - (0 if self._is_last else overlap(held, _END_VALUE))
        if certain:
            parsed.argue(self.calls - 1, _text(held[:certain])[1:-1])
        self._held = held[certain:]
        if at < 0:
            return False
        parsed.argue(self.calls - 1, '"')
        self._held = self._held[len(_END_VALUE) :]
        return self._go(self._pair)

    def _value(self, parsed: ParsedText) -> bool:
        """A value that may be JSON, once it is whole."""
        value, found, rest = self._held.partition(_END_VALUE)
        if not found:
            if not self._is_too_long():
                return False
            # no JSON is so long in an argument: it goes on as a text
            parsed.argue(self.calls - 1, '"')
            return self._go(self._stream)
        parsed.argue(self.calls - 1, value.strip() if _is_json(value) else _text(value))
        self._held = rest
        return self._go(self._pair)

    def _go(self, step: Callable[[ParsedText], bool]) -> bool:
        self._step = step
        return True

    def _is_too_long(self) -> bool:
        return len(self._held) > MOST_HELD_CHARACTERS


def _may_be_pair(held: str) -> bool:
    """Whether `held`, which begins with `<`, can become an argument or the end of a call."""
    if any(mark.startswith(held) for mark in (_KEY, _CLOSES)):
        return True
    if not held.startswith(_KEY) or len(held) > MOST_HELD_CHARACTERS:
        return False
    _, found, behind = held.partition(_END_KEY)
    return not found or _VALUE.startswith(behind.lstrip())


def is_text(schema: Any) -> bool:
    """Whether each value that fits `schema` is a text."""
    if not isinstance(schema, Mapping):
        return False
    allowed = schema.get("enum")
    if isinstance(allowed, list) and allowed:
        return all(isinstance(value, str) for value in allowed)
    return schema.get("type") == "string" or isinstance(schema.get("const"), str)


def _is_json(value: str) -> bool:
    try:
        decode_json(value, object)
    except ValueError:
        # msgspec's errors are ValueErrors
        return False
    return True


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)

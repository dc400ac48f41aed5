"""Parses calls with arguments in pairs of marked texts, as GLM-4.5 and Qwen3-Coder write them, while they stream. Pure
but for its own memory.

GLM: `<tool_call>name`, then `<arg_key>key</arg_key>` and `<arg_value>value</arg_value>` for each argument,
`</tool_call>`, with or without newlines between them. Qwen: `<tool_call><function=name>`, then
`<parameter=key>value</parameter>`, `</function></tool_call>`, each mark in a line of its own. A value is a text as it
is, or JSON: the tool's schema tells which, and without it a value that is JSON counts as that.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import NoneType

from backends.nesting import decode_json
from router.text.parsed_text import MOST_HELD_CHARACTERS, ParsedText, UnreadText, in_slices, overlap
from router.text.schema_kinds import ALL_KINDS, TEXT_ALONE, kinds_of_properties
from router.text.tool_formats import PairMarks, ToolSyntax

_KINDS: Mapping[type, str] = {
    str: "string",
    bool: "boolean",
    int: "number",
    float: "number",
    list: "array",
    dict: "object",
    NoneType: "null",
}


class PairReader:
    """Parses one choice. The joined output does not depend on how the text is cut into pieces.

    White space around a call belongs to it. A text streams as it is drawn, any other value comes whole. `id_of` gives
    the ids of calls by their number.
    """

    def __init__(self, syntax: ToolSyntax, marks: PairMarks, id_of: Callable[[int], str]) -> None:
        self.calls, self._is_behind_call = 0, False
        self._opens, self._marks = syntax.format.opens, marks
        self._schemas, self._id_of = syntax.schemas, id_of
        self._held, self._kinds, self._pairs = "", dict[str, frozenset[str]](), 0
        self._key = ""
        self._step: Callable[[ParsedText], bool] = self._seek
        self._is_last, self._is_cut, self._unread = False, False, UnreadText()

    def __repr__(self) -> str:
        return f"<PairReader {self.calls} calls, {len(self._held)} characters held>"

    def push(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> ParsedText:
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
        at = min((place for mark in self._opens if (place := held.find(mark)) >= 0), default=-1)
        if at >= 0:
            before = len(held[:at].rstrip())
            self._is_behind_call &= before == 0
            parsed.text, self._held = parsed.text + held[:before], held[before:]
            return self._go(self._begin)
        begun = max(overlap(held, mark) for mark in self._opens)
        if self._is_last and self._is_cut and begun:
            certain = len(held[:-begun].rstrip())
        elif self._is_last:
            certain = 0 if self._is_behind_call and not held.strip() else len(held)
        else:
            certain = len(held) - begun
            certain = certain if self._is_too_long() else len(held[:certain].rstrip())
        self._is_behind_call &= certain == 0
        parsed.text, self._held = parsed.text + held[:certain], "" if self._is_last else held[certain:]
        return False

    def _begin(self, parsed: ParsedText) -> bool:
        """A possible call, behind white space and its opening mark: its name, and what follows it."""
        space = len(self._held) - len(self._held.lstrip())
        mark = next(mark for mark in self._opens if self._held.startswith(mark, space))
        start, marks = space + len(mark), self._marks
        body = self._held[start:]
        name = marks.name.match(body)
        if name is not None:
            parsed.call(self.calls, self._id_of(self.calls), name[1])
            self.calls, self._is_behind_call = self.calls + 1, True
            self._kinds = kinds_of_properties(self._schemas.get(name[1]))
            self._held, self._pairs = body[name.end() :], 0
            return self._go(self._pair)
        may_begin = marks.may_become_name.fullmatch(body) is not None
        if may_begin and not self._is_last and not self._is_too_long():
            return False
        if may_begin and self._is_cut and self._is_last:
            self._held = ""
            return False
        # not a call: its opening mark is text, and what follows may be
        self._is_behind_call = False
        parsed.text, self._held = parsed.text + self._held[:start], body
        return self._go(self._seek)

    def _pair(self, parsed: ParsedText) -> bool:
        """The next argument, or the end of the call."""
        held = self._held.lstrip()
        marks = self._marks
        if held.startswith(marks.closes):
            parsed.argue(self.calls - 1, "}" if self._pairs else "{}")
            self._held = held[len(marks.closes) :]
            return self._go(self._end if marks.ends else self._seek)
        pair = marks.pair.match(held)
        if pair is None:
            # text that is no argument is dropped: a call has begun
            dropped = held.find("<", 1)
            if (held and not held.startswith("<")) or (held and not self._may_be_pair(held)):
                self._held = held[dropped:] if dropped >= 0 else ""
                return bool(self._held)
            return False
        self._key = pair[1].strip()
        parsed.argue(self.calls - 1, f"{', ' if self._pairs else '{'}{_text(self._key)}: ")
        self._pairs += 1
        self._held = held[pair.end() :]
        if self._kinds.get(self._key) == TEXT_ALONE:
            parsed.argue(self.calls - 1, '"')
            return self._go(self._stream)
        return self._go(self._value)

    def _stream(self, parsed: ParsedText) -> bool:
        """A value that is a text, passed on in pieces."""
        held = self._held
        mark, has_lines = self._marks.end_value, self._marks.has_lines
        at = held.find(mark)
        certain = at if at >= 0 else len(held) - (0 if self._is_last else overlap(held, mark))
        # a line break before the mark belongs to it
        line = int(has_lines and held.endswith("\n", 0, certain) and (at >= 0 or not self._is_last))
        if certain := certain - line:
            parsed.argue(self.calls - 1, _text(held[:certain])[1:-1])
        self._held = held[certain:]
        if at < 0:
            return False
        parsed.argue(self.calls - 1, '"')
        self._held = self._held[line + len(mark) :]
        return self._go(self._pair)

    def _value(self, parsed: ParsedText) -> bool:
        """A value that may be JSON, once it is whole."""
        value, found, rest = self._held.partition(self._marks.end_value)
        if not found:
            if not self._is_too_long():
                return False
            # no JSON is so long in an argument: it goes on as a text
            parsed.argue(self.calls - 1, '"')
            return self._go(self._stream)
        value = value.removesuffix("\n") if self._marks.has_lines else value
        kinds = self._kinds.get(self._key, ALL_KINDS)
        spelled = _OF_PYTHON.get(value.strip())
        if spelled is not None and "string" not in kinds and _is_of(spelled, kinds):
            value = spelled
        parsed.argue(self.calls - 1, value.strip() if _is_of(value, kinds) else _text(value))
        self._held = rest
        return self._go(self._pair)

    def _end(self, parsed: ParsedText) -> bool:  # noqa: ARG002 - steps are alike
        """Behind a call: the mark that may stand there, or text."""
        rest, mark = self._held.lstrip(), self._marks.ends
        if mark.startswith(rest) and rest != mark:
            self._held = "" if self._is_last and self._is_cut else self._held
            return bool(self._is_last and self._held) and self._go(self._seek)
        self._held = rest[len(mark) :] if rest.startswith(mark) else self._held
        return self._go(self._seek)

    def _may_be_pair(self, held: str) -> bool:
        """Whether `held`, which begins with `<`, can become an argument or the end of a call."""
        if any(mark.startswith(held) for mark in (self._marks.key, self._marks.closes)):
            return True
        return len(held) <= MOST_HELD_CHARACTERS and self._marks.may_become_pair.fullmatch(held) is not None

    def _go(self, step: Callable[[ParsedText], bool]) -> bool:
        self._step = step
        return True

    def _is_too_long(self) -> bool:
        return len(self._held) > MOST_HELD_CHARACTERS


_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}
"""Qwen3-Coder's published template shows a model its own calls with these."""


def _is_of(value: str, kinds: frozenset[str]) -> bool:
    """Whether `value` is JSON of one of `kinds`."""
    try:
        return _KINDS[type(decode_json(value, object))] in kinds
    except ValueError:
        # msgspec's errors are ValueErrors
        return False


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)

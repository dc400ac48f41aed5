"""Parses tool calls out of a model's own text while it streams. Pure but for its own memory.

For backends that draw tokens and do not know tools, such as shards. Text that is not a call passes unchanged.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

import msgspec

from backends.base import Backend, Taker
from backends.nesting import decode_json
from policies.nouns import Delta, Request
from router.text.argument_pairs import PairReader
from router.text.parsed_text import (
    MOST_HELD_CHARACTERS,
    ParsedText,
    UnreadText,
    ended_by_calls,
    in_slices,
    joined,
    namer,
    overlap,
    sliced,
)
from router.text.tool_formats import ToolSyntax

_BETWEEN = r"[\s\[\],;]{0,1024}+"
_BEHIND = re.compile(r"^[\s\],;]*")
_OBJECT = re.compile(_BETWEEN + r"\{")
_HEAD = re.compile(
    _BETWEEN + r'\{\s*"name"\s*:\s*("(?:[^"\\]|\\.){0,256}+")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


_CUT_HEAD = re.compile(
    r'\s*\{\s*(?:"(?:n(?:a(?:me?)?)?)?|"name"\s*:?\s*|"name"\s*:\s*"(?P<name>[^"\\]{0,256}(?:"[^{]*)?))?', re.DOTALL
)
"""The beginning of a call that stands without a mark, as far as its arguments."""


def reading_calls(to: Taker, backend: Backend, request: Request, syntax: ToolSyntax) -> Taker:
    """A Taker that parses tool calls out of the text of `backend` for `to`, unless the backend parses them itself."""
    described = backend.describe()
    if described is None or not described.speaks_tokens:
        return to
    return _CallTaker(to, AnswerReader(request.id, syntax))


class _CallTaker:
    """Gives `to` what `reader` makes of the Deltas that it gets."""

    def __init__(self, to: Taker, reader: AnswerReader) -> None:
        self._to, self._reader = to, reader

    def __repr__(self) -> str:
        return f"<_CallTaker with {self._reader!r}>"

    def take(self, delta: Delta) -> bool:
        return self._to.take(self._reader.read(delta))

    async def ready(self) -> None:
        await self._to.ready()


class AnswerReader:
    """Parses one answer with all its choices: Deltas in, as many Deltas out."""

    def __init__(self, request_id: str, syntax: ToolSyntax) -> None:
        self._request_id, self._syntax = request_id, syntax
        self._choices: dict[int, CallReader | PairReader] = {}

    def __repr__(self) -> str:
        return f"<AnswerReader of {self._request_id}: {self._choices}>"

    def read(self, delta: Delta) -> Delta:
        """`delta` with its calls apart from its text; text that may become a call comes with a later Delta."""
        if delta.computed_tokens is not None:
            return delta
        reader = self._choices.get(delta.choice)
        if reader is None:
            reader = self._choices[delta.choice] = reader_of(self._syntax, namer(self._request_id, delta.choice))
        ended = delta.finish_reason
        read = reader.push(delta.text, is_last=ended is not None, is_cut=ended == "length").changes(delta)
        return ended_by_calls(read) if reader.calls else read


def reader_of(syntax: ToolSyntax, id_of: Callable[[int], str]) -> CallReader | PairReader:
    """The reader of one choice. `id_of` gives the ids of calls by their number."""
    return PairReader(syntax, syntax.format.pairs, id_of) if syntax.format.pairs else CallReader(syntax, id_of)


class CallReader:
    """Parses one choice. The joined output does not depend on how the text is cut into pieces.

    White space around a call belongs to it. A call without an opening mark must name a given tool. `id_of` gives
    the ids of calls by their number.
    """

    def __init__(self, syntax: ToolSyntax, id_of: Callable[[int], str]) -> None:
        self.calls, self._is_behind_call = 0, False
        self._format, self._names, self._id_of = syntax.format, syntax.names, id_of
        self._held, self._body, self._scanned = "", 0, 0
        self._nesting, self._until = _Nesting(), 0
        self._step: Callable[[ParsedText], bool] = self._begin if syntax.format.is_bare else self._seek
        self._ends, self._is_cut, self._unread = False, False, UnreadText()
        # slices behind what is held, of a text that was held and is no call
        self._later = deque[str]()

    def __repr__(self) -> str:
        return f"<CallReader {self.calls} calls, {len(self._held)} characters held>"

    def push(self, text: str, *, is_last: bool = False, is_cut: bool = False) -> ParsedText:
        """The text and calls that are final once `text` is added; `is_last`: no more text comes. `is_cut`: the answer
        ran out of tokens, so that the beginning of a call at its end is dropped and no text.
        """
        self._is_cut = is_cut
        return in_slices(self._push, text, is_last=is_last)

    def _push(self, text: str, is_last: bool) -> ParsedText:
        held, parsed = self._unread.with_held(self._held, text, is_last=is_last), ParsedText()
        if held is None:
            return parsed
        self._held, self._ends = held, is_last
        each = [self._stepped(parsed)]
        while self._later:
            self._held += self._later.popleft()
            each.append(self._stepped(ParsedText()))
        return joined(each)

    def _stepped(self, parsed: ParsedText) -> ParsedText:
        while self._step(parsed):
            pass
        return parsed

    @property
    def _is_last(self) -> bool:
        """Whether nothing comes behind what is held."""
        return self._ends and not self._later

    # Each step looks at the held text, adds to `parsed` what later text cannot change, and returns whether to go on.

    def _begin(self, parsed: ParsedText) -> bool:  # noqa: ARG002 - steps are alike
        """No text came before: a call may stand here without an opening mark."""
        if not self._held.strip() and not self._is_last and not self._is_too_long():
            return False
        return self._look_for_call(0) if self._held.lstrip().startswith("{") else self._go(self._seek)

    def _seek(self, parsed: ParsedText) -> bool:
        """Text, until an opening mark."""
        opens, held = self._format.opens, self._held
        at, mark = min(((held.find(mark), mark) for mark in opens if mark in held), key=_first, default=(-1, ""))
        if at >= 0:
            before = len(held[:at].rstrip())
            self._is_behind_call &= before == 0
            parsed.text, self._held = parsed.text + held[:before], held[before:]
            return self._look_for_call(at - before + len(mark))
        certain = len(held) - max(overlap(held, mark) for mark in opens)
        if self._is_last and self._is_cut and certain < len(held):
            certain = len(held[:certain].rstrip())
        elif self._is_last:
            certain = 0 if self._is_behind_call and not held.strip() else len(held)
        elif not self._is_too_long():
            certain = len(held[:certain].rstrip())
        self._is_behind_call &= certain == 0
        parsed.text, self._held = parsed.text + held[:certain], "" if self._is_last else held[certain:]
        return False

    def _call(self, parsed: ParsedText) -> bool:
        """A possible call, from `_body` on."""
        text = self._held[self._body :]
        head = _HEAD.match(text)
        if head is not None:
            return self._open(parsed, _unquoted(head[1]), text[head.end() :], depth=1)
        named = None if self._format.head is None else self._format.head.match(text)
        if named is not None:
            return self._open(parsed, named[1], text[named.end() :], depth=0)
        found = _OBJECT.match(text)
        if found is None:
            return self._wait(parsed) if self._format.may_become.fullmatch(text) else self._pass_on(parsed)
        end = self._nesting.end_in(text, max(self._scanned, found.end() - 1), until=0, is_json=True)
        self._scanned = len(text)
        if self._nesting.is_broken:
            return self._pass_on(parsed)
        if end is None:
            return self._wait(parsed)
        written = _written(text[found.end() - 1 : end])
        if written is None or not self._may_call(written[0]):
            return self._pass_on(parsed)
        self._begin_call(parsed, written[0])
        parsed.argue(self.calls - 1, written[1])
        self._held = text[end:]
        return self._go(self._after)

    def _open(self, parsed: ParsedText, name: str | None, rest: str, *, depth: int) -> bool:
        """Begin a call of `name`; its arguments come next, `depth` objects deep."""
        if name is None or not self._may_call(name):
            return self._pass_on(parsed)
        self._begin_call(parsed, name)
        self._held, self._nesting, self._until = rest, _Nesting(depth), depth
        return self._go(self._arguments)

    def _arguments(self, parsed: ParsedText) -> bool:
        """Arguments, passed on in pieces."""
        end = self._nesting.end_in(self._held, 0, until=self._until)
        piece = self._held if end is None else self._held[:end]
        if piece:
            parsed.argue(self.calls - 1, piece)
        self._held = self._held[len(piece) :]
        return end is not None and self._go(self._rest if self._until else self._after)

    def _rest(self, parsed: ParsedText) -> bool:  # noqa: ARG002
        """Skip the members of a call's object behind its arguments."""
        end = self._nesting.end_in(self._held, 0, until=0)
        self._held = "" if end is None else self._held[end:]
        return end is not None and self._go(self._after)

    def _after(self, parsed: ParsedText) -> bool:  # noqa: ARG002
        """After a call: its closing mark, another call, or text."""
        closes, opens, is_listed = self._format.closes, self._format.opens, self._format.is_listed
        rest = _BEHIND.sub("", self._held, count=1) if is_listed else self._held.lstrip()
        if not rest:
            return False
        if any(mark.startswith(rest) and mark != rest for mark in (*closes, *opens)):
            if not self._is_last:
                return False
            if self._is_cut:
                self._held = ""
                return False
        closing = next((mark for mark in closes if rest.startswith(mark)), None)
        if closing is not None:
            self._held = rest[len(closing) :]
            return self._go(self._seek)
        if rest.startswith(opens) or not is_listed:
            return self._go(self._seek)
        self._held = rest
        return self._look_for_call(0)

    def _go(self, step: Callable[[ParsedText], bool]) -> bool:
        self._step = step
        return True

    def _look_for_call(self, body: int) -> bool:
        self._body, self._scanned, self._nesting = body, 0, _Nesting()
        return self._go(self._call)

    def _may_call(self, name: str) -> bool:
        """Whether `name` is a call's. Behind an opening mark every name is: the client reports an unknown tool."""
        return name in self._names or self._body > 0

    def _wait(self, parsed: ParsedText) -> bool:
        if self._is_last and self._is_cut and (self._body > 0 or self._may_name_a_tool()):
            self._held = ""
            return False
        return (self._is_last or self._is_too_long()) and self._pass_on(parsed)

    def _pass_on(self, parsed: ParsedText) -> bool:
        """Not a call: its opening mark is text, and what follows may be."""
        # each further mark looks at all that is held behind it, so that is not much
        self._is_behind_call = False
        held, *later = sliced(self._held[self._body :])
        self._later.extendleft(reversed(later))
        parsed.text, self._held = parsed.text + self._held[: self._body], held
        return self._go(self._seek)

    def _may_name_a_tool(self) -> bool:
        """Whether a cut object without an opening mark begins as a call of a given tool does."""
        begun = _CUT_HEAD.fullmatch(self._held)
        if begun is None or begun["name"] is None:
            return begun is not None
        name, closed, _ = begun["name"].partition('"')
        return name in self._names if closed else any(known.startswith(name) for known in self._names)

    def _begin_call(self, parsed: ParsedText, name: str) -> None:
        parsed.call(self.calls, self._id_of(self.calls), name)
        self.calls, self._is_behind_call = self.calls + 1, True

    def _is_too_long(self) -> bool:
        return len(self._held) > MOST_HELD_CHARACTERS


_JSON = frozenset(" \t\r\n:,+-.0123456789Eaeflnrstu")
"""What stands in JSON outside of strings, but for brackets."""


class _Nesting:
    """Depth of nesting in a JSON text that comes in pieces.

    `is_broken`: a character stood outside of strings that JSON has nowhere there. No mark is JSON, so of the marks in a
    text that never ends at most every second one has the others in its strings, and no character is looked at again for
    each mark before it.
    """

    def __init__(self, depth: int = 0) -> None:
        self._depth, self._in_string, self._escaped, self.is_broken = depth, False, False, False

    def end_in(self, text: str, start: int, *, until: int, is_json: bool = False) -> int | None:
        """Position behind the bracket in `text[start:]` that reduces the depth to `until`; None if there is none.

        If the text has to be JSON (`is_json`), None at the first character that shows that it is none.
        """
        for at in range(start, len(text)):
            letter = text[at]
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = letter == "\\", letter != '"'
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if self._depth == until:
                    return at + 1
            elif is_json and letter not in _JSON:
                self.is_broken = True
                return None
        return None


class _Written(msgspec.Struct):
    """A call as one JSON object."""

    name: str
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


def _written(text: str) -> tuple[str, str] | None:
    """Name and arguments (JSON text) of the call in `text`; None if it is not a call."""
    try:
        call = decode_json(text, _Written)
        arguments = (bytes(call.arguments) or bytes(call.parameters)).decode().strip()
        if arguments.startswith('"'):
            # some models encode the object as a JSON text once more
            arguments = msgspec.json.decode(arguments, type=str)
        return (call.name, arguments) if call.name and arguments else None
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _unquoted(text: str) -> str | None:
    try:
        return msgspec.json.decode(text, type=str)
    except (msgspec.MsgspecError, UnicodeError):
        return None


def _first(found: tuple[int, str]) -> tuple[int, int]:
    """Orders marks by their place, and the longest first."""
    return found[0], -len(found[1])

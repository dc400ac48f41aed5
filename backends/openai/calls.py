"""Calls of tools in answers of other programs, as OpenAI's dialect has them: whole, numbered, each with its own id.

Servers leave ids or numbers out, give all calls the number 0, or write arguments as an object. Pure but for memory and
the ids that are drawn. Source: OpenAI API reference, "The chat completion chunk object".
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import msgspec

_PREFIX = "call_"


def drawn_id() -> str:
    """An id that no other call has."""
    return _PREFIX + secrets.token_hex(12)


def call_ids_in(body: Mapping[str, Any] | None) -> frozenset[str]:
    """The ids of the calls in the conversation of a chat's `body`."""
    messages = _objects_in([(body or {}).get("messages")])
    calls = _objects_in(message.get("tool_calls") for message in messages)
    return frozenset(name for call in calls if isinstance(name := call.get("id"), str))


def _objects_in(lists: Iterable[Any]) -> Iterator[Mapping[str, Any]]:
    return (
        each for each_list in lists if isinstance(each_list, list) for each in each_list if isinstance(each, Mapping)
    )


class _Call(msgspec.Struct):
    """What is known of a call so far; `given_id` is the server's own."""

    number: int
    given_id: str
    name: str
    is_closed: bool = False
    """Do its arguments end as an object does?"""


class CallPieces:
    """The calls of one choice. `taken` are ids that the conversation has already; `draw` makes ids."""

    def __init__(self, taken: Iterable[str] = (), *, draw: Callable[[], str] = drawn_id) -> None:
        self._taken, self._draw = set(taken), draw
        self._count = 0
        self._newest: _Call | None = None
        self._by_index: dict[int, _Call] = {}
        self._by_id: dict[tuple[int | None, str], _Call] = {}

    def __repr__(self) -> str:
        return f"<CallPieces: {self._count}>"

    def read(self, pieces: Any) -> list[dict[str, Any]]:
        """Pieces of calls as their server wrote them, strictly written.

        Another id, or a name without an index, begins a new call; so does a name behind a call that is over. Raises
        TypeError, ValueError or AttributeError at nonsense.
        """
        # TGI's and others' single call is no list
        return [] if pieces is None else list(self._read([pieces] if isinstance(pieces, dict) else pieces))

    def _read(self, pieces: Iterable[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        for piece in pieces:
            if piece is None:
                continue
            function = piece.get("function") or {}
            index, given_id, name = piece.get("index"), str(piece.get("id") or ""), str(function.get("name") or "")
            if index is not None:
                index = int(index)
            arguments = _text_of(function.get("arguments"))
            call = self._of(index, given_id, name, arguments)
            if call is None:
                call = self._begin(index, given_id, name)
                first = {"name": name, "arguments": arguments}
                yield {"index": call.number, "id": self._own_id(given_id), "type": "function", "function": first}
            else:
                added: dict[str, Any] = {"arguments": arguments}
                if name and not call.name:
                    call.name = added["name"] = name
                yield {"index": call.number, "function": added}
            if ending := arguments.rstrip():
                call.is_closed = ending.endswith("}")

    def _of(self, index: int | None, given_id: str, name: str, arguments: str) -> _Call | None:
        """The call that a piece goes on with; None if it begins one."""
        call = self._by_id.get((index, given_id)) if given_id else None
        if call is None:
            call = self._newest if index is None else self._by_index.get(index)
            if call is None:
                return None
            is_other = bool(given_id and call.given_id)
            # vLLM before 0.8 drew another id for each piece
            if is_other and (name or not arguments):
                return None
            if index is None and name and not given_id and call.name:
                return None
            if given_id and not call.given_id and name and call.name:
                return None
        if name and call.name and (name != call.name or (call.is_closed and arguments.lstrip().startswith("{"))):
            return None
        return call

    def _begin(self, index: int | None, given_id: str, name: str) -> _Call:
        call = _Call(self._count, given_id, name)
        self._count += 1
        self._newest = call
        if index is not None:
            self._by_index[index] = call
        if given_id:
            self._by_id[index, given_id] = call
        return call

    def _own_id(self, given_id: str) -> str:
        own = given_id
        while not own or own in self._taken:
            own = self._draw()
        self._taken.add(own)
        return own


def _text_of(arguments: Any) -> str:
    """Arguments as JSON text, whether the server wrote them as a text or as an object."""
    if arguments is None:
        return ""
    return arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()

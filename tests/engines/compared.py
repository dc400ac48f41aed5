"""The same request sent to an engine directly and through a router, and the two answers compared field by field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import aiohttp

from tests.engines.routed import KEY

JSON = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
OF_HTTP = frozenset({"connection", "content-length", "date", "server", "transfer-encoding", "vary"})
"""Headers that each server writes about its own connection."""


class Difference(NamedTuple):
    """A field that may differ or be missing in one of the answers, and the reason.

    `where` is the endpoint's path, or `*`; `field` a path into the JSON: `[]` is any member of a list, `.*` whatever is
    below.
    """

    where: str
    field: str
    reason: str

    def covers(self, path: str, field: str) -> bool:
        """Is it about this field of an answer of `path`?"""
        below = self.field.endswith(".*")
        named = field.startswith(self.field[:-1]) or field == self.field[:-2] if below else field == self.field
        return named and self.where in ("*", path)


@dataclass(frozen=True)
class Reply:
    """The received answer: the events of a stream, or one body."""

    status: int
    headers: Mapping[str, str]
    events: Sequence[tuple[str, Any]] = ()
    body: Any = None

    def fields(self) -> dict[str, Any]:
        """Path -> value, of every leaf. Of a stream: what its pieces add up to, and the events without them. Where a
        stream is cut into pieces is a matter of time.
        """
        if not self.events:
            return dict(_leaves(self.body, ""))
        texts, kinds = _taken_apart(self.events)
        content: dict[str, Any] = dict(_leaves(texts, "pieces"))
        for at, (name, body) in enumerate(kinds):
            content[f"events[{at}]"] = name
            content.update(_leaves(body, f"events[{at}]"))
        return content


async def ask(http: aiohttp.ClientSession, url: str, path: str, body: Any, **headers: str) -> Reply:
    """The reply of `url` to a POST of `body` to `path`; to a GET where it is None."""
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    method, data = ("GET", None) if body is None else ("POST", sent)
    async with http.request(method, url + path, data=data, headers={**JSON, **headers}) as reply:
        raw = await reply.read()
        lowered = {name.lower(): value for name, value in reply.headers.items()}
        if reply.content_type == "text/event-stream":
            return Reply(reply.status, lowered, events=[*_events(raw)])
        return Reply(reply.status, lowered, body=json.loads(raw))


def differences(path: str, direct: Reply, routed: Reply, allowed: Sequence[Difference]) -> list[str]:
    """Every difference that is not allowed, as a sentence."""
    found = []
    if direct.status != routed.status:
        found.append(f"status: {direct.status} directly, {routed.status} through the router")
    ours, theirs = routed.fields(), direct.fields()
    for field in sorted(ours.keys() | theirs.keys()):
        theirs_value, other = theirs.get(field, "(absent)"), ours.get(field, "(absent)")
        same = theirs_value == other or (
            _is_number(theirs_value) and _is_number(other) and abs(theirs_value - other) < 1e-3
        )
        general = re.sub(r"\[\d+\]", "[]", field).removeprefix("events[].")
        if not same and not any(each.covers(path, general) for each in allowed):
            found.append(f"{field}: {theirs_value!r} directly, {other!r} through the router")
    return found


def header_differences(direct: Reply, routed: Reply) -> dict[str, tuple[str | None, str | None]]:
    """Headers that differ -> (directly, through the router), but for those of the connection."""
    names = (direct.headers.keys() | routed.headers.keys()) - OF_HTTP
    pairs = {name: (direct.headers.get(name), routed.headers.get(name)) for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _is_number(value: Any) -> bool:
    return isinstance(value, float | int) and not isinstance(value, bool)


def _events(raw: bytes) -> Iterator[tuple[str, Any]]:
    for block in raw.decode().split("\n\n"):
        name, data = "", []
        for line in block.splitlines():
            if line.startswith("event:"):
                name = line.removeprefix("event:").strip()
            elif line.startswith("data:"):
                data.append(line.removeprefix("data:").strip())
        if data:
            text = "\n".join(data)
            yield name, text if text == "[DONE]" else json.loads(text)


def _leaves(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        if not value:
            yield at, "{}"
        for name, member in value.items():
            yield from _leaves(member, f"{at}.{name}" if at else name)
    elif isinstance(value, list):
        yield at + ".length", len(value)
        for number, member in enumerate(value):
            yield from _leaves(member, f"{at}[{number}]")
    else:
        yield at, value


_PIECES = frozenset({"text", "content", "arguments", "delta", "partial_json", "thinking", "token_ids", "logprobs"})
"""Members of an event that say a piece of what grows."""


def _taken_apart(events: Sequence[tuple[str, Any]]) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    """The sum of the pieces of all events, by choice and member, and the events without them: the chunks of one
    choice as one, other events none twice in a row. Chunks of several choices come in any order.
    """
    grown: dict[str, Any] = {}
    kinds: list[tuple[str, Any]] = []
    choice = None
    for name, body in sorted(events, key=lambda event: _choice_of(event[1])):
        rest = _without_pieces(body, f"{_choice_of(body)}", grown, is_piece=_is_piece(body))
        same = isinstance(body, dict) and body.get("choices") and _choice_of(body) == choice
        choice = _choice_of(body) if isinstance(body, dict) and body.get("choices") else None
        if same:
            kinds[-1] = (name, _merged(kinds[-1][1], rest))
        elif not kinds or kinds[-1] != (name, rest):
            kinds.append((name, rest))
    return grown, kinds


def _merged(left: Any, right: Any) -> Any:
    """Both events as one: all members, with the later value where it is not null or empty."""
    if isinstance(left, dict) and isinstance(right, dict):
        return {name: _merged(left.get(name), right.get(name)) for name in {**left, **right}}
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        return [_merged(*pair) for pair in zip(left, right, strict=True)]
    return left if right in (None, "") else right


def _choice_of(event: Any) -> int:
    """The choice of a chunk; those without one come last, and events that have none stay where they are."""
    if not isinstance(event, dict) or "choices" not in event:
        return 1 << 20 if event == "[DONE]" else 0
    return int(event["choices"][0]["index"]) if event["choices"] else 1 << 19


def _is_piece(event: Any) -> bool:
    kind = event.get("type", "") if isinstance(event, dict) else ""
    return isinstance(event, dict) and ("choices" in event or (kind.endswith("delta") and kind != "message_delta"))


def _without_pieces(event: Any, at: str, grown: dict[str, Any], *, is_piece: bool) -> Any:
    if isinstance(event, list):
        return [_without_pieces(item, at, grown, is_piece=is_piece) for item in event]
    if not isinstance(event, dict):
        return event
    rest: dict[str, Any] = {}
    for name, value in event.items():
        if name == "sequence_number" or (name == "usage" and event.get("choices")):
            # numbers of events, and usage so far, depend on the cuts
            rest[name] = "(a number)" if value is not None else None
        elif is_piece and name in _PIECES and isinstance(value, str | list) and value:
            grown[f"{at}.{name}"] = _more(grown.get(f"{at}.{name}"), value)
            rest[name] = "(a piece)"
        elif is_piece and name == "logprobs" and isinstance(value, dict):
            for column, members in value.items():
                if isinstance(members, list):
                    grown[f"{at}.{name}.{column}"] = _more(grown.get(f"{at}.{name}.{column}"), members)
            rest[name] = "(a piece)"
        else:
            rest[name] = _without_pieces(value, f"{at}.{name}", grown, is_piece=is_piece)
    return rest


def _more(so_far: Any, piece: Any) -> Any:
    return piece if so_far is None else so_far + piece

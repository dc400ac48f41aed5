"""The tenant that asks for files and batches, and the parts of its requests and replies that all calls share."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import parse_qsl

import msgspec

from http1.errors import ClientGone
from http1.request import Reply, Request, Response
from policies.errors import InvalidRequest, NoBatches
from policies.quantities import digits
from policies.sla.config import Config
from router.batches.batches import Batches
from router.batches.pace import Pace
from router.call.caller import CallerGone
from router.call.identify import Granted, Identities, granted_to, key_in
from router.protocols.dialect import converted, decode
from router.protocols.http.body import read_body
from router.protocols.strangers import address_of

T = TypeVar("T")

_JSON = {"Content-Type": "application/json"}
_PIECE_BYTES = 256 << 10


class Desk:
    """What the calls of one router work with. `batches` are None where the SLA file has no place for them."""

    def __init__(self, identities: Identities, in_force: Callable[[], Config], batches: Batches | None) -> None:
        self._identities, self.in_force, self._batches = identities, in_force, batches

    def __repr__(self) -> str:
        return f"<Desk of {self._batches!r}>"

    async def asker(self, http: Request) -> Granted:
        """Which tenant asks. Raises as `Identities.identified` does."""
        key, config = key_in(http.headers), self.in_force()
        address = address_of(http, config.server.trusted_proxies)
        identity = await self._identities.identified(key, config, address)
        http.is_known = True
        return granted_to(identity, key)

    @property
    def batches(self) -> Batches:
        """Those of this router. Raises NoBatches."""
        if self._batches is None:
            raise NoBatches("this router takes no files and batches", hint=NoBatches.usual_hint)
        return self._batches

    def origin(self, http: Request) -> str:
        """Scheme and host as the client of `http` named them; empty if it named none."""
        host, said = http.headers.get("host", ""), http.headers.get("x-forwarded-proto", "")
        scheme = "https" if said == "https" or "http" in self.in_force().server.tls else "http"
        return f"{scheme}://{host}" if host else ""

    async def body(self, http: Request, kind: type[T], hints: Mapping[str, str]) -> T:
        """The JSON body of `http`. Raises InvalidRequest, RequestTooLarge, CallerGone."""
        raw = await read_body(http, self.in_force().server.max_body_bytes)
        return converted(decode(raw), kind, hints=hints, elsewhere="docs/batches.md lists the fields")


class ListPage(NamedTuple):
    """A part of a list, and whether more follow it."""

    ids: Sequence[str]
    has_more: bool


def query_of(http: Request) -> dict[str, str]:
    """The last value of each name in the query."""
    return dict(parse_qsl(http.query, keep_blank_values=True))


def limit_of(query: Mapping[str, str], *, usual: int, most: int) -> int:
    """The number of entries of a page. Raises InvalidRequest."""
    limit = digits(query.get("limit", str(usual)), most=most)
    if not limit:
        raise InvalidRequest(f"limit must be from 1 to {most:,}", hint=f"leave it out for {usual:,}", param="limit")
    return limit


def page_after(ids: Sequence[str], after: str | None, limit: int, *, param: str) -> ListPage:
    """Those of `ids` behind `after`. Raises InvalidRequest if it is none of them."""
    begin = 0
    if after:
        if after not in ids:
            raise InvalidRequest(f"there is no '{after[:80]}' in this list", hint="send an id of the list", param=param)
        begin = ids.index(after) + 1
    return ListPage(ids[begin : begin + limit], begin + limit < len(ids))


def read_each(ids: Iterable[str], read: Callable[[str], T | None]) -> Generator[int, None, list[T]]:
    """What `read` finds for each of `ids`, one by one: for `Pace.listed`."""
    found = list[T]()
    for each in ids:
        if (entry := read(each)) is not None:
            found.append(entry)
        yield 1
    return found


def json_reply(body: Any) -> Response:
    """`body` as JSON."""
    return Response(200, msgspec.json.encode(body), _JSON)


async def send_file(http: Request, path: Path, pace: Pace, content_type: str) -> Reply:
    """The file at `path`, piece by piece. Raises CallerGone."""
    size = (await pace.run(path.stat)).st_size
    headers = {"Content-Type": content_type}
    file = await pace.run(path.open, "rb")
    try:
        if size <= _PIECE_BYTES:
            return Response(200, await pace.run(file.read), headers)
        stream = http.start(200, headers)
        while piece := await pace.run(file.read, _PIECE_BYTES):
            await stream.write(piece)
        await stream.end()
    except ClientGone as error:
        raise CallerGone from error
    finally:
        file.close()
    return stream

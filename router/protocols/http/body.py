"""Reads the body of a request: decoded, with limits on its length, its memory and the wait for it."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from http1.coding import CODINGS, BadCoding, decoded
from http1.errors import BodyTimeout, BodyTooLarge, ClientGone, HttpError
from http1.request import Request
from policies.errors import InvalidRequest, RequestTooLarge
from router.call.bodies import INLINE_BYTES, SMALL_BYTES, Held
from router.call.caller import CallerGone
from router.text.turns import at_once, once

T = TypeVar("T")

_TOO_LARGE = "shorten the prompt, or raise server.max_body"

_MOST_RATIO = 1032
"""Bytes that one byte of gzip or deflate stands for at most (zlib's technical details)."""


class ReadBody(Protocol):
    """Reads the JSON body of a request."""

    async def __call__(self, http: Request, held: Held, parse: Callable[[dict[str, Any]], T]) -> T:
        """What `parse` makes of the object. Raises as read_body and `parse` do."""
        ...


async def read_body(http: Request, most_bytes: int, held: Held | None = None, *, too_large: str = _TOO_LARGE) -> bytes:
    """The body of `http` of at most `most_bytes`, without a byte order mark (RFC 8259, section 8.1), once there is
    memory for it: one that is `held`, unless the body has to be small.

    `too_large` is the hint for a larger one. Raises RequestTooLarge as soon as the limit is passed, InvalidRequest,
    Overloaded, CallerGone.
    """
    fields = http.headers.lowered
    if "content-encoding" not in fields and (small := http.arrived(min(SMALL_BYTES, most_bytes))) is not None:
        # as nearly every body
        return small.removeprefix(codecs.BOM_UTF8)
    encoding = fields.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in CODINGS:
        hint = f"send it as {', '.join(CODINGS)}"
        raise InvalidRequest(f"the content encoding '{encoding[:40]}' is not supported", hint=hint)
    try:
        pieces = await _arrived(http, most_bytes, held, is_coded=encoding != "identity")
        if encoding == "identity" and (held is None or sum(map(len, pieces)) <= INLINE_BYTES):
            return b"".join(pieces).removeprefix(codecs.BOM_UTF8)
        work = once(lambda: _whole(pieces, encoding, most_bytes))
        return at_once(work) if held is None else await held.run(work)
    except BodyTooLarge as error:
        raise RequestTooLarge(f"the body is larger than {most_bytes} bytes", hint=too_large) from error
    except BodyTimeout as error:
        hint = "send as many bytes as Content-Length or Transfer-Encoding announces"
        raise InvalidRequest(f"the body did not arrive: {error.reason}", hint=hint) from error
    except (HttpError, BadCoding) as error:
        raise InvalidRequest("the body cannot be read", hint="check its encoding headers") from error
    except ClientGone as error:
        raise CallerGone from error


async def read_small_body(http: Request) -> bytes:
    """The body of a call to the admin port. Raises as `read_body` does."""
    return await read_body(http, SMALL_BYTES, too_large="no call to this port needs more")


async def _arrived(http: Request, most_bytes: int, held: Held | None, *, is_coded: bool) -> list[bytes]:
    """The body as it was sent. Waits for the memory of all of it at once, and before it reads a large one.

    It stays in pieces, because to join a large one would keep other requests waiting. Only small ones are joined here.
    """
    announced, size, pieces = http.content_length or 0, 0, list[bytes]()
    if announced > most_bytes:
        raise BodyTooLarge(most_bytes)
    has_room = held is None
    if held is not None and announced > SMALL_BYTES:
        has_room = True
        await held.arrive(announced + _decoded_bytes(announced, most_bytes, is_coded=is_coded))
        # there is memory for all of it: its client need not pause until a part was taken
        http.unread_bytes = max(http.unread_bytes, 2 * announced)
    async for data in http.content():
        if pieces and len(pieces[-1]) < SMALL_BYTES:
            pieces[-1] += data
        else:
            pieces.append(data)
        size += len(data)
        if size > most_bytes:
            raise BodyTooLarge(most_bytes)
        if held is not None and not has_room and size > SMALL_BYTES:
            has_room = True
            await held.arrive(most_bytes + _decoded_bytes(most_bytes, most_bytes, is_coded=is_coded))
    if held is not None and not has_room and is_coded:
        await held.arrive(_decoded_bytes(size, most_bytes, is_coded=True))
    return pieces


def _whole(pieces: list[bytes], encoding: str, most_bytes: int) -> bytes:
    """The body that was sent in `pieces`, which are dropped. Raises as `decoded` does."""
    # this lets other threads run
    raw = b"".join(pieces)
    pieces.clear()
    return decoded(raw, encoding, most_bytes).removeprefix(codecs.BOM_UTF8)


def _decoded_bytes(coded: int, most_bytes: int, *, is_coded: bool) -> int:
    return min(most_bytes, _MOST_RATIO * coded) if is_coded else 0

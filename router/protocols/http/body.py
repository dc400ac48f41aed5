"""Reads the body of a request: decoded, with limits on its length, its memory and the wait for it."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from http1.coding import CODINGS, BadCoding, decoded
from http1.errors import BadRequest, BodyTimeout, BodyTooLarge, ClientGone
from http1.request import Request
from policies.errors import InvalidRequest, RequestTooLarge
from router.call.bodies import SMALL_BYTES, Held
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
    encoding = http.headers.lowered.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in CODINGS:
        hint = f"send it as {', '.join(CODINGS)}"
        raise InvalidRequest(f"the content encoding '{encoding[:40]}' is not supported", hint=hint)
    try:
        raw = await _arrived(http, most_bytes, held, is_coded=encoding != "identity")
        if encoding != "identity":
            work = once(lambda: decoded(raw, encoding, most_bytes))
            body = at_once(work) if held is None else await held.run(work)
        else:
            body = raw
    except BodyTooLarge as error:
        raise RequestTooLarge(f"the body is larger than {most_bytes} bytes", hint=too_large) from error
    except BodyTimeout as error:
        hint = "send as many bytes as Content-Length or Transfer-Encoding announces"
        raise InvalidRequest(f"the body did not arrive: {error.reason}", hint=hint) from error
    except (BadRequest, BadCoding) as error:
        raise InvalidRequest("the body cannot be read", hint="check its encoding headers") from error
    except ClientGone as error:
        raise CallerGone from error
    return body.removeprefix(codecs.BOM_UTF8)


async def read_small_body(http: Request) -> bytes:
    """The body of a call to the admin port. Raises as `read_body` does."""
    return await read_body(http, SMALL_BYTES, too_large="no call to this port needs more")


async def _arrived(http: Request, most_bytes: int, held: Held | None, *, is_coded: bool) -> bytes:
    """The body as it was sent. Waits for the memory of all of it at once, and before it reads a large one."""
    announced, body = http.content_length or 0, bytearray()
    if announced > most_bytes:
        raise BodyTooLarge(most_bytes)
    has_room = held is None
    if held is not None and announced > SMALL_BYTES:
        has_room = True
        await held.arrive(announced + _decoded_bytes(announced, most_bytes, is_coded=is_coded))
    async for data in http.content():
        body += data
        if len(body) > most_bytes:
            raise BodyTooLarge(most_bytes)
        if held is not None and not has_room and len(body) > SMALL_BYTES:
            has_room = True
            await held.arrive(most_bytes + _decoded_bytes(most_bytes, most_bytes, is_coded=is_coded))
    if held is not None and not has_room and is_coded:
        await held.arrive(_decoded_bytes(len(body), most_bytes, is_coded=True))
    return bytes(body)


def _decoded_bytes(coded: int, most_bytes: int, *, is_coded: bool) -> int:
    return min(most_bytes, _MOST_RATIO * coded) if is_coded else 0

"""The bytes of a request's body: decoded, no more than allowed, and not waited for without end."""

from __future__ import annotations

import asyncio
import codecs

from aiohttp import web
from aiohttp.compression_utils import HAS_BROTLI, HAS_ZSTD
from aiohttp.http_exceptions import HttpProcessingError

from policies.errors import InvalidRequest, RequestTooLarge
from router.call.caller import CallerGone
from router.call.gateway import Gateway

_ENCODINGS = ("identity", "gzip", "deflate", *("br",) * HAS_BROTLI, *("zstd",) * HAS_ZSTD)
"""Of the last two aiohttp reads what is installed."""

BODY_SILENCE_S = 60.0
"""A client that sends nothing of its body for so long has gone, or has sent what is no HTTP."""


async def read_body(http: web.Request, gateway: Gateway, *, silence_s: float = BODY_SILENCE_S) -> bytes:
    """The body of `http`, without a byte order mark (RFC 8259, section 8.1).

    Raises RequestTooLarge, InvalidRequest, CallerGone.
    """
    encoding = http.headers.get("Content-Encoding", "").strip().lower() or "identity"
    if encoding not in _ENCODINGS:
        # what is not decoded would be read as it is
        hint = f"send it as {', '.join(_ENCODINGS)}"
        raise InvalidRequest(f"a body encoded as '{encoding[:40]}' is not read here", hint=hint)
    try:
        raw = await _read(http, gateway.config.server.max_body_bytes, silence_s)
        return raw.removeprefix(codecs.BOM_UTF8)
    except TimeoutError as error:
        hint = "send all that Content-Length or Transfer-Encoding says"
        raise InvalidRequest(f"the body did not come: nothing of it for {silence_s:g} s", hint=hint) from error
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise InvalidRequest("the body cannot be read", hint="check its encoding headers") from error
    except ConnectionError as error:
        raise CallerGone from error


async def _read(http: web.Request, most_bytes: int, silence_s: float) -> bytes:
    """The body of `http`. Raises RequestTooLarge as soon as it is known to be, TimeoutError."""
    body, now = bytearray(), asyncio.get_running_loop().time
    hint = "shorten the prompt, or raise server.max_body"
    too_large = RequestTooLarge(f"the body is larger than {most_bytes} bytes", hint=hint)
    if (http.content_length or 0) > most_bytes:
        raise too_large
    async with asyncio.timeout(silence_s) as limit:
        while data := await http.content.readany():
            body += data
            if len(body) > most_bytes:
                raise too_large
            limit.reschedule(now() + silence_s)
    return bytes(body)

"""Reads the body of a request: decoded, with limits on its length and on the wait for it."""

from __future__ import annotations

import codecs

from http1.coding import CODINGS, BadCoding, decoded
from http1.errors import BadRequest, BodyTimeout, BodyTooLarge, ClientGone
from http1.request import Request
from policies.errors import InvalidRequest, RequestTooLarge
from router.call.caller import CallerGone
from router.call.gateway import Gateway


async def read_body(http: Request, gateway: Gateway) -> bytes:
    """The body of `http`, without a byte order mark (RFC 8259, section 8.1).

    Raises RequestTooLarge as soon as the limit is passed, InvalidRequest, CallerGone.
    """
    encoding = http.headers.lowered.get("content-encoding", "").strip().lower() or "identity"
    if encoding not in CODINGS:
        hint = f"send it as {', '.join(CODINGS)}"
        raise InvalidRequest(f"the content encoding '{encoding[:40]}' is not supported", hint=hint)
    most_bytes = gateway.config.server.max_body_bytes
    try:
        raw = await http.body(most_bytes)
        if encoding != "identity":
            raw = decoded(raw, encoding, most_bytes)
    except BodyTooLarge as error:
        hint = "shorten the prompt, or raise server.max_body"
        raise RequestTooLarge(f"the body is larger than {most_bytes} bytes", hint=hint) from error
    except BodyTimeout as error:
        hint = "send as many bytes as Content-Length or Transfer-Encoding announces"
        raise InvalidRequest(f"the body did not arrive: {error.reason}", hint=hint) from error
    except (BadRequest, BadCoding) as error:
        raise InvalidRequest("the body cannot be read", hint="check its encoding headers") from error
    except ClientGone as error:
        raise CallerGone from error
    return raw.removeprefix(codecs.BOM_UTF8)

"""Fetches the keys of an issuer: from a file, from a URL, or from where its discovery document says.

Source: OpenID Connect Discovery 1.0, section 4; RFC 7517, section 5.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import msgspec

from backends.nesting import decode_json
from policies.identity import Issuer
from router.regular_file import read_regular
from tls.certificates import Certificates
from tls.errors import sentence_of

FETCH_S = 5.0
"""How long each of the two requests may take."""

MOST_BYTES = 1 << 20
"""Of a document."""

_WELL_KNOWN = "/.well-known/openid-configuration"


class KeySource:
    """Where the keys of `issuer` are. `tls` is for its connections; None: the system's authorities."""

    def __init__(self, issuer: Issuer, tls: Certificates | None = None) -> None:
        self._issuer, self._tls = issuer, tls

    def __repr__(self) -> str:
        return f"<KeySource of {self._issuer.name}>"

    async def fetch(self) -> bytes:
        """The JWKS document. Raises ValueError with a sentence that follows the issuer's name."""
        place = self._issuer.jwks
        if place is not None and "://" not in place:
            return await asyncio.to_thread(read_file, place)
        timeout = aiohttp.ClientTimeout(total=FETCH_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            return await self._get(session, place or await self._discovered(session))

    async def _discovered(self, session: aiohttp.ClientSession) -> str:
        """The URL of its keys, from its discovery document."""
        issuer = self._issuer.url
        raw = await self._get(session, issuer.rstrip("/") + _WELL_KNOWN)
        try:
            document: Any = decode_json(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ValueError("its discovery document is not JSON") from error
        if not isinstance(document, Mapping) or document.get("issuer") != issuer:
            # section 4.3: otherwise one issuer could pose as another
            raise ValueError("its discovery document names another issuer (write `issuer` exactly as it does)")
        place = document.get("jwks_uri")
        if not isinstance(place, str) or not is_safe(place):
            raise ValueError("its discovery document has no jwks_uri with https")
        return place

    async def _get(self, session: aiohttp.ClientSession, url: str) -> bytes:
        context = True if self._tls is None else self._tls.live()
        try:
            async with session.get(url, ssl=context, allow_redirects=False) as reply:
                if reply.status != 200:
                    raise ValueError(f"{_shown(url)} answered with status {reply.status}")
                body = bytearray()
                async for piece in reply.content.iter_any():
                    body += piece
                    if len(body) > MOST_BYTES:
                        raise ValueError(f"{_shown(url)} answered with more than {MOST_BYTES >> 20} MiB")
                return bytes(body)
        except TimeoutError as error:
            raise ValueError(f"{_shown(url)} did not answer within {FETCH_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            _raise_unreached(url, error)


def is_safe(url: str) -> bool:
    """Whether keys may be fetched from there: over https, or from this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.port == 0:
            return False
    except ValueError:
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(host)))


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def read_file(place: str) -> bytes:
    """The JWKS document in the file at `place`. Raises ValueError with a sentence that follows the issuer's name."""
    try:
        return read_regular(Path(place), MOST_BYTES)
    except OSError as error:
        raise ValueError(f"its file of keys cannot be read: {place}: {error.strerror or error}") from error


def _raise_unreached(url: str, error: Exception) -> NoReturn:
    cause = error.__cause__ if isinstance(error.__cause__, OSError) else error
    # other errors of aiohttp repeat the whole URL, and bytes of the answer
    why = sentence_of(cause) if isinstance(cause, OSError) else "its answer is no HTTP, or breaks off"
    raise ValueError(f"{_shown(url)} cannot be reached: {why}") from error


def _shown(url: str) -> str:
    """`url` without what may be secret in it."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{'' if parts.port is None else f':{parts.port}'}{parts.path}"

"""A router's admin port, as commands call it."""

from __future__ import annotations

import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Mapping
from types import MappingProxyType

import msgspec

from backends.nesting import decode_json
from policies.errors import BackendFailed, Conflict, ExpectedError, InvalidRequest
from router.direct import client_context, direct_opener, with_scheme
from tls.errors import why_unanswered
from tls.settings import TlsSettings

KEY_VARIABLE = "POINTSMAN_ADMIN_KEY"
"""The environment variable that has an admin key."""

USUAL_ADDRESS = "127.0.0.1:8082"

_TIMEOUT_S = 5.0
_WHERE = "`pointsman up` and `serve` print the dashboard's address when they start; pass that address as --admin"
_NONE: Mapping[str, str] = MappingProxyType({})


class AdminPort:
    """The admin port at `address`, a URL or host:port. `key` opens it; `tls` is for https:// URLs."""

    def __init__(self, address: str, key: str | None, tls: TlsSettings | None = None) -> None:
        self.url, self._key = with_scheme(address, tls).rstrip("/").removesuffix("/dashboard"), key
        self._context = client_context(tls)

    def __repr__(self) -> str:
        return f"<AdminPort {self.url}>"

    @classmethod
    def from_environment(cls, address: str, tls: TlsSettings | None = None) -> AdminPort:
        """The port at `address`, with the key of KEY_VARIABLE."""
        return cls(address, os.environ.get(KEY_VARIABLE), tls)

    def call(
        self,
        path: str,
        method: str = "GET",
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] = _NONE,
        timeout_s: float = _TIMEOUT_S,
    ) -> bytes:
        """The body of the answer. Raises ExpectedError: what the router objects to, or why there is no answer."""
        request = urllib.request.Request(  # noqa: S310 - http(s) only
            f"{self.url}{path}", data=body, headers=dict(headers), method=method
        )
        if self._key:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with direct_opener(self._context).open(request, timeout=timeout_s) as reply:
                answer: bytes = reply.read()
                return answer
        except urllib.error.HTTPError as error:
            with error:
                raise self._refusal(error.code, error.read()) from error
        except (OSError, http.client.HTTPException) as error:
            raise self.no_reply(error) from error

    def no_reply(self, error: Exception) -> BackendFailed:
        """The error for an answer that did not come, or is none."""
        reason, hint = why_unanswered(self.url, error)
        return BackendFailed(f"no reply from {self.url}: {reason}", hint=hint or _WHERE)

    def _refusal(self, status: int, body: bytes) -> ExpectedError:
        reason = _reason(body)
        if status in (401, 403):
            return InvalidRequest(
                reason or "the router answers with an error", hint=f"keys are read from ${KEY_VARIABLE}"
            )
        if reason is None or status in (404, 405):
            return BackendFailed(f"{self.url} is not an admin port", hint=_WHERE)
        return Conflict(reason) if status == 409 else InvalidRequest(reason)


def _reason(body: bytes) -> str | None:
    try:
        return str(decode_json(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return None

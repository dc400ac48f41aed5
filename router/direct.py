"""Requests of commands that go to the named address and nowhere else, since they carry keys; and their TLS."""

from __future__ import annotations

import ssl
import urllib.request

from policies.errors import InvalidRequest
from tls.certificates import Certificates
from tls.errors import TlsError
from tls.settings import HTTP_ALPN, TlsSettings


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would send the Authorization header along, to any host."""

    def redirect_request(self, *_: object) -> None:
        """Never: the answer is the error."""


def direct_opener(context: ssl.SSLContext | None = None) -> urllib.request.OpenerDirector:
    """An opener that follows neither redirects nor the proxies of `http_proxy`, `https_proxy` and `all_proxy`.

    `context` is for https; None: the system's authorities.
    """
    return urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context), _NoRedirects()
    )


def client_context(settings: TlsSettings | None) -> ssl.SSLContext:
    """The context of a command with the files that its options name. Raises InvalidRequest if they cannot be used."""
    try:
        certificates = Certificates(settings or TlsSettings(), is_server=False, what="this command", alpn=HTTP_ALPN)
        return certificates.context()
    except TlsError as error:
        raise InvalidRequest(error.message, hint=error.hint) from error


def with_scheme(address: str, tls: TlsSettings | None) -> str:
    """`address` as a URL: host:port alone is https if files for TLS are named."""
    return address if "://" in address else f"{'https' if tls and tls != TlsSettings() else 'http'}://{address}"

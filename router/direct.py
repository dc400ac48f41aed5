"""Requests of commands that go to the named address and nowhere else: they carry keys."""

from __future__ import annotations

import ssl
import urllib.request


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

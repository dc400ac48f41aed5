"""What clients are told of backends: neither where they run, nor what they say of themselves. Pure."""

from __future__ import annotations

import hashlib
import re

from policies.errors import BackendFailed, ExpectedError, Overloaded
from policies.health import Trouble

_HIDDEN = "..."
_MOST_REASON = 120

_PLACES = re.compile(
    r"""
    \b[a-z][a-z0-9+.-]*://[^\s'"<>)\]}]+                          # a URL
    | \b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b                        # IPv4
    | \[(?=[^\]]*:[^\]]*:)[0-9a-f:.]+\](?::\d+)?                  # IPv6
    | \b(?:localhost|[a-z0-9-]+(?:\.[a-z0-9-]+)+):\d{2,5}\b       # a host and its port
    | (?<![\w/.:])/(?!v\d+/)[\w.@+-]+(?:/[\w.@+-]+)+              # a file, but no endpoint of an API
    | \b[a-z]:\\[^\s'"]+                                          # a file of Windows
    """,
    re.VERBOSE | re.IGNORECASE,
)


def public_message_of(error: ExpectedError) -> str:
    """What a client is told of `error`, with which a backend ended its request.

    What a backend says of the request is passed on without places; what it says of itself is not.
    """
    if isinstance(error, BackendFailed):
        return error.public_message
    if isinstance(error, Overloaded):
        return "the backend is busy (try again in a moment)"
    return without_places(error.public_message)


def without_places(text: str) -> str:
    """`text` without addresses, URLs and files of more than one part."""
    return _PLACES.sub(_HIDDEN, text)


def public_trouble(backend: str, trouble: Trouble) -> str:
    """Why `backend` gets no requests, and for how long, for clients.

    If it was never reached, what failed is told too, but not the details, which come from libraries and servers.
    """
    for_s = f"for {trouble.since_s:.0f} s"
    if trouble.was_well:
        return f"ill {for_s}"
    what, _, _ = trouble.reason.replace(backend, "it").partition(": ")
    return f"never reached {for_s} ({without_places(what)[:_MOST_REASON]})"


def shown_name(backend: str) -> str:
    """The name of `backend` for clients: of one that was found at an address, a hash of that stands in its place.

    The hash is short: it tells backends apart, and many addresses have the same. A data-parallel rank stays.
    """
    pool, at, address = backend.partition("@")
    if not at:
        return backend
    server, slash, rank = address.rpartition("/")
    if not (slash and rank.isascii() and rank.isdigit()):
        server, slash, rank = address, "", ""
    return f"{pool}{at}{hashlib.blake2b(server.encode(), digest_size=2).hexdigest()}{slash}{rank}"

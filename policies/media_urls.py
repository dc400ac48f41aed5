"""URLs of images, sounds and files in requests: which of them engines may be sent. Pure.

Engines fetch such URLs from inside the operators' network (server-side request forgery, OWASP A10:2021). Names are not
resolved here, and redirections are not seen: engines should limit what they fetch too.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection
from urllib.parse import urlsplit

_ODD = re.compile(r"[\x00-\x20\x7f\\]")
"""Characters that parsers of URLs read in different ways."""

_OWN_NAMES = ("localhost", "localhost.localdomain", "metadata.google.internal")


def why_refused(url: str, hosts: Collection[str] | None) -> str | None:
    """Why `url` is not sent to an engine, as the end of a sentence that begins with the URL; None if it may be.

    `data:` URLs always may. `hosts` are the allowed ones (`*.example.com`: all below it); None: all but this machine's
    names and addresses, and link-local addresses, where clouds keep credentials.
    """
    scheme = url.partition(":")[0].lower()
    if scheme == "data":
        return None
    if scheme not in ("http", "https"):
        return f"has the scheme '{scheme[:20]}', and engines are sent http, https and data only"
    try:
        host = "" if _ODD.search(url) else (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        host = ""
    if not host:
        return "is no valid URL"
    if hosts is not None:
        return None if any(_matches(host, allowed) for allowed in hosts) else "is at no host of `server.media_hosts`"
    address = _address(host)
    if host in _OWN_NAMES or host.endswith(".localhost"):
        return "names this machine or its cloud's metadata"
    if address is None:
        return None
    is_inside = address.is_loopback or address.is_link_local or address.is_unspecified or address.is_multicast
    return "is an address of this machine or link-local" if is_inside else None


def _matches(host: str, allowed: str) -> bool:
    allowed = allowed.lower()
    return host.endswith(allowed[1:]) if allowed.startswith("*.") else host == allowed


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that `host` is, in any notation that libraries accept (127.1, 0x7f000001, 2130706433)."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return _ipv4_in_parts(host)
    return found.ipv4_mapped or found if isinstance(found, ipaddress.IPv6Address) else found


def _ipv4_in_parts(host: str) -> ipaddress.IPv4Address | None:
    """The address of one to four numbers, decimal, octal or hexadecimal, as inet_aton reads them (POSIX)."""
    numbers = []
    for part in host.split("."):
        digits, base = (part[2:], 16) if part[:2].lower() == "0x" else (part, 8 if part[:1] == "0" else 10)
        if not digits.isascii() or not digits.isalnum():
            return None
        try:
            numbers.append(int(digits, base))
        except ValueError:
            return None
    *bytes_, last = numbers
    left = 4 - len(bytes_)
    if len(numbers) > 4 or any(byte > 255 for byte in bytes_) or last >= 256**left:
        return None
    return ipaddress.IPv4Address(int.from_bytes(bytes(bytes_)) << 8 * left | last)

"""The host that a request names (RFC 9110, section 7.2; RFC 3986, section 3.2.2)."""

from __future__ import annotations

import ipaddress
import re

# a comma may be in a name, but joins two Host headers
_HOST = re.compile(
    r"(?:(?:[A-Za-z0-9._~!$&'()*+;=-]|%[0-9A-Fa-f]{2})*+|\[(?P<ipv6>[0-9A-Fa-f:.]{2,45})\])(?::0*(?P<port>[0-9]{0,5}))?"
)
_MOST_PORT = 65535


def is_host(text: str) -> bool:
    """Whether `text` may stand in Host: a name or an address, perhaps with a port, or nothing."""
    found = _HOST.fullmatch(text)
    if found is None:
        return False
    address, port = found["ipv6"], found["port"]
    if address is not None:
        try:
            ipaddress.IPv6Address(address)
        except ValueError:
            return False
    return not port or int(port) <= _MOST_PORT

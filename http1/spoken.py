"""What a peer speaks that does not speak HTTP/1.1, told by its first bytes: a parser only says where it stopped."""

from __future__ import annotations

_PROXIED = "the PROXY protocol comes before the request, and this port does not read it: switch it off there"

_SIGNS = (
    # https://www.haproxy.org/download/3.2/doc/proxy-protocol.txt, sections 2.1 and 2.2; empty lines were skipped
    (b"PROXY ", _PROXIED),
    (b"\x00\r\nQUIT\n", _PROXIED),
    # RFC 8446, 5.1
    (b"\x16\x03", "TLS was spoken to a port without: write http:// there, or give the port a certificate"),
    # RFC 9113, 3.4
    (b"PRI * HTTP/2.0", "HTTP/2 was spoken without TLS, and this port speaks HTTP/1.1"),
)


def other_protocol(begin: bytes) -> str | None:
    """What is wrong with a connection that begins with these bytes; None if they are no protocol that is known."""
    return next((sentence for sign, sentence in _SIGNS if begin.startswith(sign)), None)

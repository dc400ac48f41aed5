"""The public key of an X.509 certificate in DER. Source: RFC 5280, 4.1."""

from __future__ import annotations

import hashlib

_SEQUENCE, _VERSION = 0x30, 0xA0


def pin_of(certificate: bytes) -> str:
    """The sha256 in hex of the public key of `certificate` (DER), as `openssl pkey -pubin -outform der` writes it.

    Raises ValueError if it is no certificate.
    """
    _, outer, _ = _element(certificate, 0)
    _, begin, _ = _element(certificate, outer)
    tag, _, end = _element(certificate, begin)
    at = end if tag == _VERSION else begin
    # serial number, signature algorithm, issuer, validity, subject
    for _ in range(5):
        _, _, at = _element(certificate, at)
    tag, _, end = _element(certificate, at)
    if tag != _SEQUENCE:
        raise ValueError("a certificate has a public key after its subject")
    return hashlib.sha256(certificate[at:end]).hexdigest()


def _element(data: bytes, at: int) -> tuple[int, int, int]:
    """Tag, begin of the content and end of the element at `at`. Raises ValueError if it is cut off."""
    if at + 2 > len(data):
        raise ValueError("a certificate is cut off")
    tag, length, begin = data[at], data[at + 1], at + 2
    if length & 0x80:
        count = length & 0x7F
        length, begin = int.from_bytes(data[begin : begin + count]), begin + count
    if begin + length > len(data):
        raise ValueError("a certificate is cut off")
    return tag, begin, begin + length

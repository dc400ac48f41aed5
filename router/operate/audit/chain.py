"""The chain of the audit log: each line carries the seal of the line before it, and a seal of itself.

A line is a JSON object. It begins with `seq`, counted from 1, and `prev`, the seal of the line before it, zeros in the
first. It ends with `sha256` or `hmac`: the seal of all bytes before that member. An `hmac` is keyed (RFC 2104, with
SHA-256), so that only a holder of the secret can write lines that fit.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from backends.nesting import decode_json

FIRST = "0" * 64
"""What the first line has in place of a seal before it."""

MOST_LINE_BYTES = 64 << 10

_SEALED = re.compile(
    rb'(\{"seq":([1-9][0-9]{0,15}),"prev":"([0-9a-f]{64})",.*),"(sha256|hmac)":"([0-9a-f]{64})"\}', re.DOTALL
)


class ChainPlace(NamedTuple):
    """The place of a line in the chain: its number and its seal."""

    seq: int
    seal: str


START = ChainPlace(0, FIRST)


class BrokenChainError(ValueError):
    """A line does not fit. The text says how, and follows the line's place."""


class Chain:
    """Seals lines, with `secret` if there is one, and checks them."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secret

    def __repr__(self) -> str:
        return f"<Chain of {self.kind}>"

    @property
    def kind(self) -> str:
        """The seals that it makes."""
        return "sha256" if self._secret is None else "hmac"

    def line(self, record: Mapping[str, Any], after: ChainPlace) -> tuple[bytes, ChainPlace]:
        """`record` as the line behind `after`, with its newline, and its place."""
        seq = after.seq + 1
        body = msgspec.json.encode({"seq": seq, "prev": after.seal, **record})[:-1]
        seal = self._seal(body)
        return b'%b,"%b":"%b"}\n' % (body, self.kind.encode(), seal.encode()), ChainPlace(seq, seal)

    def check(self, line: bytes, after: ChainPlace | None) -> tuple[dict[str, Any], ChainPlace]:
        """The record of `line`, without its newline, and its place. Raises BrokenChainError.

        `after` is the place of the line before it; None: of the first line that is there, which may follow others.
        """
        found = _SEALED.fullmatch(line)
        if found is None:
            raise BrokenChainError("is no line of an audit log")
        body, seq, prev, kind, seal = found.groups()
        if kind.decode() != self.kind:
            needs = "needs the secret to be checked" if self._secret is None else "has a seal without the secret"
            raise BrokenChainError(needs)
        if not hmac.compare_digest(self._seal(body), seal.decode()):
            raise BrokenChainError(
                "was changed: its seal does not fit" + ("" if self._secret is None else " this secret")
            )
        if after is not None and (int(seq) != after.seq + 1 or prev.decode() != after.seal):
            raise BrokenChainError(f"does not follow record {after.seq}: lines are missing, added or in another order")
        if after is None and int(seq) == 1 and prev.decode() != FIRST:
            raise BrokenChainError("is called the first and follows another")
        try:
            record = decode_json(line, dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BrokenChainError("is no JSON") from error
        return record, ChainPlace(int(seq), seal.decode())

    def _seal(self, body: bytes) -> str:
        if self._secret is None:
            return hashlib.sha256(body).hexdigest()
        return hmac.new(self._secret, body, hashlib.sha256).hexdigest()


def place_of(line: bytes) -> ChainPlace | None:
    """The place that a line says it has, unchecked; None if it is no line of an audit log."""
    found = _SEALED.fullmatch(line)
    return None if found is None else ChainPlace(int(found[2]), found[5].decode())

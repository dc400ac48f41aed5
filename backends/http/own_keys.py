"""Secrets of the router that a server may repeat in its errors: those that it is sent, and others of the SLA file."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from itertools import groupby
from urllib.parse import quote

import msgspec

from policies.errors import ExpectedError

HIDDEN = "[key]"
_SECRET_HEADER = re.compile(r"auth|key|token|secret|cookie|password|credential", re.IGNORECASE)
_MOST_LEVELS = 16
"""Groups of alternatives within one another; a regular expression has a limit."""

_LEAST = 4
"""Characters of a key. Shorter values are words that errors need."""


class OwnKeys:
    """Finds the keys in `headers` and `key` in texts of others, as they were sent or as JSON and URLs spell them.

    So also the secrets `of_file`, those of the SLA file in force: one set as long as that does not change.
    """

    def __init__(
        self, headers: Mapping[str, str], key: str | None, of_file: Callable[[], frozenset[str]] = frozenset
    ) -> None:
        self._own = frozenset(_values(headers, key))
        self._of_file = of_file
        self._looked_for, self._pattern = frozenset[str](), _pattern(self._own)

    def __repr__(self) -> str:
        return f"<OwnKeys {'none' if self._any is None else 'some'}>"

    @property
    def _any(self) -> re.Pattern[str] | None:
        """Each of them; None where there is none."""
        of_file = self._of_file()
        if of_file is not self._looked_for:
            self._looked_for, self._pattern = of_file, _pattern(self._own | of_file)
        return self._pattern

    def hidden(self, text: str) -> str:
        """`text` with a mark in place of each key."""
        found = self._any
        return text if found is None else found.sub(HIDDEN, text)

    def hide_in(self, error: ExpectedError) -> None:
        """Put a mark in place of each key in the texts of `error`."""
        found = self._any
        if found is None or found.search(f"{error}\n{error.public_message}\n{error.param}") is None:
            return
        error.args = tuple(self.hidden(str(part)) for part in error.args)
        error.message, error.hint = self.hidden(error.message), self.hidden(error.hint)
        error.public_message = self.hidden(error.public_message)
        error.param = None if error.param is None else self.hidden(error.param)

    def hidden_bytes(self, body: bytes) -> bytes:
        """The same for a `body`."""
        found = self._any
        if found is None:
            return body
        text = body.decode(errors="surrogateescape")
        return found.sub(HIDDEN, text).encode(errors="surrogateescape")


def _pattern(values: Iterable[str]) -> re.Pattern[str] | None:
    found = {spelt for value in values if len(value) >= _LEAST for spelt in _spellings(value)}
    return re.compile(_any_of(found)) if found else None


def _any_of(values: Iterable[str], level: int = 0) -> str:
    """The pattern of `values`, the longest of those that begin alike first: one may be a part of another.

    What they have in common is written once, so that a search tries few alternatives at each place, however many
    values there are.
    """
    # equal beginnings are neighbours
    ordered = sorted(values)
    if level == _MOST_LEVELS:
        return "|".join(map(re.escape, sorted(ordered, key=len, reverse=True)))
    branches = []
    for _, group in groupby(ordered, key=lambda value: value[:1]):
        alike = list(group)
        # of sorted texts, the first and the last have no more in common than all of them
        common = alike[0][: _alike(alike[0], alike[-1])]
        rest = "" if len(alike) == 1 else f"(?:{_any_of((value[len(common) :] for value in alike), level + 1)})"
        branches.append(re.escape(common) + rest)
    # the empty end of a value that others go on from is sorted first
    return "|".join(reversed(branches))


def _alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _values(headers: Mapping[str, str], key: str | None) -> Iterable[str]:
    if key is not None:
        yield key
    for name, value in headers.items():
        if _SECRET_HEADER.search(name):
            yield value
            scheme, _, rest = value.partition(" ")
            yield rest
            if scheme.lower() == "basic":
                yield from _basic(rest)


def _basic(encoded: str) -> Iterable[str]:
    """User and password of RFC 7617, and the password alone."""
    try:
        pair = base64.b64decode(encoded, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return
    yield pair
    yield pair.partition(":")[2]


def _spellings(value: str) -> Iterable[str]:
    yield value
    # a key that came from a file with bytes that are no UTF-8 has surrogates
    text = value.encode(errors="replace").decode()
    as_json = msgspec.json.encode(text).decode()[1:-1]
    yield from (as_json, as_json.replace("/", "\\/"), quote(text, safe=""), quote(text))

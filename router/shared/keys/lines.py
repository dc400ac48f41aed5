"""A KeyBook as text: one JSON object a line, so that mistakes have a line number and people can read it."""

from __future__ import annotations

from types import MappingProxyType
from typing import Annotated

import msgspec

from backends.nesting import decode_json
from policies.errors import ConfigError
from policies.keys import IssuedKey, KeyBook
from policies.nouns import FixedBudget, Limits

_Digest = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
_Id = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{12}$")]
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Limit = Annotated[int, msgspec.Meta(ge=1, le=2**53)]
_Currency = Annotated[str, msgspec.Meta(pattern="^[A-Z]{3}$")]
_Day = Annotated[int, msgspec.Meta(ge=0, lt=99_999)]
_Seconds = Annotated[int, msgspec.Meta(ge=0, lt=2**40)]


class _FixedBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """As `policies.nouns.FixedBudget`."""

    name: _Name
    cost: _Limit
    first_day: _Day = 0
    last_day: _Day | None = None
    is_soft: bool = False


class _Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A key's limits, as in `policies.nouns.Limits`."""

    requests_per_minute: _Limit | None = None
    tokens_per_minute: _Limit | None = None
    concurrent: _Limit | None = None
    cost_per_hour: _Limit | None = None
    cost_per_day: _Limit | None = None
    cost_per_week: _Limit | None = None
    cost_per_month: _Limit | None = None
    currency: _Currency | None = None
    soft_cost_per_hour: _Limit | None = None
    soft_cost_per_day: _Limit | None = None
    soft_cost_per_week: _Limit | None = None
    soft_cost_per_month: _Limit | None = None
    fixed: tuple[_FixedBudget, ...] = ()

    def limits(self) -> Limits:
        """What stands here."""
        fixed = tuple(FixedBudget(**msgspec.structs.asdict(budget)) for budget in self.fixed)
        return Limits(**{**msgspec.structs.asdict(self), "fixed": fixed})


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key. A field of a later version is an error, not ignored: the next write would drop it, perhaps a limit."""

    sha256: _Digest
    tenant: _Name
    created: _Seconds
    name: _Name | None = None
    expires: _Seconds | None = None
    replaced_by: _Id | None = None
    limits: _Limits | None = None
    team: _Name | None = None


_ENCODER = msgspec.json.Encoder()
# threads decode lines: see tests/house/test_threads.py
_DECODER = msgspec.json.Decoder(_Line)


def encode(book: KeyBook) -> bytes:
    """The text of `book`, oldest key first."""
    ordered = sorted(book.values(), key=lambda key: (key.created, key.sha256))
    return b"".join(_ENCODER.encode(msgspec.convert(key, _Line, from_attributes=True)) + b"\n" for key in ordered)


def decode(text: bytes, source: str) -> KeyBook:
    """The book in `text`; `source` is its name in messages. Raises ConfigError with every mistake and its line."""
    book: dict[str, IssuedKey] = {}
    problems = []
    for number, line in enumerate(text.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            key = decode_json(line, _Line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            problems.append(f"{source}:{number}: is not a key: {error}")
            continue
        if key.sha256 in book:
            problems.append(f"{source}:{number}: the key {key.sha256[:12]} is a duplicate")
        limits = None if key.limits is None else key.limits.limits()
        book[key.sha256] = IssuedKey(**{**msgspec.structs.asdict(key), "limits": limits})
    if problems:
        hint = "repair or remove these lines, or restore a copy; removing a key's line revokes the key"
        raise ConfigError(f"{source} cannot be read:", problems=tuple(problems[:20]), hint=hint)
    return MappingProxyType(book)

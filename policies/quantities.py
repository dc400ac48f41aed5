"""Quantities as people write them: 800ms, 16k, 16MiB, ">= 4k". Each reader raises ValueError with a sentence."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, NamedTuple, TypeVar

from policies.nouns import USUAL_REUSE_BUDGET
from policies.rules import Range
from policies.shapes import Scalar
from policies.timeouts import Bounds

MOST_PER_TOKEN = 1000
"""The highest price of a token, in units of cost."""

PRICE_PARTS = 10**6
"""Parts of a unit of cost in which the prices of tokens are counted."""

CURRENCY_UNITS = 10**6
"""Units of cost in one of a currency: a price of a token in units is that of a million tokens in the currency."""

MOST_PER_ONE = 10 * CURRENCY_UNITS
"""The highest price of an image or a second, in units of cost."""

MOST_BUDGET = 4 * 10**12
"""The largest budget in units of cost: its thousandths, and a debt beside them, stay below 2**53."""

T = TypeVar("T")

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_COUNTS = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}
_BYTES = {"": 1.0, "B": 1.0, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_NUMBER = r"[0-9]{1,15}(?:_[0-9]{1,15})*(?:\.[0-9]{1,18})?"
_QUANTITY = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)", re.ASCII)
_CURRENCY = re.compile("[A-Z]{3}")
_SHARE = re.compile(rf"({_NUMBER})\s*(%?)", re.ASCII)
_COMPARISON = re.compile(r"(<=|>=|<|>)\s*(.+)")
_SPAN = re.compile(r"(.+?)\s*\.\.\s*(.+)")
_STATUSES = (429, 503)
_DURATION = rf"{_NUMBER}\s*({'|'.join(_SECONDS)})"
_AMOUNT = rf"{_NUMBER}\s*[kKMG]?"

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
"""Names of the quantiles that targets and times may have."""


def _looks(units: Mapping[str, float], **number: Any) -> dict[str, Any]:
    """JSON Schema for texts with one of `units`, and for bare numbers with bounds `number` if units are optional."""
    names = "|".join(sorted(filter(None, units), key=len, reverse=True))
    optional = "?" if "" in units else ""
    pattern = rf"^\s*{_NUMBER}\s*({names}){optional}\s*$" if names else rf"^\s*{_NUMBER}\s*$"
    if "" not in units:
        return {"type": "string", "pattern": pattern}
    return {"type": [number.pop("type", "number"), "string"], "pattern": pattern, **number}


def _scalar(looks: Mapping[str, Any]) -> Callable[[Callable[[str], T]], Scalar[T]]:
    """Makes a Scalar from a reader."""
    return lambda read: Scalar(read, looks)


@_scalar(_looks(_SECONDS))
def read_seconds(text: str) -> float:
    """A duration above zero, in seconds: 800ms, 12s, 15m, 1.5h."""
    return _above_zero(_scaled(text, _SECONDS, "a duration like 800ms, 12s or 15m"), text)


@_scalar(_looks(_COUNTS, type="integer", minimum=0))
def read_tokens(text: str) -> int:
    """A whole number of tokens: 512, 16k, 6M. k is 1,000."""
    return _whole(_scaled(text, _COUNTS, "a number like 512, 16k or 6M"), text)


@_scalar(_looks(_BYTES, type="integer", minimum=1))
def read_bytes(text: str) -> int:
    """A size above zero, in bytes: 512, 16MiB, 1MB."""
    return _whole(_above_zero(_scaled(text, _BYTES, "a size like 16MiB"), text), text)


@_scalar(_looks(_COUNTS, type="integer", minimum=1))
def read_count(text: str) -> int:
    """A whole number above zero."""
    return _whole(_above_zero(_scaled(text, _COUNTS, "a whole number above zero"), text), text)


@_scalar(_looks({"": 1.0}, type="integer", minimum=0))
def read_whole(text: str) -> int:
    """A whole number, zero included."""
    return _whole(_scaled(text, {"": 1.0}, "a whole number"), text)


@_scalar(_looks({"": 1.0}, exclusiveMinimum=0))
def read_weight(text: str) -> float:
    """A number above zero."""
    return _above_zero(_scaled(text, {"": 1.0}, "a number above zero"), text)


@_scalar(_looks({"": 1.0}, minimum=0))
def read_number(text: str) -> float:
    """A number, zero included."""
    return _scaled(text, {"": 1.0}, "a number like 1 or 0.1")


@_scalar(_looks({"": 1.0}, minimum=0, maximum=MOST_PER_TOKEN))
def read_price(text: str) -> int:
    """A number of at most six decimals, zero included, in millionths."""
    price = _decimal(text, {"": 1}, "a number like 1 or 0.1")
    if price > MOST_PER_TOKEN:
        raise ValueError(f"must be at most {MOST_PER_TOKEN:,}, not {quoted(text)} (make the unit larger)")
    parts = price * PRICE_PARTS
    if parts != int(parts):
        raise ValueError(f"must be in whole millionths, not {quoted(text)} (make the unit smaller)")
    return int(parts)


@_scalar(_looks({"": 1.0}, minimum=0, maximum=MOST_PER_ONE))
def read_amount(text: str) -> Decimal:
    """The price of an image or a second: a number of at most twelve decimals, zero included."""
    return _decimal(text, {"": 1}, "a number like 0.002")


class CostLimit(NamedTuple):
    """A cost in whole units, and the currency in which it was written; None: in units."""

    units: int
    currency: str | None = None


@_scalar({"type": ["integer", "string"], "pattern": rf"^\s*({_AMOUNT}|{_NUMBER}\s*[A-Z]{{3}})\s*$", "minimum": 1})
def read_budget(text: str) -> CostLimit:
    """A cost above zero: 50M, in units, or 12.50 USD, in a currency."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or not _CURRENCY.fullmatch(match[2]):
        return CostLimit(_budget(read_count(text), text))
    units = _decimal(text, {match[2]: CURRENCY_UNITS}, "a cost like 12.50 USD")
    if units <= 0:
        raise ValueError(f"must be above zero, not {quoted(text)}")
    if units != int(units):
        raise ValueError(f"must have at most six decimals, not {quoted(text)}")
    return CostLimit(_budget(int(units), text), match[2])


def _budget(units: int, text: str) -> int:
    if units > MOST_BUDGET:
        raise ValueError(f"must be at most {MOST_BUDGET // 10**12}T units of cost, not {quoted(text)}")
    return units


@_scalar({"type": "string", "pattern": r"^\s*[A-Z]{3}\s*$"})
def read_currency(text: str) -> str:
    """The code of a currency as in ISO 4217: USD."""
    if not _CURRENCY.fullmatch(text.strip()):
        raise ValueError(f"must be a code of three letters like USD, not {quoted(text)}")
    return text.strip()


@_scalar({"type": "string", "pattern": r"^\s*[0-9]{4}-[0-9]{2}-[0-9]{2}\s*$"})
def read_date(text: str) -> float:
    """The Unix seconds at which a day begins in UTC: 2027-01-01."""
    try:
        found = datetime.strptime(text.strip(), "%Y-%m-%d").replace(tzinfo=UTC)
    except ValueError as error:
        raise ValueError(f"must be a day like 2027-01-01, not {quoted(text)}") from error
    return found.timestamp()


@_scalar({"type": ["number", "string"], "minimum": 0, "maximum": 1, "pattern": rf"^\s*{_NUMBER}\s*%?\s*$"})
def read_share(text: str) -> float:
    """A share of a whole, from 0 to 1: 10%, 0.1."""
    match = _SHARE.fullmatch(text.strip())
    number = float(match[1].replace("_", "")) / (100 if match[2] else 1) if match else math.inf
    if number > 1:
        raise ValueError(f"must be a share of at most 100%, like 10% or 0.1, not {quoted(text)}")
    return number


@_scalar(
    {
        "type": ["number", "string", "boolean"],
        "minimum": 0,
        "maximum": 1,
        "pattern": rf"^\s*(chunks|off|{_NUMBER}\s*%?)\s*$",
    }
)
def read_reuse(text: str) -> float:
    """The share of a reused document that is computed again: `chunks` (the usual one), 10%, or `off`, which is all."""
    named = {"chunks": USUAL_REUSE_BUDGET, "off": 1.0}.get(text.strip())
    if named is not None:
        return named
    try:
        return read_share(text)
    except ValueError:
        raise ValueError(f"must be chunks, off or the share to compute again, like 10%, not {quoted(text)}") from None


@_scalar({"type": ["number", "string"], "minimum": 0, "pattern": rf"^\s*{_NUMBER}\s*%?\s*$"})
def read_part(text: str) -> float:
    """A part in proportion to others: 95, 5%. 0 is none."""
    match = _SHARE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be a part in proportion to the others, like 95 or 5%, not {quoted(text)}")
    return float(match[1].replace("_", ""))


@_scalar({"enum": [*QUANTILES]})
def read_quantile(text: str) -> float:
    """A quantile by name: p50, p90, p95 or p99."""
    quantile = QUANTILES.get(text.strip())
    if quantile is None:
        raise ValueError(f"must be one of {', '.join(QUANTILES)}, not {quoted(text)}")
    return quantile


@_scalar({"enum": [*_STATUSES, *map(str, _STATUSES)]})
def read_status(text: str) -> int:
    """The status of a refusal: 429 or 503."""
    if text.strip() not in map(str, _STATUSES):
        raise ValueError(f"must be 429 (Too Many Requests) or 503 (Service Unavailable), not {quoted(text)}")
    return int(text)


@_scalar({"type": ["boolean", "string"], "pattern": r"^\s*([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee])\s*$"})
def read_yes(text: str) -> bool:
    """True or false."""
    if text.lower() not in {"true", "false"}:
        raise ValueError(f"must be true or false, not {quoted(text)}")
    return text.lower() == "true"


@_scalar({"type": "string", "pattern": rf"^\s*((<=|>=|<|>)\s*{_AMOUNT}|{_AMOUNT}\s*\.\.\s*{_AMOUNT})\s*$"})
def read_range(text: str) -> Range:
    """Numbers of tokens: ">= 16k", "> 4k", "< 4k", "<= 512", or "4k..16k", which is from 4k to below 16k."""
    if comparison := _COMPARISON.fullmatch(text):
        sign, number = comparison[1], read_tokens(comparison[2])
        if sign == "<" and number == 0:
            raise ValueError("is below zero for every request")
        ranges: Mapping[str, Callable[[], Range]] = {
            "<": lambda: Range(None, number - 1),
            "<=": lambda: Range(None, number),
            ">": lambda: Range(number + 1),
            ">=": lambda: Range(number),
        }
        return ranges[sign]()
    if span := _SPAN.fullmatch(text):
        least, end = read_tokens(span[1]), read_tokens(span[2])
        if least >= end:
            raise ValueError(f"is empty: {quoted(text)} is from the first number to below the second")
        return Range(least, end - 1)
    raise ValueError(f'must be a comparison like ">= 16k", "< 4k" or "4k..16k", not {quoted(text)}')


@_scalar({"type": "string", "pattern": rf"^\s*{_DURATION}(\s*\.\.\s*{_DURATION})?\s*$"})
def read_bounds(text: str) -> Bounds:
    """Floor and ceiling of a timeout: "5s..10m"; "30s" is both."""
    span = _SPAN.fullmatch(text)
    least_s, most_s = (read_seconds(span[1]), read_seconds(span[2])) if span else (read_seconds(text),) * 2
    if least_s > most_s:
        raise ValueError(f"has a floor above its ceiling: {quoted(text)}")
    return Bounds(least_s, most_s)


def digits(text: str, *, most: int) -> int | None:
    """The number from 0 to `most` that ASCII digits write, no more of them than `most` has; None for any other text.

    `str.isdigit` is true of "²", and `int` refuses more than 4,300 digits (CVE-2020-10735).
    """
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(most))):
        return None
    number = int(text)
    return number if number <= most else None


def written_seconds(seconds: float) -> str:
    """A duration as people write it, exact: 0.8 is 800ms, 90 is 90s, 900 is 15m."""
    for unit, scale in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if seconds >= scale and (seconds / scale).is_integer():
            return f"{seconds / scale:.0f}{unit}"
    milliseconds = f"{seconds * 1e3:.6f}".rstrip("0").rstrip(".")
    return f"{milliseconds}ms" if seconds < 1 else f"{seconds:.9f}".rstrip("0") + "s"


def rounded_seconds(seconds: float) -> str:
    """A duration for a sentence, rounded up and so never zero: 3 ms, 1.3 s, 14 s, 3 min, 20 h."""
    ms = max(1, math.ceil(seconds * 1e3 - 1e-6))
    if ms < 1_000:
        return f"{ms} ms"
    if ms <= 10_000:
        return f"{math.ceil(ms / 100) / 10:g} s"
    for unit, scale in (("s", 1_000), ("min", 60_000)):
        if ms <= 120 * scale:
            return f"{math.ceil(ms / scale)} {unit}"
    return f"{math.ceil(ms / 3_600_000):,} h"


def quoted(text: str) -> str:
    """`text` for a sentence: in quotes, and cut if it is long."""
    return f"'{text}'" if len(text) <= 60 else f"'{text[:57]}...'"


def _scaled(text: str, units: Mapping[str, float], wanted: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"must be {wanted}, not {quoted(text)}")
    number = float(match[1].replace("_", "")) * units[match[2]]
    if not math.isfinite(number) or number > 2**53:
        raise ValueError(f"is too large: {quoted(text)}")
    return number


def _decimal(text: str, units: Mapping[str, int], wanted: str) -> Decimal:
    """As `_scaled`, without rounding."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in units:
        raise ValueError(f"must be {wanted}, not {quoted(text)}")
    number = Decimal(match[1].replace("_", "")) * units[match[2]]
    if number > 2**53:
        raise ValueError(f"is too large: {quoted(text)}")
    return number


def _above_zero(number: float, text: str) -> float:
    if number <= 0:
        raise ValueError(f"must be above zero, not {quoted(text)}")
    return number


def _whole(number: float, text: str) -> int:
    nearest = round(number)
    if abs(number - nearest) > 1e-6:
        raise ValueError(f"must be a whole number, not {quoted(text)}")
    return nearest

"""A row of usage: the sums of what a tenant, with one key and user, used of one model at one pool in one hour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from policies.nouns import Outcome
from policies.quota.end_users import OTHERS

HOUR_S = 3600

MOST_ROWS = 100_000
"""More rows than this are not held at a time: further end users are counted together."""

MOST_AMOUNT = 2**53
"""An amount of one batch that is larger is not believed: the sums of a database have 63 bits."""

MOST_USER = 128
"""Characters of a user's name that are kept."""


class UsageKey(NamedTuple):
    """The row: `hour` is the Unix time at which it begins; a text is empty where there is none, such as a pool for a
    refused request, and a tenant for one without a valid key. `key` is the id of an API key, `team` the part of the
    tenant that it belongs to, `user` the end user that a client names, `tags` the tags of the request, with
    commas between them."""

    hour: int
    tenant: str
    team: str
    key: str
    user: str
    model: str
    service_class: str
    pool: str
    kind: str
    currency: str
    tags: str = ""


USED = (
    "prompt_tokens",
    "cached_tokens",
    "completion_tokens",
    "cache_write_tokens",
    "images",
    "backend_ms",
)
"""The sums that Usage has by these names."""

AMOUNTS = (*(outcome.value for outcome in Outcome), *USED, "cost")
"""The sums of a row: requests by how they ended, what they used, and the cost in thousandths of a unit."""

PERIODS = {"hour": 13, "day": 10, "month": 7}
"""Names of periods, and the characters of a time in ISO 8601 that tell them apart."""

GROUPS = (*PERIODS, *UsageKey._fields[1:])
"""What usage can be summed by."""

COST = AMOUNTS.index("cost")
AT_OUTCOME = {outcome: at for at, outcome in enumerate(Outcome)}

Rows = dict[UsageKey, list[int]]


def cleaned(rows: Mapping[UsageKey, Iterable[int]]) -> Rows:
    """`rows` as every database can store them, whatever a client or a backend said: texts without NUL and halves of
    surrogate pairs, amounts from 0 to MOST_AMOUNT."""
    clean: Rows = {}
    for key, amounts in rows.items():
        texts = (clean_text(text) for text in key[1:])
        add(clean, {UsageKey(key.hour, *texts): [min(max(0, amount), MOST_AMOUNT) for amount in amounts]})
    return clean


def clean_text(text: str) -> str:
    """`text` without what a database cannot store: NUL, and halves of surrogate pairs."""
    return text if text.isprintable() else text.encode("utf-8", "replace").decode().replace("\0", "?")


def add(rows: Rows, more: Mapping[UsageKey, Iterable[int]]) -> None:
    """Add `more` to `rows`."""
    for key, amounts in more.items():
        sums = row_of(rows, key)
        for at, amount in enumerate(amounts):
            sums[at] += amount


def row_of(rows: Rows, key: UsageKey) -> list[int]:
    """The sums of `key`, which begin at 0; those of OTHERS in place of its user if there are too many rows."""
    sums = rows.get(key)
    if sums is None:
        if key.user not in {"", OTHERS} and len(rows) >= MOST_ROWS:
            return row_of(rows, key._replace(user=OTHERS))
        sums = rows[key] = [0] * len(AMOUNTS)
    return sums

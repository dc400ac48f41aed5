"""Usage as people and programs read it: a query, and its answer as a table, CSV, JSON or FOCUS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from policies.errors import InvalidRequest
from policies.nouns import Outcome
from policies.quantities import CURRENCY_UNITS
from policies.quota.budget import COST_UNIT
from policies.suggest import did_you_mean
from router.operate.sheet import sheet
from router.operate.usage.rows import GROUPS, PERIODS, USED, UsageKey

if TYPE_CHECKING:
    # a router that keeps no usage runs without SQLAlchemy
    from router.operate.usage.database import UsageDatabase

USUAL = ("tenant", "model")

_FOCUS_BY = ("hour", *UsageKey._fields[1:])
_TIME_HINT = "write a day like 2026-11-24 or a time like 2026-11-24T13:00, in UTC"


class UsageQuery(NamedTuple):
    """Which usage is asked for: sums by the names `by`, of hours from `since` to before `until` in Unix seconds, of one
    `tenant` or all."""

    by: tuple[str, ...] = USUAL
    since: float | None = None
    until: float | None = None
    tenant: str | None = None

    @classmethod
    def read(cls, wanted: Mapping[str, str], *, now: float) -> UsageQuery:
        """The query of a call's parameters: `by`, `from`, `to`, `tenant`. Without `from`: since the first of the month
        in which `now` lies. Raises InvalidRequest."""
        if unknown := sorted(wanted.keys() - {"by", "from", "to", "tenant"}):
            hint = did_you_mean(unknown[0], ("by", "from", "to", "tenant")) or "known: by, from, to, tenant"
            raise InvalidRequest(f"usage has no parameter '{unknown[0][:80]}'", hint=hint, param=unknown[0][:80])
        by = tuple(filter(None, (name.strip() for name in wanted.get("by", "").split(",")))) or USUAL
        for name in by:
            if name not in GROUPS:
                hint = did_you_mean(name, GROUPS) or f"known: {', '.join(GROUPS)}"
                raise InvalidRequest(f"usage cannot be summed by '{name[:80]}'", hint=hint, param="by")
        if len(set(by) & PERIODS.keys()) > 1:
            raise InvalidRequest("usage is summed by one period at a time", hint="hour, day or month", param="by")
        today = datetime.fromtimestamp(now, UTC)
        since = _time(wanted["from"], "from") if "from" in wanted else datetime(today.year, today.month, 1, tzinfo=UTC)
        until = _time(wanted["to"], "to") if "to" in wanted else None
        if until is not None and until <= since:
            raise InvalidRequest(f"nothing is between {since:%Y-%m-%d %H:%M} and {until:%Y-%m-%d %H:%M}", param="to")
        return cls(by, since.timestamp(), None if until is None else until.timestamp(), wanted.get("tenant"))

    def answer(self, database: UsageDatabase) -> list[dict[str, Any]]:
        """The sums. Blocks. Raises ConnectionError."""
        only = {} if self.tenant is None else {"tenant": self.tenant}
        rows = database.sums(self.by, since=self.since, until=self.until, where=only)
        return [_shown(row, self.by) for row in rows]


def _time(text: str, param: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError as error:
        raise InvalidRequest(f"'{text[:40]}' is no time", hint=_TIME_HINT, param=param) from error
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def _shown(row: Mapping[str, Any], by: Sequence[str]) -> dict[str, Any]:
    outcomes = {outcome.value: row[outcome.value] for outcome in Outcome}
    used = {name: row[name] for name in USED}
    cost = Decimal(row["cost"]) / COST_UNIT
    if row["currency"]:
        cost /= CURRENCY_UNITS
    counted = {"requests": sum(outcomes.values()), **outcomes, **used}
    return {**{name: row[name] for name in by}, **counted, "cost": cost, "currency": row["currency"]}


def as_json(rows: Iterable[Mapping[str, Any]]) -> bytes:
    """The rows as a JSON array; costs are exact numbers."""
    return msgspec.json.Encoder(decimal_format="number").encode(list(rows))


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as CSV with inert cells, a line of their names above them; costs are in their currency, or in units of
    cost without one."""
    if not rows:
        return ""
    return sheet(list(rows[0]), ({**row, "cost": f"{row['cost']:f}"} for row in rows))


def as_focus(database: UsageDatabase, query: UsageQuery) -> str:
    """The usage of `query`, by the hour and everything else, in the columns of FOCUS 1.0 (the FinOps Foundation's
    Cost and Usage Specification). Raises InvalidRequest where a cost has no currency: FOCUS knows none without."""
    rows = query._replace(by=_FOCUS_BY).answer(database)
    if any(row["cost"] and not row["currency"] for row in rows):
        raise InvalidRequest("FOCUS needs a currency for each cost", hint="write cost: {currency: USD, ...}")
    # a request without an answer is no charge
    return sheet(list(_focus_row(_EMPTY)), (_focus_row(row) for row in rows if row["pool"] and row["currency"]))


_EMPTY: dict[str, Any] = {
    **dict.fromkeys(_FOCUS_BY, ""),
    "hour": "1970-01-01T00:00Z",
    "cost": Decimal(0),
    **dict.fromkeys(("requests", *USED), 0),
}


def _focus_row(row: Mapping[str, Any]) -> dict[str, Any]:
    begins = datetime.fromisoformat(row["hour"])
    month = begins.replace(day=1, hour=0)
    next_month = (month + timedelta(days=31)).replace(day=1)
    cost, tokens = f"{row['cost']:f}", row["prompt_tokens"] + row["completion_tokens"]
    tags = {
        "team": row["team"],
        "key": row["key"],
        "user": row["user"],
        "class": row["service_class"],
        "kind": row["kind"],
        "tags": row["tags"],
    }
    return {
        "AvailabilityZone": "",
        "BilledCost": cost,
        "BillingAccountId": "pointsman",
        "BillingAccountName": "Pointsman",
        "BillingCurrency": row["currency"],
        "BillingPeriodStart": _utc(month),
        "BillingPeriodEnd": _utc(next_month),
        "ChargeCategory": "Usage",
        "ChargeClass": "",
        "ChargeDescription": f"Tokens of {row['model']} at {row['pool']}"
        if row["pool"]
        else "Requests without an answer",
        "ChargeFrequency": "Usage-Based",
        "ChargePeriodStart": _utc(begins),
        "ChargePeriodEnd": _utc(begins + timedelta(hours=1)),
        **dict.fromkeys(
            (
                "CommitmentDiscountCategory",
                "CommitmentDiscountId",
                "CommitmentDiscountName",
                "CommitmentDiscountStatus",
                "CommitmentDiscountType",
            ),
            "",
        ),
        "ConsumedQuantity": f"{tokens}.0",
        "ConsumedUnit": "Tokens",
        "ContractedCost": cost,
        "ContractedUnitPrice": "",
        "EffectiveCost": cost,
        "InvoiceIssuerName": "Pointsman",
        "ListCost": cost,
        "ListUnitPrice": "",
        "PricingCategory": "Standard",
        "PricingQuantity": f"{tokens}.0",
        "PricingUnit": "Tokens",
        "ProviderName": row["pool"],
        "PublisherName": row["kind"] or row["pool"],
        "RegionId": "",
        "RegionName": "",
        "ResourceId": f"{row['pool']}/{row['model']}",
        "ResourceName": row["model"],
        "ResourceType": "Model",
        "ServiceCategory": "AI and Machine Learning",
        "ServiceName": "Inference",
        "SkuId": row["model"],
        "SkuPriceId": f"{row['pool']}/{row['model']}",
        "SubAccountId": row["tenant"],
        "SubAccountName": row["tenant"],
        "Tags": msgspec.json.encode({name: value for name, value in tags.items() if value}).decode(),
        "x_Requests": row["requests"],
        "x_PromptTokens": row["prompt_tokens"],
        "x_CachedTokens": row["cached_tokens"],
        "x_CompletionTokens": row["completion_tokens"],
        "x_CacheWriteTokens": row["cache_write_tokens"],
        "x_Images": row["images"],
        "x_BackendSeconds": f"{Decimal(row['backend_ms']) / 1000:f}",
    }


def _utc(at: datetime) -> str:
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"

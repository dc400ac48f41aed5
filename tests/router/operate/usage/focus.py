"""The columns of FOCUS 1.0, as the FinOps Foundation's specification (tag v1.0, specification/columns) has them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z")
DECIMAL = re.compile(r"-?\d+(\.\d+)?([eE][+-]?\d+)?")
CURRENCY = re.compile("[A-Z]{3}")


class Column(NamedTuple):
    """Whether it must be there, whether it may be empty, and what its values look like."""

    level: str
    nullable: bool
    fits: Callable[[str], object]


def _any(text: str) -> object:
    return text


def _tags(text: str) -> object:
    found = json.loads(text)
    return isinstance(found, dict) and all(isinstance(value, str) for value in found.values())


def _one_of(*values: str) -> Callable[[str], object]:
    return values.__contains__


_CONDITIONAL = Column("Conditional", True, _any)
_TEXT, _MAY_BE_EMPTY = Column("Mandatory", False, _any), Column("Mandatory", True, _any)
_COST, _AT = Column("Mandatory", False, DECIMAL.fullmatch), Column("Mandatory", False, TIME.fullmatch)
_NUMBER = Column("Conditional", True, DECIMAL.fullmatch)

COLUMNS: Mapping[str, Column] = {
    "AvailabilityZone": Column("Recommended", True, _any),
    "BilledCost": _COST,
    "BillingAccountId": _TEXT,
    "BillingAccountName": _MAY_BE_EMPTY,
    "BillingCurrency": Column("Mandatory", False, CURRENCY.fullmatch),
    "BillingPeriodEnd": _AT,
    "BillingPeriodStart": _AT,
    "ChargeCategory": Column("Mandatory", False, _one_of("Usage", "Purchase", "Tax", "Credit", "Adjustment")),
    "ChargeClass": Column("Mandatory", True, _one_of("Correction")),
    "ChargeDescription": _MAY_BE_EMPTY,
    "ChargeFrequency": Column("Recommended", False, _one_of("One-Time", "Recurring", "Usage-Based")),
    "ChargePeriodEnd": _AT,
    "ChargePeriodStart": _AT,
    "CommitmentDiscountCategory": Column("Conditional", True, _one_of("Spend", "Usage")),
    "CommitmentDiscountId": _CONDITIONAL,
    "CommitmentDiscountName": _CONDITIONAL,
    "CommitmentDiscountStatus": Column("Conditional", True, _one_of("Used", "Unused")),
    "CommitmentDiscountType": _CONDITIONAL,
    "ConsumedQuantity": _NUMBER,
    "ConsumedUnit": _CONDITIONAL,
    "ContractedCost": _COST,
    "ContractedUnitPrice": _NUMBER,
    "EffectiveCost": _COST,
    "InvoiceIssuerName": _TEXT,
    "ListCost": _COST,
    "ListUnitPrice": _NUMBER,
    "PricingCategory": Column("Conditional", True, _one_of("Standard", "Dynamic", "Committed", "Other")),
    "PricingQuantity": Column("Mandatory", True, DECIMAL.fullmatch),
    "PricingUnit": _MAY_BE_EMPTY,
    "ProviderName": _TEXT,
    "PublisherName": _TEXT,
    "RegionId": _CONDITIONAL,
    "RegionName": _CONDITIONAL,
    "ResourceId": _CONDITIONAL,
    "ResourceName": _CONDITIONAL,
    "ResourceType": _CONDITIONAL,
    "ServiceCategory": Column("Mandatory", False, _one_of("AI and Machine Learning")),
    "ServiceName": _TEXT,
    "SkuId": _CONDITIONAL,
    "SkuPriceId": _CONDITIONAL,
    "SubAccountId": _CONDITIONAL,
    "SubAccountName": _CONDITIONAL,
    "Tags": Column("Conditional", True, _tags),
}


def mistakes(row: Mapping[str, str]) -> list[str]:
    """What is wrong with one row of a sheet; columns of a provider's own begin with x_ and are free."""
    found = [f"{name} is no column of FOCUS" for name in row if name not in COLUMNS and not name.startswith("x_")]
    for name, column in COLUMNS.items():
        value = row.get(name)
        if value is None:
            found.append(f"{name} is missing")
        elif not value:
            if not column.nullable:
                found.append(f"{name} is empty")
        elif not column.fits(value):
            found.append(f"{name} is {value}")
    return found

"""The section `classes`: service classes, ranked in the order of the file."""

from __future__ import annotations

from policies.fields import Field, Section
from policies.nouns import ServiceClass
from policies.quantities import read_count, read_seconds, read_weight, read_yes

QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

CLASS_KEYS = (
    *(f"ttft_{quantile}" for quantile in QUANTILES),
    *(f"tpot_{quantile}" for quantile in QUANTILES),
    "deadline",
    "weight",
    "preemptible",
    "prefill_slice",
)


def read_classes(field: Field | None) -> dict[str, ServiceClass]:
    """Service classes by name; one called `standard` where the file has none."""
    fields = field.named_entries() if field else {}
    classes = {name: _read_class(entry, name, rank) for rank, (name, entry) in enumerate(fields.items())}
    return classes or {"standard": ServiceClass("standard", rank=0)}


def _read_class(field: Field, name: str, rank: int) -> ServiceClass:
    section = field.section(CLASS_KEYS)
    ttft_s, ttft_quantile = _target(section, "ttft")
    tpot_s, tpot_quantile = _target(section, "tpot")
    return ServiceClass(
        name,
        rank,
        ttft_s=ttft_s,
        ttft_quantile=ttft_quantile,
        tpot_s=tpot_s,
        tpot_quantile=tpot_quantile,
        deadline_s=section.read_any("deadline", read_seconds),
        weight=section.read("weight", read_weight, 1.0),
        preemptible=section.read("preemptible", read_yes, False),
        prefill_slice_tokens=section.read_any("prefill_slice", read_count),
    )


def _target(section: Section, measure: str) -> tuple[float | None, float]:
    """Seconds and quantile; None and 0.95 where no target is set."""
    given = [quantile for quantile in QUANTILES if f"{measure}_{quantile}" in section]
    for more in given[1:]:
        section.entries[f"{measure}_{more}"].complain(f"a class has one target: {measure}_{given[0]} is there already")
    if not given:
        return None, 0.95
    return section.read_any(f"{measure}_{given[0]}", read_seconds), QUANTILES[given[0]]

"""The section `classes`: service classes, ranked in the order of the file."""

from __future__ import annotations

from policies.nouns import USUAL_HEDGE_BUDGET, ServiceClass
from policies.quantities import QUANTILES, read_count, read_quantile, read_seconds, read_share, read_weight, read_yes
from policies.shapes import Key, Named, Table
from policies.sla.fields import Field, Section

MEASURES = {"ttft": "time to first token", "tpot": "time per output token"}

CLASS = Table(
    {
        **{
            f"{measure}_{quantile}": Key(read_seconds, f"target for the {name} of {share:.0%} of requests")
            for measure, name in MEASURES.items()
            for quantile, share in QUANTILES.items()
        },
        "deadline": Key(read_seconds, "time for the whole answer, for background work"),
        "weight": Key(read_weight, "share of the service beside other classes; default 1"),
        "floor": Key(read_share, "share of the service while it has work, even if better ranks wait: 10%"),
        "preemptible": Key(read_yes, "true: a higher class may preempt its requests on a shard; they resume later"),
        "hedge": Key(read_quantile, "send a request that is slower than this to a second backend too: p95"),
        "hedge_budget": Key(read_share, "most second requests, as a share of all of a tenant in the class; default 5%"),
        "prefill_slice": Key(read_count, "tokens of a long prompt that are computed before other requests get a turn"),
    }
)
CLASSES = Named(CLASS)


def read_classes(field: Field | None) -> dict[str, ServiceClass]:
    """Service classes by name; one called `standard` if the file has none."""
    fields = field.named_entries() if field else {}
    classes = {name: _read_class(entry, name, rank) for rank, (name, entry) in enumerate(fields.items())}
    if field:
        _check_floors(field, classes)
    return classes or {"standard": ServiceClass("standard", rank=0)}


def _read_class(field: Field, name: str, rank: int) -> ServiceClass:
    section = field.section(CLASS)
    ttft_s, ttft_quantile = _target(section, "ttft")
    tpot_s, tpot_quantile = _target(section, "tpot")
    read = ServiceClass(
        name,
        rank,
        ttft_s=ttft_s,
        ttft_quantile=ttft_quantile,
        tpot_s=tpot_s,
        tpot_quantile=tpot_quantile,
        deadline_s=section.read_any("deadline"),
        weight=section.read("weight", 1.0),
        floor=section.read("floor", 0.0),
        preemptible=section.read("preemptible", False),
        prefill_slice_tokens=section.read_any("prefill_slice"),
        hedge_quantile=section.read_any("hedge"),
        hedge_budget=section.read("hedge_budget", USUAL_HEDGE_BUDGET),
    )
    if "hedge_budget" in section and "hedge" not in section:
        section.entries["hedge_budget"].doubt("has no effect without 'hedge'")
    _check_deadline(section, read)
    return read


def _target(section: Section, measure: str) -> tuple[float | None, float]:
    """Seconds and quantile; None and 0.95 if no target is set."""
    given = [quantile for quantile in QUANTILES if f"{measure}_{quantile}" in section]
    for more in given[1:]:
        section.entries[f"{measure}_{more}"].complain(
            f"a class has one target: {measure}_{given[0]} is there already (keep one of them)"
        )
    if not given:
        return None, 0.95
    return section.read_any(f"{measure}_{given[0]}"), QUANTILES[given[0]]


def _check_deadline(section: Section, read: ServiceClass) -> None:
    for measure, target in (("ttft", read.ttft_s), ("tpot", read.tpot_s)):
        if target is not None and read.deadline_s is not None and target > read.deadline_s:
            name = next(name for name in section.entries if name.startswith(measure))
            section.entries[name].complain("is longer than the class's deadline (lower the target, or drop one)")


def _check_floors(field: Field, classes: dict[str, ServiceClass]) -> None:
    total = sum(service_class.floor for service_class in classes.values())
    if total > 1 + 1e-9:
        field.complain(f"the floors add up to {total:.0%} (the sum may be 100% at most)")
    for service_class in classes.values():
        if service_class.floor and service_class.rank == 0:
            field.find(service_class.name, "floor").doubt("a floor has no effect on the class that is served first")

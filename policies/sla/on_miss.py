"""The section `on_miss`: per class, the steps for requests with a predicted TTFT above the target."""

from __future__ import annotations

from collections.abc import Collection

from policies.on_miss import Degrade, Queue, Shed, Spill, Step
from policies.quantities import read_seconds, read_status
from policies.shapes import TEXT, Choice, Key, Many, Named
from policies.sla.fields import Field

STEP = Choice(
    {
        "queue": Key(read_seconds, "waits this long in the router's queue: {queue: 20s}"),
        "spill": Key(TEXT, "this pool may take it too: {spill: POOL}"),
        "degrade": Key(TEXT, "this model answers it: {degrade: MODEL}"),
        "shed": Key(read_status, "is rejected with 429 or 503: shed, or {shed: 503}"),
    },
    alone=("shed",),
)
ON_MISS = Named(Many(STEP))


def read_on_miss(
    field: Field | None, *, classes: Collection[str], pools: Collection[str]
) -> dict[str, tuple[Step, ...]]:
    """The steps of each class with steps, in order; whether they make sense together is proven later."""
    fields = field.entries() if field else {}
    for name in fields.keys() - set(classes):
        fields[name].complain_of_name(name, classes, what="class")
    return {name: _read_steps(entry, pools) for name, entry in fields.items() if name in classes}


def _read_steps(field: Field, pools: Collection[str]) -> tuple[Step, ...]:
    steps: list[Step] = []
    for item in field.items():
        step = _read_step(item, pools)
        if step is None:
            continue
        if steps and isinstance(steps[-1], Shed):
            item.complain("is never tried: the step before it rejects the request (move it up, or drop it)")
            break
        if step in steps:
            item.complain("is here twice; a step is tried once (drop it)")
        steps.append(step)
    return tuple(steps)


def _read_step(field: Field, pools: Collection[str]) -> Step | None:
    chosen = field.choice(STEP, what="step")
    if chosen is None:
        return None
    name, value = chosen
    if value is None:
        return Shed()
    if name == "queue":
        seconds = value.read(read_seconds)
        return None if seconds is None else Queue(seconds)
    if name == "spill":
        pool = value.one_of(pools, what="pool")
        return None if pool is None else Spill(pool)
    if name == "degrade":
        model = value.text()
        return None if model is None else Degrade(model)
    status = value.read(read_status)
    return None if status is None else Shed(status)

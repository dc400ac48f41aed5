"""Finds the pool of a backend that announces itself, and checks its address."""

from __future__ import annotations

from collections.abc import Sequence

from policies.errors import InvalidRequest
from policies.sla.pools import AT_HOST_AND_PORT, PoolSpec, read_url
from policies.sla.server import read_address
from router.fleet.pools import PoolsInForce


def pools_of_kind(fleet: PoolsInForce, kind: str) -> list[PoolSpec]:
    """The pools of `kind` to which backends announce themselves."""
    return [pool for pool in fleet.announced.values() if pool.kind == kind]


def pool_for(fleet: PoolsInForce, kind: str, models: Sequence[str]) -> PoolSpec:
    """The pool of `kind` with one of `models`; the only pool of that kind fits any model.

    Raises InvalidRequest if there is none.
    """
    pools = pools_of_kind(fleet, kind)
    fitting = [pool for pool in pools if {*pool.models.values(), pool.model} & set(models)]
    chosen = fitting[0] if fitting else pools[0] if len(pools) == 1 else None
    if chosen is None:
        hint = f"add a pool with kind: {kind}, register: true and this model"
        raise InvalidRequest(f"there is no pool for a server of {', '.join(models)[:200] or 'no model'}", hint=hint)
    return chosen


def address_in(pool: PoolSpec, text: str) -> str:
    """`text` as an address for the kind of `pool`. Raises InvalidRequest."""
    try:
        return (read_address if pool.kind in AT_HOST_AND_PORT else read_url)(text)
    except ValueError as error:
        raise InvalidRequest(f"the address {error}", param="address") from error

"""Names of backends have their pool."""

from __future__ import annotations

import pytest

from router.fleet.cluster.names import backend_name, found_name, pool_of


@pytest.mark.parametrize("pool", ["own", "own-2", "a.b_c"])
def test_the_pool_of_a_backend_is_in_its_name(pool: str) -> None:
    assert pool_of(backend_name(pool, 12)) == pool
    assert pool_of(found_name(pool, "http://gpu-7.local:8000")) == pool


def test_a_name_without_a_pool_stays_as_it_is() -> None:
    assert pool_of("b0") == "b0"

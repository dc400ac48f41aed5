"""The simulated backends of a file's pools: how many, which models, which keys."""

from __future__ import annotations

import pytest

from policies.errors import InvalidRequest
from router.call.identify import identity_of
from router.shared.keys.ring import KeyRing
from simulation.fleet import USUAL_MODEL, fleet_of, with_named_keys
from simulation.speed import machines_of
from tests.simulation.scene import TWO_CLASSES, a_config

POOLS = """
pools:
  own:   {kind: shard, at: ["a:1", "b:1", "c:1"]}
  far:   {kind: vllm, at: ["http://a:1"], models: {big: org/big}}
  found: {kind: vllm, at: ["dns://engines:8000"], model: small}
"""


def test_each_pool_has_as_many_as_the_file_names_and_one_where_they_are_found() -> None:
    config = a_config(POOLS)
    assert fleet_of(config, machines_of(config, {}), counts={}).counts == {"own": 3, "far": 1, "found": 1}
    assert fleet_of(config, machines_of(config, {}), counts={"found": 7}).counts["found"] == 7


def test_shards_with_a_model_that_the_file_does_not_name_serve_requested_models_that_no_other_serves() -> None:
    config = a_config(POOLS)
    machines = machines_of(config, {})
    assert fleet_of(config, machines, counts={}, asked_for=["big", "llama"]).models(config) == ["llama", "big", "small"]
    assert fleet_of(config, machines, counts={}).models(config) == [USUAL_MODEL, "big", "small"]


def test_a_count_for_a_pool_that_is_not_there_is_refused() -> None:
    config = a_config(POOLS)
    with pytest.raises(InvalidRequest, match=r"there is no pool 'fund' .did you mean 'found'"):
        fleet_of(config, machines_of(config, {}), counts={"fund": 2})


def test_the_key_of_a_simulated_tenant_is_its_name_and_nothing_is_shared_or_logged() -> None:
    config = with_named_keys(a_config(TWO_CLASSES + "store: {redis: 'redis://r:6379'}\n"))
    assert identity_of("labs", config, KeyRing(None, clock=lambda: 0.0)).tenant.name == "labs"
    assert config.store.redis is None
    assert config.server.decision_log is None

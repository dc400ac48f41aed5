"""The profile: how fast the backends of each pool are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from policies.errors import ConfigError
from shards.sched.cost import StepShape, prefill_shape
from simulation.speed import OTHERS, Machine, Speed, machines_of, read_profile
from tests.simulation.scene import a_config, written

POOLS = "pools:\n  own: {kind: shard, at: ['a:1'], models: {m: m}}\n  far: {kind: vllm, at: ['http://a:1'], model: m}\n"


def test_a_step_takes_what_its_tokens_take() -> None:
    speed = Speed(step_s=1.0, token_s=0.1, pair_s=0.01, sequence_s=0.5, context_s=0.001)
    shape = prefill_shape(100, 10) + StepShape(2, 0.0, 300)
    assert speed.seconds(shape, decoding=2) == pytest.approx(1.0 + 10 * 0.1 + 1050 * 0.01 + 2 * 0.5 + 300 * 0.001)


def test_a_profile_has_only_differences(tmp_path: Path) -> None:
    config = a_config(POOLS)
    profile = read_profile(written(tmp_path / "p", "far: {step_ms: 5, token_us: 20, kv_tokens: 100k}"), config)
    machines = machines_of(config, profile)
    assert machines["own"] == Machine()
    assert (machines["far"].speed.step_s, machines["far"].speed.pair_s) == (0.005, Speed().pair_s)
    assert machines["far"].blocks == 1562
    assert (machines["far"].ranks, machines["far"].tells_load) == (False, False)


def test_backends_of_other_kinds_plan_by_tokens_and_report_only_what_the_profile_says(tmp_path: Path) -> None:
    config = a_config(POOLS)
    assert machines_of(config, {})["far"] == OTHERS
    assert OTHERS.options.step.batch_tokens == 8192
    machines = read_profile(written(tmp_path / "p", "far: {tells_cache: true}"), config)
    assert machines["far"].tells_cache


def test_a_link_is_in_gigabytes_and_milliseconds(tmp_path: Path) -> None:
    config = a_config(POOLS)
    assert machines_of(config, {})["own"].link_bytes_s == 0.0
    text = "own: {link_gb_s: 12.5, link_ms: 2, token_kib: 40}\nfar: {link_gb_s: 1}"
    machines = read_profile(written(tmp_path / "p", text), config)
    own, far = machines["own"], machines["far"]
    assert (own.link_bytes_s, own.link_s, own.token_bytes) == (12.5e9, 0.002, 40_960)
    assert (far.link_bytes_s, far.link_s, far.token_bytes) == (1e9, 0.005, 131_072)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("owm: {step_ms: 1}", "p:1: owm: there is no pool in the SLA file 'owm' .did you mean 'own'"),
        ("own:\n  tokn_us: 1", "p:2: own.tokn_us: there is no 'tokn_us' here .did you mean 'token_us'"),
        ("own: {step_ms: fast}", "own.step_ms: must be a number"),
        ("own: {kv_tokens: 63}", "own.kv_tokens: is less than one block of 64 tokens"),
        ("own: {step_ms: 0, token_us: 0}", "own: takes no time"),
        ("own: {step_budget_ms: 0}", "own.step_budget_ms: must be above zero"),
    ],
)
def test_every_mistake_in_a_profile_is_reported_with_its_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_profile(written(tmp_path / "p", text), a_config(POOLS))


def test_a_missing_profile_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_profile(tmp_path / "p", a_config(POOLS))


def test_the_linked_profile_of_the_example_differs_only_by_its_link() -> None:
    example, config = Path(__file__).parents[2] / "examples" / "capacity", a_config(POOLS)
    plain, linked = (read_profile(example / f"l4-{name}.yaml", config)["own"] for name in ("profile", "linked"))
    assert linked == replace(plain, link_bytes_s=25e9, token_bytes=65_536)

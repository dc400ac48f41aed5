"""A config.yaml of LiteLLM as an SLA file that is sound, with a reason for everything that is not in it."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.keys import hash_of
from policies.nouns import FixedBudget, Limits
from policies.quota.prices import Prices
from policies.sla.config import Config
from policies.sla.parse import parse
from router.start.commands.from_litellm import sla_file_of

SECRETS = {"OPENAI_API_KEY": "a", "AZURE_API_KEY": "b", "REDIS_URL": "redis://h/0", "DATABASE_URL": "postgresql://h/d"}


def written(text: str, **lists: Any) -> tuple[str, Config]:
    file = sla_file_of(yaml.safe_load(text), environment={"BASE": "http://vllm-9:8000"}, **lists)
    return file, parse(file, source="sla.yaml", environment=SECRETS)


MODELS = """
model_list:
  - model_name: llama
    litellm_params:
      {model: hosted_vllm/meta/Llama, api_base: "http://vllm-0:8000/v1", input_cost_per_token: 2.0e-7,
       output_cost_per_token: 6.0e-7, cache_read_input_token_cost: 2.0e-8}
  - {model_name: llama, litellm_params: {model: hosted_vllm/meta/Llama, api_base: "http://vllm-1:8000/v1"}}
  - {model_name: llama, litellm_params: {model: openai/served, api_base: os.environ/BASE}}
  - {model_name: big, litellm_params: {model: gpt-5, api_key: sk-in-plain-text, rpm: 3}, tpm: 20000}
  - {model_name: big, litellm_params: {model: azure/of-ours, api_base: "https://us.openai.azure.com/", api_key: os.environ/AZURE_API_KEY}}
  - {model_name: claude, litellm_params: {model: anthropic/claude-5, api_key: os.environ/OPENAI_API_KEY}}
"""  # noqa: E501 - as it is written there


def test_deployments_become_pools_with_their_prices() -> None:
    file, config = written(MODELS)
    kinds = {name: (pool.kind, pool.at, dict(pool.models)) for name, pool in config.pools.items()}
    assert kinds == {
        "hosted-vllm": ("vllm", ("http://vllm-0:8000",), {"llama": "meta/Llama"}),
        "hosted-vllm-2": ("vllm", ("http://vllm-1:8000",), {"llama": "meta/Llama"}),
        "openai": ("openai_compatible", ("http://vllm-9:8000",), {"llama": "served"}),
        "openai-2": ("openai", ("https://api.openai.com/v1",), {"big": "gpt-5"}),
        "azure": ("azure", ("https://us.openai.azure.com",), {"big": "of-ours"}),
        "anthropic": ("anthropic", ("https://api.anthropic.com",), {"claude": "claude-5"}),
    }
    assert config.prices.of("llama", "own") == Prices(200_000, 20_000, 600_000)
    assert "sk-in-plain-text" not in file
    assert "model_list[3].litellm_params.api_key: secrets do not stand in the file: set OPENAI_API_KEY" in file
    assert "model_list[3].tpm: a backend has no rate limit" in file


def test_what_no_pool_can_be_is_named_with_a_reason() -> None:
    file, _ = written("""
model_list:
  - {model_name: "*", litellm_params: {model: "openai/*"}}
  - {model_name: b, litellm_params: {model: bedrock/x}}
  - {model_name: c, litellm_params: {model: hosted_vllm/x, api_base: os.environ/UNSET}}
  - {model_name: d}
router_settings: {num_retries: 2, made_up: true}
guardrails: [{guardrail_name: g}]
""")
    for line in (
        "model_list[0] (*): a pool names its models one by one",
        "model_list[1] (b): no kind of pool speaks to bedrock",
        "model_list[2] (c): its api_base is not known",
        "router_settings.num_retries: requests go to other backends",
        "router_settings.made_up: has no counterpart",
        "guardrails: the router changes no prompts",
    ):
        assert line in file


def test_keys_and_teams_keep_their_limits_and_clients_their_keys() -> None:
    team = {"team_id": "t-1", "team_alias": "QA Bot", "max_budget": 10, "budget_duration": "1d", "rpm_limit": 60}
    key = {"token": hash_of("sk-theirs"), "team_id": "t-1", "key_alias": "ci", "max_budget": 2.5, "soft_budget": 1}
    mine = {"token": "b" * 64, "team_id": None, "budget_duration": "30d", "max_budget": 3, "tpm_limit": 1_000}
    _, config = written(MODELS, teams=[{**team, "models": ["llama"]}], keys=[key, mine])
    bot, personal = config.tenants["QA-Bot"], config.tenants["personal"]
    assert config.tenant_by_key_hash[hash_of("sk-theirs")] is bot
    assert bot.limits == Limits(requests_per_minute=60, cost_per_day=10_000_000, currency="USD")
    assert bot.models == {"llama"}
    assert bot.key_limits[hash_of("sk-theirs")].fixed == (
        FixedBudget("total", 2_500_000),
        FixedBudget("soft-total", 1_000_000, is_soft=True),
    )
    assert personal.key_limits["b" * 64] == Limits(tokens_per_minute=1_000, cost_per_month=3_000_000, currency="USD")


def test_limits_that_can_never_be_reached_are_left_out_and_named() -> None:
    team = {"team_id": "t", "max_budget": 10, "budget_duration": "1d", "soft_budget": 10}
    key = {"token": "a" * 64, "team_id": "t", "max_budget": 20, "budget_duration": "1d", "key_alias": "k"}
    file, config = written(MODELS, teams=[team], keys=[key])
    assert config.tenants["t"].key_limits == {}
    assert "k.budget_per_day: 20 USD is above the 10 USD" in file
    assert "team t.soft_budget: is not below max_budget" in file


def test_limits_beyond_what_the_file_can_have_are_left_out_and_named() -> None:
    key = {"token": "a" * 64, "key_alias": "k", "max_budget": 4_000_001, "rpm_limit": 10**16}
    file, config = written(MODELS, teams=[], keys=[key])
    assert "k.max_budget: a budget is at most 4000000 USD" in file
    assert "k.rpm_limit: is more than a limit can be" in file
    assert config.tenants["personal"].key_limits == {}


def test_blocked_keys_and_what_is_no_key_are_left_out() -> None:
    keys = [{"token": "a" * 64, "blocked": True, "key_alias": "gone"}, {"token": "sk-...", "key_alias": "hidden"}]
    file, config = written(MODELS, keys=[*keys, {"token": "c" * 64, "expires": "2027-01-01", "key_alias": "late"}])
    assert config.tenant_by_key_hash.keys() == {"c" * 64}
    assert "gone.blocked: a blocked key or team is left out" in file
    assert "hidden.token: is no SHA-256 of a key" in file
    assert "late.expires: a key in the file has no end" in file


def test_the_budget_of_the_proxy_binds_everything_and_each_end_user_has_its_own() -> None:
    settings_ = "litellm_settings: {max_budget: 100, budget_duration: 30d, max_end_user_budget: 0.5}"
    _, config = written(f"{MODELS}\n{settings_}\ngeneral_settings: {{master_key: sk-1234}}")
    (tenant,) = config.tenants.values()
    assert tenant.key_hashes == {hash_of("sk-1234")}
    assert tenant.organization is not None
    assert tenant.organization.limits == Limits(cost_per_month=100_000_000, currency="USD")
    assert tenant.user_limits.fixed == (FixedBudget("total", 500_000),)


def test_redis_and_the_database_become_stores() -> None:
    general = 'general_settings: {database_url: "postgresql://u:secret@h/d"}'
    file, config = written(f"{MODELS}\n{general}\nrouter_settings: {{redis_host: redis}}")
    assert "secret" not in file.partition("# Not in this file")[0]
    assert config.usage is not None
    assert (config.usage.store, config.store.redis) == ("postgresql://h/d", "redis://h/0")


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PARAMETERS = st.fixed_dictionaries(
    {},
    optional={
        "model": st.sampled_from(["gpt-5", "hosted_vllm/x", "azure/y", "bedrock/z", "*", "", "anthropic/a b"]) | ANY,
        "api_base": st.sampled_from(["http://a:1/v1", "https://b", "no address", "os.environ/UNSET"]) | ANY,
        "api_key": st.sampled_from(["os.environ/OPENAI_API_KEY", "sk"]),
        "input_cost_per_token": st.floats(0, 1e-4) | st.text(max_size=4),
        "max_parallel_requests": st.integers(1, 100),
    },
)
DEPLOYMENTS = st.fixed_dictionaries(
    {"model_name": st.sampled_from(["m", "n", "a b", ""]), "litellm_params": PARAMETERS}
)
LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "max_budget": st.decimals(0, 10**5, places=7) | ANY,
        "soft_budget": st.floats(0.01, 100),
        "budget_duration": st.sampled_from(["1h", "1d", "7d", "30d", "10d", "soon"]),
        "rpm_limit": st.integers(-1, 10**20),
        "team_id": st.sampled_from(["a", "b", "c d"]),
        "token": st.sampled_from(["a" * 64, "b" * 64, "sk"]),
        "models": st.lists(st.text(max_size=5), max_size=2),
        "key_alias": st.text(max_size=8),
    },
)


@settings(max_examples=60, deadline=None)
@given(
    models=st.lists(DEPLOYMENTS, max_size=4),
    keys=st.lists(LIMITS, max_size=3, unique_by=lambda key: key.get("token")),
    teams=st.lists(LIMITS, max_size=2, unique_by=lambda team: team.get("team_id")),
    whole=LIMITS,
    more=st.dictionaries(st.text(max_size=8), ANY, max_size=3),
)
def test_whatever_is_in_it_the_file_is_sound(
    models: list[Any], keys: list[Any], teams: list[Any], whole: dict[str, Any], more: dict[str, Any]
) -> None:
    config = {**more, "model_list": models, "litellm_settings": whole}
    file = sla_file_of(config, keys=keys, teams=teams, environment={})
    parse(file, source="sla.yaml", environment={**SECRETS, "ANTHROPIC_API_KEY": "x", "HOSTED_VLLM_API_KEY": "x"})


def test_amounts_stay_exact() -> None:
    price = "{model: hosted_vllm/x, api_base: http://a:1, input_cost_per_token: 1.23456789e-6}"
    _, config = written(f"model_list: [{{model_name: x, litellm_params: {price}}}]")
    assert config.prices.of("x", "").uncached == Decimal("1.234568") * 10**6

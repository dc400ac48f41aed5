from dataclasses import replace

import pytest

from policies.errors import ConfigError
from policies.health import HealthRules
from policies.sla.parse import parse
from policies.sla.sources import DnsName, KubernetesService, SrvName, is_source, read_source
from policies.timeouts import Bounds, Timeouts, timeouts_of


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("dns://shards.default:7001", DnsName("shards.default", 7001)),
        ("srv://_grpc._tcp.shards.default", SrvName("_grpc._tcp.shards.default")),
        ("k8s://default/shards:grpc", KubernetesService("default", "shards", "grpc")),
        ("k8s://default/shards:7001", KubernetesService("default", "shards", "7001")),
    ],
)
def test_a_source_is_read_and_written_alike(text: str, source: object) -> None:
    assert is_source(text)
    assert read_source(text) == source
    assert str(source) == text


@pytest.mark.parametrize(
    "text", ["dns://shards", "dns://:80", "dns://a:0", "dns://a:70000", "srv://", "k8s://shards:80", "k8s://a/B:80"]
)
def test_what_is_no_source_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be dns|port beyond"):
        read_source(text)


def a_pool(pool: str) -> str:
    return (
        f"classes: {{chat: {{}}}}\npools: {{own: {pool}}}\nrules: [{{class: chat}}]\nserver: {{admin: '127.0.0.1:1'}}\n"
    )


def test_a_pool_mixes_addresses_and_sources_and_has_rules_of_health() -> None:
    pool = parse(
        a_pool("{at: ['a:1', 'dns://b:2', 'k8s://c/d:e'], register: true, health: {failures: 5, slow_start: 30s}}")
    ).pools["own"]
    assert pool.at == ("a:1",)
    assert pool.sources == (DnsName("b", 2), KubernetesService("c", "d", "e"))
    assert (pool.register, pool.is_found) == (True, True)
    assert pool.health == HealthRules(failures=5, slow_start_s=30.0)


def test_timeouts_have_bounds_in_the_file_else_those_of_the_kind() -> None:
    own = parse(a_pool("{at: 'a:1', health: {first_byte: 1s..2m, between_tokens: 30s}}")).pools["own"]
    assert own.health.timeouts == Timeouts(Bounds(1.0, 120.0), Timeouts().first_token, Bounds(30.0, 30.0))
    rented = parse(a_pool("{kind: openai, model: m, at: 'https://a', health: {first_token: 9s..9m}}")).pools["own"]
    assert rented.health.timeouts == replace(timeouts_of("openai"), first_token=Bounds(9.0, 540.0))


def test_what_is_found_gets_a_url_where_its_kind_has_one() -> None:
    own = parse(a_pool("{at: 'dns://b:2'}")).pools["own"]
    other = parse(a_pool("{kind: vllm, model: m, at: 'dns://b:2'}")).pools["own"]
    assert own.reachable("10.0.0.1:2") == "10.0.0.1:2"
    assert other.reachable("10.0.0.1:2") == "http://10.0.0.1:2"
    assert other.reachable("https://10.0.0.1:2") == "https://10.0.0.1:2"


@pytest.mark.parametrize(
    ("pool", "why"),
    [
        ("{at: 'dns://b'}", "sla.yaml:2: pools.own.at: must be dns://name:port"),
        ("{at: ['dns://b:1', 'dns://b:1']}", "sla.yaml:2: pools.own: 'dns://b:1' is here twice"),
        ("{at: 'a:1', health: {first_byte: 9s..1s}}", "sla.yaml:2: pools.own.health.first_byte: has a floor above its"),
        ("{at: 'a:1', health: {failures: 0}}", "sla.yaml:2: pools.own.health.failures"),
        ("{at: 'a:1', health: {failure: 1}}", "there is no 'failure' here (did you mean 'failures'?)"),
        ("{at: 'a:1', register: maybe}", "pools.own.register: must be true or false"),
    ],
)
def test_mistakes_are_reported_where_they_are(pool: str, why: str) -> None:
    with pytest.raises(ConfigError) as mistake:
        parse(a_pool(pool))
    assert why in str(mistake.value)

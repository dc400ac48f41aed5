import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.nouns import USUAL_REUSE_BUDGET, Limits, Organization, ServiceClass, Team
from policies.rules import Range, Rule, When
from policies.sla.alerts import AlertSettings
from policies.sla.config import Config
from policies.sla.parse import default_config, parse
from policies.sla.pools import PoolSpec
from policies.sla.server import ServerSettings
from tests.policies.sla.examples import CATALOGUE

HASH = "sha256:" + "a" * 64
OTHER_HASH = "sha256:" + "b" * 64
EXAMPLES = [file.read_text() for file in sorted((Path(__file__).parents[3] / "examples").rglob("*.yaml"))]


def problems(text: str, environment: Mapping[str, str] | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        parse(text, environment=environment, catalogue=CATALOGUE)
    return caught.value.problems


def two_tenants(more: str = "", *, acme: str = "", labs: str = "") -> Config:
    return parse(f"tenants:\n  acme: {{keys: '{HASH}'{acme}}}\n  labs: {{keys: '{OTHER_HASH}'{labs}}}\n{more}")


def test_an_empty_file_is_one_open_tenant_one_class_and_two_local_shards() -> None:
    config = parse("")
    assert config.pools == {"own": PoolSpec("own", local=2, model="bundled")}
    assert config.anonymous == config.tenants["local"]
    assert config.classes == {"standard": ServiceClass("standard", rank=0)}
    assert config.rules == (Rule("standard"),)
    assert config.server == ServerSettings()


def test_without_a_file_the_command_line_chooses_model_and_shards() -> None:
    config = default_config(local=1, model="/models/qwen")
    assert config.pools == {"own": PoolSpec("own", local=1, model="/models/qwen")}
    assert set(config.policies) >= {
        "default",
        "round_robin",
        "least_load",
        "power_of_two",
        "session_hash",
    }


def test_classes_rank_in_the_order_of_the_file() -> None:
    config = parse(
        "classes:\n  chat: {ttft_p99: 800ms, tpot_p50: 40ms, weight: 8}\n"
        "  night: {deadline: 15m, preemptible: true, prefill_slice: 4k}\n"
        "  quick: {hedge: p95}\n  urgent: {hedge: p90, hedge_budget: 10%}\n"
    )
    assert config.classes == {
        "chat": ServiceClass("chat", 0, ttft_s=0.8, ttft_quantile=0.99, tpot_s=0.04, tpot_quantile=0.5, weight=8.0),
        "night": ServiceClass("night", 1, deadline_s=900.0, preemptible=True, prefill_slice_tokens=4000),
        "quick": ServiceClass("quick", 2, hedge_quantile=0.95, hedge_budget=0.05),
        "urgent": ServiceClass("urgent", 3, hedge_quantile=0.9, hedge_budget=0.1),
    }


def test_a_tenant_is_found_by_the_hash_of_its_key() -> None:
    config = parse("tenants: {acme: {keys: ['${env:KEY}']}}", environment={"KEY": "secret\n"})
    assert config.tenant_by_key_hash[hashlib.sha256(b"secret").hexdigest()].name == "acme"
    assert config.anonymous is None


def test_a_key_of_a_team_leads_to_its_tenant_and_its_team() -> None:
    config = parse(
        f"tenants: {{acme: {{organization: e, end_users: {{required: true, limits: {{concurrent: 1}}}},"
        f" teams: {{search: {{keys: '{HASH}', limits: {{concurrent: 2}}}}}}}}}}\n"
        "organizations: {e: {limits: {concurrent: 9}}}"
    )
    acme = config.tenant_by_key_hash["a" * 64]
    assert acme.teams[acme.team_by_key["a" * 64]] == Team("search", Limits(concurrent=2))
    assert acme.organization == Organization("e", Limits(concurrent=9))
    assert (acme.user_limits, acme.needs_user) == (Limits(concurrent=1), True)


def test_alerts_and_what_is_secret_in_them_is_in_no_repr() -> None:
    config = parse(
        "alerts: {webhook: '${env:HOOK}', secret: '${env:SIGN}'}", environment={"HOOK": "https://h/x", "SIGN": "s"}
    )
    assert config.alerts == AlertSettings("https://h/x", "s")
    assert "https" not in repr(config.alerts)


def test_a_key_can_come_from_a_file_as_a_hash() -> None:
    config = parse("tenants: {acme: {keys: '${file:/run/key}'}}", read_file=lambda path: f"{HASH}\n")
    assert set(config.tenant_by_key_hash) == {"a" * 64}


def test_a_key_in_plain_text_is_refused_with_its_hash_and_is_not_repeated() -> None:
    (problem,) = problems("tenants:\n  acme: {keys: [my-secret]}")
    assert problem.startswith("sla.yaml:2: tenants.acme.keys[0]: a key must not stand in plain text")
    assert hashlib.sha256(b"my-secret").hexdigest() in problem
    assert "my-secret" not in problem


def test_a_secret_that_is_named_as_an_address_by_mistake_is_not_shown() -> None:
    (problem,) = problems("pools: {p: {kind: openai_compatible, at: '${env:KEY}'}}", {"KEY": "hush"})
    assert "hush" not in problem
    assert "${env:KEY}" in problem


def test_a_reference_may_lead_to_several_addresses() -> None:
    text = "pools: {p: {at: ['${env:SHARDS}', 'c:3']}}"
    assert parse(text, environment={"SHARDS": "a:1, b:2"}).pools["p"].at == ("a:1", "b:2", "c:3")


@pytest.mark.parametrize("shards", ["a:1,", "a:1,,b:2", "a:1 b:2", "a:1,b"])
def test_each_of_several_addresses_must_be_one(shards: str) -> None:
    (problem,) = problems("pools: {p: {at: '${env:SHARDS}'}}", {"SHARDS": shards})
    assert "the value of ${env:SHARDS} is not an address" in problem


def test_a_pools_key_is_not_in_its_repr() -> None:
    text = "pools: {p: {kind: openai_compatible, at: 'http://a:1', key: '${env:KEY}'}}"
    pool = parse(text, environment={"KEY": "hush"}).pools["p"]
    assert pool.key == "hush"
    assert "hush" not in repr(pool)


def test_tenants_share_a_cache_domain_only_if_the_file_says_so() -> None:
    apart = two_tenants()
    assert {tenant.domain for tenant in apart.tenants.values()} == {"acme", "labs"}
    joined = two_tenants(labs=", cache: {share_with: acme}")
    assert {tenant.domain for tenant in joined.tenants.values()} == {"acme"}


def test_sharing_goes_on_through_others() -> None:
    config = parse(
        "tenants:\n"
        f"  c: {{keys: 'sha256:{'c' * 64}', cache: {{share_with: [b]}}}}\n"
        f"  a: {{keys: 'sha256:{'a' * 64}'}}\n"
        f"  b: {{keys: 'sha256:{'b' * 64}', cache: {{share_with: [a]}}}}\n"
        f"  d: {{keys: 'sha256:{'d' * 64}'}}\n"
    )
    assert {name: tenant.domain for name, tenant in config.tenants.items()} == {"a": "a", "b": "a", "c": "a", "d": "d"}


def test_rules_are_read_in_order_with_every_condition() -> None:
    config = two_tenants(
        "classes: {chat: {}, rag: {}}\n"
        "rules:\n"
        "  - when: {tenant: acme, model: [m, n], priority: rag, prompt_tokens: ['>= 16k', '< 100'],\n"
        "           max_output_tokens: 4k..16k, headers: {X-Team: ads}}\n"
        "    class: rag\n"
        "    pools: [own]\n"
        "    policy: least_load\n"
        "  - {class: chat, pools: any}\n"
    )
    when = When(
        tenant=("acme",),
        model=("m", "n"),
        priority=("rag",),
        prompt_tokens=(Range(16000), Range(None, 99)),
        max_output_tokens=(Range(4000, 15999),),
        headers=(("x-team", ("ads",)),),
    )
    assert config.rules == (Rule("rag", when, ("own",), "least_load"), Rule("chat"))


def test_the_version_changes_with_the_text() -> None:
    assert parse("").version != parse("# a word\n").version
    assert parse("").version == parse("").version


def test_grpc_can_be_off() -> None:
    assert parse("server: {grpc: off}").server.grpc is None


def test_yaml_words_like_no_are_names_as_any_other() -> None:
    assert set(parse("classes: {no: {}, 'on': {}, 15: {}}").classes) == {"no", "on", "15"}


def test_anchors_spare_repetition() -> None:
    config = parse("classes:\n  a: &usual {ttft_p95: 1s}\n  b: *usual\n")
    assert config.classes["b"].ttft_s == 1.0


def test_all_mistakes_come_at_once_in_the_order_of_lines() -> None:
    text = "classes:\n  a: {wieght: 1}\npools:\n  p: {kind: shrad, local: 1}\nrules:\n  - {class: b}\n"
    assert problems(text) == (
        "sla.yaml:2: classes.a.wieght: there is no 'wieght' here (did you mean 'weight'?)",
        "sla.yaml:4: pools.p.kind: there is no kind of backend 'shrad' (did you mean 'shard'?)",
        "sla.yaml:6: rules[0].class: there is no class 'b' (known: a)",
    )


TENANT = "{anonymous: true}"

MISTAKES = {
    "clases: {}": "1: clases: there is no 'clases' here (did you mean 'classes'?)",
    "[1]": "1: must be a mapping",
    "a: [": "not YAML",
    "a: \x00": "not YAML",
    "a: \ud800": "not valid Unicode",
    "--- {}\n--- {}": "2: there is a second document",
    "a: *b": "no anchor 'b'",
    "a: &a [*a]": "contains itself",
    "[" * 40 + "]" * 40: "more than 32 levels",
    "#" + "x" * 2**20: "larger than",
    "\n".join(["a0: &a0 [x,x,x,x,x,x,x,x,x]"] + [f"a{i}: &a{i} [{f'*a{i - 1},' * 9}]" for i in range(1, 9)]): "aliases",
    "classes: {a: {}, a: {}}": "classes.a: is here twice, first in line 1",
    "classes: {[a]: {}}": "a key must be text",
    "classes: {null: {}}": 'classes: a key must be text (put it into quotes: "null")',
    "classes: !!python/object:os.system {}": "tags like",
    "classes: {a: {weight: 0}}": "classes.a.weight: must be above zero",
    "classes: {a: {weight: -1}}": "must be a number above zero, not '-1'",
    "classes: {a: {weight: [1]}}": "must be text, not a list",
    "classes: {a: {deadline: 5 weeks}}": "must be a duration",
    "classes: {a: {preemptible: maybe}}": "must be true or false",
    "classes: {a: {prefill_slice: 1.5}}": "must be a whole number",
    "classes: {a: {hedge: p93}}": "must be one of p50, p90, p95, p99, not 'p93'",
    "classes: {a: {ttft_p95: 1s, ttft_p50: 1s}}": "a class has one target",
    "classes: {a b: {}}": "'a b' is no name",
    "classes: 3": "must be a mapping (name: value), not '3'",
    "tenants: {a: {}}": "has no keys",
    f"tenants: {{unknown: {{keys: '{HASH}'}}}}": "tenants.unknown: a tenant cannot be called 'unknown'",
    f"tenants: {{a: {{keys: '{HASH}', organization: x}}}}": "there is no organization 'x'",
    f"tenants: {{a: {{keys: '{HASH}', organization: exmple}}}}\n"
    "organizations: {example: {limits: {concurrent: 1}}}": "did you mean 'example'",
    f"tenants: {{a: {{keys: '{HASH}', limits: {{budget_per_day: 5, soft_budget_per_day: 5}}}}}}": (
        "tenants.a.limits.soft_budget_per_day: must be below budget_per_day"
    ),
    "alerts: {webhook: 'ftp://a'}": "alerts.webhook: must be a URL such as",
    "alerts: {webhook: 'https://a', secret: hush}": "a secret must not stand in the file",
    "alerts: {}": "alerts: has no webhook",
    "organizations: {example: {}}": "organizations.example: has no limit",
    f"tenants: {{a: {{keys: '{HASH}', organization: e, limits: {{concurrent: 2}}}}}}\n"
    "organizations: {e: {limits: {concurrent: 1}}}": "concurrent: is above the organization's 1",
    f"tenants: {{a: {{teams: {{t: {{keys: '{HASH}', limits: {{concurrent: 2}}}}}}, limits: {{concurrent: 1}}}}}}": (
        "tenants.a.teams.t.limits.concurrent: is above the tenant's own 1"
    ),
    f"tenants: {{a: {{keys: '{HASH}', teams: {{t: {{keys: '{HASH}'}}}}}}}}": "the same key is here twice",
    f"tenants: {{a: {{teams: {{t: {{keys: '{HASH}'}}}}}}, b: {{keys: '{HASH}'}}}}": "tenants.b: has a key that 'a' has",
    f"tenants: {{a: {{keys: '{HASH}', limits: {{concurrent: 1}}, end_users: {{limits: {{concurrent: 2}}}}}}}}": (
        "tenants.a.end_users.limits.concurrent: is above the tenant's own 1"
    ),
    f"tenants: {{a: {{keys: '{HASH}', models: [m], "
    "teams: {t: {limits: {models: {n: {concurrent: 1}}}}}}}": "the tenant may not use this model",
    "server: {keys_file: k}\nstore: {redis: 'redis://h:1'}": "server.keys_file: issued keys are stored in store.redis",
    "tenants: {a: {keys: []}}": "empty list",
    "tenants: {a: {keys: 'sha256:12'}}": "64 hexadecimal digits",
    "tenants: {a: {keys: '${env:NOPE}'}}": "the environment variable NOPE is not set",
    "tenants: {a: {keys: '${file:/x}'}}": "files cannot be read here",
    "tenants: {a: {keys: 'x${env:NOPE}'}}": "with nothing around it",
    f"tenants: {{a: {TENANT}, b: {TENANT}}}": "belong to 'a' already",
    f"tenants: {{a: {{keys: '{HASH}'}}, b: {{keys: '{HASH}'}}}}": "tenants.b: has a key that 'a' has too",
    "tenants: {a: {anonymous: true, classes: [x]}}": "there is no class 'x'",
    "tenants: {a: {anonymous: true, cache: {share_with: [b]}}}": "there is no tenant 'b'",
    "tenants: {a: {anonymous: true, limits: {concurrent: 0}}}": "must be above zero",
    "pools: {any: {local: 1}}": "cannot be called 'any'",
    "pools: {p: {}}": "has no backends",
    "pools: {p: {local: 1, at: 'a:1'}}": "not both",
    "pools: {p: {local: 65}}": "at most 64",
    "pools: {p: {kind: fake, local: 1}}": "only shards are started locally",
    "pools: {p: {at: 'a'}}": "must be host:port",
    "pools: {p: {at: 'a:99999'}}": "must be host:port",
    "pools: {p: {at: ['a:1', 'a:1']}}": "is here twice",
    "pools: {p: {kind: openai_compatible, at: 'a:1'}}": "must be an address like http://",
    "pools: {p: {kind: openai_compatible, at: 'http://u:p@a:1'}}": "must not contain a user or a password",
    "pools: {p: {local: 1, key: abc}}": "a secret must not stand in the file",
    "rules: [{}]": "rules[0]: has no class",
    "rules: [{class: standard, pools: [x]}]": "there is no pool 'x' (known: own)",
    "rules: [{class: standard, when: {model: m}}]": "requests that match no rule",
    "rules: [{class: standard}, {class: standard, when: {model: m}}]": "is never reached: rules[0] in line 1",
    "rules: [{class: standard, when: {prompt_tokens: 5}}]": "must be a comparison",
    "rules: [{class: standard, when: {prompt_tokens: 5..4}}]": "is empty",
    "rules: [{class: standard, when: {prompt_tokens: '< 0'}}]": "below zero",
    "rules: [{class: standard, when: {tenant: []}}]": "empty list",
    "rules: [{class: standard}, {class: standard, when: {stream: maybe}}]": "no value of stream 'maybe' (known: ",
    "rules: [{class: standard, when: {stream: true}}]": "requests that match no rule: stream false",
    "policies: {x: {filter: healty}}": "no filter 'healty' (did you mean 'healthy'?)",
    "policies: {x: {filter: [{has_room: {tokens: some}}]}}": "has_room.tokens: must be a number",
    "policies: {x: {filter: [{has_room: {}, healthy: {}}]}}": "must be one filter",
    "policies: {x: {score: {cache_overlp: 3}}}": "policies.x.score.cache_overlp: there is no 'cache_overlp' here",
    "policies: {x: {pick: bst}}": "no pick 'bst' (did you mean 'best'?)",
    "policies: {x: {pick: {best_of: {sample: 0}}}}": "must be above zero",
    "server: {http: 80}": "must be host:port",
    "server: {max_body: 16 apples}": "must be a size",
    "server: {memory: 511MiB}": "is too little for requests of max_body (at least 32 times as much)",
    "server: {memory: 1GiB, max_body: 33MiB}": "is too little for requests of max_body",
    "server: {cors: {origins: 'https://app.example.com/'}}": "must be scheme://host or scheme://host:port",
    "server: {cors: {origins: app.example.com}}": "must be scheme://host or scheme://host:port",
    "server: {cors: {}}": "has no origins",
}


@pytest.mark.parametrize("text", MISTAKES, ids=lambda text: text[:50].encode("ascii", "replace").decode())
def test_each_mistake_has_a_line_and_a_sentence(text: str) -> None:
    found = problems(text)
    assert any(MISTAKES[text] in problem for problem in found), found
    assert all(problem.startswith("sla.yaml:") and problem.split(":")[1].isdigit() for problem in found)


def test_a_broken_condition_brings_no_other_complaints() -> None:
    (problem,) = problems("rules:\n  - {when: {tenannt: local}, class: standard}\n  - {class: standard}\n")
    assert "did you mean 'tenant'?" in problem


def test_rules_for_every_value_of_a_fact_leave_no_request_without_a_rule() -> None:
    text = "classes: {a: {}, b: {}}\nrules: [{when: {stream: true}, class: a}, {when: {stream: false}, class: b}]\n"
    assert len(parse(text).rules) == 2


def test_a_rule_behind_one_without_conditions_is_reached_by_tenants_without_that_rules_class() -> None:
    rest = "classes: {chat: {}, night: {}}\nrules: [{class: chat}, {class: night}]\n"
    assert len(two_tenants(rest, labs=", classes: night").rules) == 2
    with pytest.raises(ConfigError, match="is never reached"):
        two_tenants(rest)


def test_a_tenant_that_no_rule_serves_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="no rule gives tenant 'labs' a class"):
        two_tenants("classes: {chat: {}, night: {}}\nrules: [{class: chat}]\n", labs=", classes: night")


def test_a_file_that_cannot_be_read_is_a_mistake_in_its_line() -> None:
    def broken(path: str) -> str:
        raise OSError(f"{path} is not there")

    with pytest.raises(ConfigError, match=r"sla.yaml:2: .*cannot read /x"):
        parse("tenants:\n  a: {keys: '${file:/x}'}", read_file=broken)


def refused_or_config(text: str) -> None:
    found: tuple[str, ...] = ()
    try:
        config = parse(text, environment={"RAG_KEY": "a", "VLLM_KEY": "b"}, read_file=lambda path: path)
    except ConfigError as error:
        found, config = error.problems, None
    assert config.rules if config else found
    assert all(problem.startswith("sla.yaml:") for problem in found)


KEYS = (
    *("classes", "tenants", "rules", "pools", "policies", "server", "when", "class", "keys", "cache", "x", "filter"),
    *("score", "pick", "at", "options", "models", "limits", "headers", "share_with", "a"),
)
YAML_SIGNS = st.text(st.sampled_from("abc019:{}[],-&*!|>'\"#%@`? \n\t\\~.$\u00e9\x00\ud800\ufeff"), max_size=60)


@given(st.one_of(st.text(max_size=80), YAML_SIGNS))
@settings(max_examples=300, deadline=None)
def test_arbitrary_text_is_refused_politely(text: str) -> None:
    refused_or_config(text)


TREES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(max_size=6) | st.sampled_from(["any", "own", "12s", ">= 4k"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(TREES)
@settings(max_examples=300, deadline=None)
def test_arbitrary_trees_are_refused_politely(tree: object) -> None:
    import yaml

    refused_or_config(yaml.safe_dump(tree))


@given(st.sampled_from(EXAMPLES), st.lists(st.tuples(st.integers(0), st.integers(0, 3), YAML_SIGNS), max_size=4))
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_mutated_files_are_refused_politely(text: str, changes: list[tuple[int, int, str]]) -> None:
    for place, cut, put in changes:
        at = place % (len(text) + 1)
        text = text[:at] + put + text[at + cut :]
    refused_or_config(text)


@pytest.mark.parametrize(
    ("limits", "tokens"), [("", 256_000), ("{pinned_tokens: 2M}", 2_000_000), ("{pinned_tokens: 0}", 0)]
)
def test_a_tenant_keeps_as_many_tokens_of_prefixes_as_the_file_says(limits: str, tokens: int) -> None:
    config = parse(f"tenants: {{a: {{anonymous: true, limits: {limits or '{}'}}}}}")
    assert config.tenants["a"].pinned_tokens == tokens


@pytest.mark.parametrize("place", ["server: {keys_file: /keys}", "store: {redis: 'redis://h:1'}"])
def test_a_tenant_needs_no_key_in_the_file_where_keys_can_be_issued(place: str) -> None:
    config = parse(f"tenants: {{a: {{}}}}\n{place}\n")
    assert (config.tenants["a"].key_hashes, config.anonymous) == (frozenset(), None)


def test_a_key_may_have_limits_of_its_own() -> None:
    keys = (
        f'["sha256:{"a" * 64}", {{key: "sha256:{"b" * 64}", limits: {{requests_per_minute: 60, budget_per_day: 1M}}}}]'
    )
    tenant = parse(f"tenants: {{a: {{keys: {keys}, limits: {{requests_per_minute: 600}}}}}}").tenants["a"]
    assert tenant.key_hashes == {"a" * 64, "b" * 64}
    assert tenant.key_limits == {"b" * 64: Limits(requests_per_minute=60, cost_per_day=1_000_000)}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("{limits: {concurrent: 1}}", "tenants.a.keys: has no key"),
        ("{key: '%s', limits: {}}", "tenants.a.keys.limits: has no limit"),
        ("{key: '%s', limits: {concurrent: 9}}", "keys.limits.concurrent: is above the tenant's own 8"),
        ("{key: '%s', limit: {concurrent: 1}}", "there is no 'limit' here (did you mean 'limits'?)"),
        ("['%s', {key: '%s', limits: {concurrent: 1}}]", "tenants.a.keys[1]: the same key is here twice"),
        ("[{key: 'plain', limits: {concurrent: 1}}]", "keys[0].key: a key must not stand in plain text"),
    ],
)
def test_implausible_limits_of_a_key_are_reported(keys: str, sentence: str) -> None:
    text = keys.replace("%s", "sha256:" + "a" * 64)
    with pytest.raises(ConfigError) as caught:
        parse(f"tenants: {{a: {{keys: {text}, limits: {{concurrent: 8}}}}}}")
    assert sentence in str(caught.value)


def test_a_slip_is_one_mistake_and_not_all_that_follows_from_it() -> None:
    text = "clases: {chat: {ttft_p95: 1s}, late: {}}\nrules: [{clas: chat}]\non_miss: {chat: shed}"
    assert problems(text) == (
        "sla.yaml:1: clases: there is no 'clases' here (did you mean 'classes'?)",
        "sla.yaml:2: rules[0].clas: there is no 'clas' here (did you mean 'class'?)",
    )


def test_where_both_spellings_stand_the_right_one_is_read() -> None:
    assert len(problems("classes: {chat: {}}\nclases: {late: {}}\nrules: [{class: chat}]")) == 1


def test_without_a_list_of_kinds_a_pool_may_have_any() -> None:
    assert parse("pools: {a: {kind: lanes, at: 'http://a:1'}}").pools["a"].kind == "lanes"


def test_an_address_is_not_checked_if_its_kind_is_unknown() -> None:
    assert problems('pools: {a: {kind: openai-compatible, at: "http://a:1"}}') == (
        "sla.yaml:1: pools.a.kind: there is no kind of backend 'openai-compatible' (did you mean 'openai_compatible'?)",
    )


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("rules: [{when: {prompt_tokens: >= 16k}, class: a}]", '">= 16k"'),
        ("rules:\n  - when:\n      prompt_tokens: > 4k\n    class: a", '"> 4k"'),
        ("tenants: {a: {keys: [${env:KEY}]}}", '"${env:KEY}"'),
    ],
)
def test_values_that_need_quotes_are_reported(text: str, meant: str) -> None:
    (problem,) = problems(text)
    assert problem.endswith(f"(put it into quotes: {meant})")


@pytest.mark.parametrize("admin", ["0.0.0.0:8082", "10.0.0.7:8082"])
def test_an_operators_port_for_others_needs_keys_before_it_is_started(admin: str) -> None:
    (problem,) = problems(f"server: {{admin: '{admin}'}}")
    assert "server.admin: can be reached from other machines but has no keys" in problem
    parse(f"server: {{admin: '{admin}', admin_keys: '{HASH}'}}")


@pytest.mark.parametrize("admin", ["127.0.0.1:8082", "localhost:8082", "[::1]:8082"])
def test_an_operators_port_for_this_machine_alone_needs_none(admin: str) -> None:
    assert parse(f"server: {{admin: '{admin}'}}").server.admin == admin


SHARED = """
classes: {chat: {}}
pools: {a: {kind: fake, at: "x:1"}, b: {kind: fake, at: "y:1"}}
rules: [{class: chat, pools: %s}]
"""


@pytest.mark.parametrize(
    ("pools", "shares"),
    [
        ("{a: 95, b: 5}", (("a", 0.95), ("b", 0.05))),
        ("{a: 95%, b: 5%}", (("a", 0.95), ("b", 0.05))),
        ("{a: 3, b: 1}", (("a", 0.75), ("b", 0.25))),
    ],
)
def test_pools_of_a_rule_may_have_shares(pools: str, shares: tuple[tuple[str, float], ...]) -> None:
    (rule,) = parse(SHARED % pools).rules
    assert rule.pools == ("a", "b")
    assert rule.split is not None
    assert (rule.split.shares, rule.split.stable, rule.split.rolls_back) == (shares, "a", True)


def test_a_pool_without_a_part_is_not_used_and_one_alone_needs_no_share() -> None:
    (rule,) = parse(SHARED % "{a: 0, b: 5}").rules
    assert (rule.pools, rule.split) == (("b",), None)


def test_the_rollback_of_shares_can_be_switched_off() -> None:
    (rule,) = parse(SHARED % "{a: 95, b: 5}, rollback: false").rules
    assert rule.split is not None
    assert not rule.split.rolls_back


@pytest.mark.parametrize(
    ("pools", "complaint"),
    [
        ("{a: 95, c: 5}", "there is no pool 'c'"),
        ("{a: 0, b: 0}", "no pool has a share"),
        ("{a: many, b: 5}", "must be a part in proportion to the others, like 95 or 5%, not 'many'"),
        ("[a, b], rollback: true", "needs pools with shares"),
    ],
)
def test_a_wrong_share_is_explained(pools: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        parse(SHARED % pools)


@pytest.mark.parametrize(
    ("written", "budget"), [("chunks", USUAL_REUSE_BUDGET), ("off", 1.0), ("10%", 0.1), ("0.25", 0.25), ("0", 0.0)]
)
def test_reuse_of_documents_is_a_budget_of_a_tenant_or_a_rule(written: str, budget: float) -> None:
    config = parse(f"classes: {{chat: {{}}}}\ntenants: {{a: {{anonymous: true, reuse: {written}}}}}\n")
    assert config.tenants["a"].reuse_budget == budget
    (rule,) = parse(f"classes: {{chat: {{}}}}\nrules: [{{class: chat, reuse: {written}}}]\n").rules
    assert rule.reuse_budget == budget


def test_without_a_word_nothing_is_reused() -> None:
    config = parse("classes: {chat: {}}\ntenants: {a: {anonymous: true}}\n")
    assert (config.tenants["a"].reuse_budget, config.rules[0].reuse_budget) == (None, None)


@pytest.mark.parametrize("written", ["some", "200%", "-1"])
def test_a_wrong_reuse_is_explained(written: str) -> None:
    with pytest.raises(ConfigError, match="must be chunks, off or the share to compute again, like 10%, not"):
        parse(f"classes: {{chat: {{}}}}\nrules: [{{class: chat, reuse: {written}}}]\n")

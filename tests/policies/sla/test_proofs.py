"""Mistakes that only the whole file shows: unused parts, limits that never hold, unknown names."""

from __future__ import annotations

import pytest

from policies.errors import ConfigError
from policies.sla import reach
from policies.sla.parse import examine, parse
from policies.sla.secrets import Outside

KEYS = [f"sha256:{digit * 64}" for digit in "ab"]


def doubts(text: str) -> tuple[str, ...]:
    return examine(text, source="sla.yaml", outside=Outside({})).doubts


def two(more: str) -> str:
    return f"tenants: {{acme: {{keys: '{KEYS[0]}'}}, labs: {{keys: '{KEYS[1]}', classes: [night]}}}}\n{more}"


def test_a_file_without_rules_leaves_no_doubt() -> None:
    assert doubts("classes: {chat: {}, night: {}}\npools: {own: {local: 1}, far: {local: 1}}\n") == ()


def test_an_unreachable_class_is_reported() -> None:
    (doubt,) = doubts("classes:\n  vip: {}\n  chat: {}\nrules: [{class: chat}]\n")
    assert doubt == "sla.yaml:2: classes.vip: no rule gives this class, and no priority leads to it"


def test_a_class_that_a_priority_can_lower_to_is_reached() -> None:
    assert doubts("classes: {chat: {}, night: {}}\nrules: [{class: chat}]\n") == ()
    asked = "rules: [{when: {priority: [chat, night]}, class: chat}, {class: chat}]\n"
    assert doubts("classes: {chat: {}, night: {}}\n" + asked) == ()


def test_a_priority_leads_nowhere_for_tenants_that_may_not_use_the_class() -> None:
    tenant = "tenants: {acme: {anonymous: true, classes: [chat]}}\n"
    assert doubts(f"classes: {{chat: {{}}, night: {{}}}}\n{tenant}rules: [{{class: chat}}]\n")[0].endswith(
        "classes.night: no rule gives this class, and no priority leads to it"
    )


def test_an_unreachable_pool_is_reported() -> None:
    pools = "classes: {chat: {ttft_p95: 1s}}\npools: {own: {local: 1}, far: {local: 1}}\n"
    (doubt,) = doubts(f"{pools}rules: [{{class: chat, pools: own}}]\n")
    assert doubt == "sla.yaml:2: pools.far: no rule and no spill names this pool, so nothing runs there"
    assert doubts(f"{pools}rules: [{{class: chat, pools: own}}]\non_miss: {{chat: {{spill: far}}}}\n") == ()
    assert doubts(f"{pools}rules: [{{class: chat, pools: any}}]\n") == ()


def test_an_unused_policy_of_the_file_is_reported() -> None:
    text = "policies: {default: {}, mine: {}}\nrules: [{class: standard}]\n"
    assert doubts(text) == ("sla.yaml:1: policies.mine: no rule uses this policy",)
    assert doubts(text.replace("class: standard", "class: standard, policy: mine")) == (
        "sla.yaml:1: policies.default: no rule uses this policy",
    )


def test_models_that_no_pool_names_are_reported_if_all_pools_name_theirs() -> None:
    pools = "pools: {p: {kind: openai_compatible, at: 'http://h:1', models: {big: x}, model: base}}\n"
    tenant = "tenants: {a: {anonymous: true, models: [bgi, base], limits: {models: {base: {concurrent: 1}}}}}\n"
    rules = "rules: [{when: {model: bsae}, class: standard}, {class: standard}]\n"
    assert doubts(pools + tenant) == (
        "sla.yaml:2: tenants.a.models: no pool names a model 'bgi' (did you mean 'big'?)",
    )
    assert doubts(pools + rules) == (
        "sla.yaml:2: rules[0].when.model: no pool names a model 'bsae' (did you mean 'base'?)",
    )
    assert (
        doubts(
            pools.replace("models: {big: x}, model: base", "key: '${env:K}'").replace(", key: '${env:K}'", "") + tenant
        )
        == ()
    )


def test_a_tenant_with_refused_requests_is_reported() -> None:
    text = two("classes: {chat: {}, night: {}}\nrules: [{when: {priority: night}, class: night}, {class: chat}]\n")
    (doubt,) = doubts(text)
    assert doubt.startswith("sla.yaml:3: rules: no rule gives these requests a class that their tenant may use")
    assert doubt.endswith("rejected: tenant labs, priority chat")
    assert doubts(text.replace("{class: chat}]", "{when: {tenant: acme}, class: chat}, {class: night}]")) == ()


def test_limits_that_are_never_reached_are_reported() -> None:
    tenant = "tenants: {a: {anonymous: true, limits: {concurrent: 10, models: {m: {concurrent: 9}}}}}\n"
    assert [doubt.split(": ")[1] for doubt in doubts(f"{tenant}server: {{max_concurrent: 8}}\n")] == [
        "tenants.a.limits.concurrent",
        "tenants.a.limits.models.m.concurrent",
    ]
    assert doubts(f"{tenant}server: {{max_concurrent: 10}}\n") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("classes: {a: {floor: 1%}}", "classes.a.floor: a floor has no effect on the class that is served first"),
        ("classes: {a: {hedge_budget: 1%}}", "classes.a.hedge_budget: has no effect without 'hedge'"),
        ("cost: {uncached: 1, cached: 2}", "cost.cached: a cached token costs more than an uncached one (1)"),
        ("cost: {cached: 2}", "cost.cached: a cached token costs more than an uncached one (1)"),
    ],
)
def test_implausible_numbers_are_reported(text: str, says: str) -> None:
    (doubt,) = doubts(text)
    assert says in doubt


LIMITED = "tenants: {a: {anonymous: true, models: [m], limits: {tokens_per_minute: 1M, %s}}}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("classes: {a: {}, b: {floor: 60%}, c: {floor: 0.5}}", "1: classes: the floors add up to 110%"),
        ("classes: {a: {ttft_p95: 2s, deadline: 1s}}", "classes.a.ttft_p95: is longer than the class's deadline"),
        ("classes: {a: {tpot_p99: 2s, deadline: 1s}}", "classes.a.tpot_p99: is longer than the class's deadline"),
        ("classes: {a: {prefill_slice: 0}}", "classes.a.prefill_slice: must be above zero"),
        ("cost: {uncached: 0, cached: 0, output: 0}", "cost: all prices are zero"),
        (LIMITED % "concurrent: 0", "limits.concurrent: must be above zero"),
        (LIMITED % "budget_per_day: 0", "limits.budget_per_day: must be above zero"),
        (
            LIMITED % "models: {m: {tokens_per_minute: 2M}}",
            "limits.models.m.tokens_per_minute: is above the tenant's own 1,000,000",
        ),
        (LIMITED % "models: {n: {concurrent: 1}}", "limits.models.n: the tenant may not use this model (it may use m)"),
        (LIMITED % "models: {m: {}}", "limits.models.m: has no limit (write one of requests_per_minute"),
        (LIMITED % "models: {m: {models: {}}}", "there is no 'models' here"),
        ("queue: {most: 0}", "queue.most: must be above zero"),
    ],
)
def test_numbers_that_do_not_add_up_are_mistakes(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert any(says in problem for problem in caught.value.problems), caught.value.problems


RULES = "classes: {chat: {}, night: {}}\n" + two("")


TAKEN = """[
    {when: {prompt_tokens: "< 4k"}, class: chat}, {when: {prompt_tokens: ">= 4k"}, class: night},
    {when: {tenant: acme}, class: chat}, {class: night}]"""


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        (
            TAKEN,
            "rules[2]: is never reached: rules[0] in line 4 and rules[1] together take all its requests",
        ),
        (
            '[{when: {prompt_tokens: "< 4k", uncached_tokens: "> 5k"}, class: chat}, {class: night}]',
            "rules[0]: is never reached: uncached_tokens are never more than prompt_tokens",
        ),
        (
            "[{when: {tenant: labs}, class: chat}, {class: night}]",
            "rules[0]: is never reached: none of its tenants may use class",
        ),
        (
            '[{when: {prompt_tokens: "< 4k"}, class: night}]',
            "rules: there are requests that match no rule: tenant acme, prompt_tokens at least 4,000",
        ),
        (
            "[{when: {headers: {X-A: b, x-a: c}}, class: chat}, {class: night}]",
            "rules[0].when.headers.x-a: is here twice",
        ),
    ],
)
def test_rules_that_are_not_reached_or_leave_requests_over_are_mistakes(rules: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(f"{RULES}rules: {rules}\n")
    assert any(says in problem for problem in caught.value.problems), caught.value.problems


def test_ranges_that_cover_everything_together_need_no_rule_without_condition() -> None:
    rules = '[{when: {prompt_tokens: "< 4k"}, class: night}, {when: {prompt_tokens: [4k..9k, ">= 9k"]}, class: night}]'
    assert len(parse(f"classes: {{night: {{}}}}\nrules: {rules}\n").rules) == 2


def test_a_model_that_no_tenant_of_a_rule_may_use_never_comes() -> None:
    tenant = "tenants: {a: {anonymous: true, models: [m]}}\n"
    with pytest.raises(ConfigError, match="none of its tenants may use its models"):
        parse(f"{tenant}rules: [{{when: {{model: n}}, class: standard}}, {{class: standard}}]\n")


def test_a_thousand_mistakes_are_reported_a_hundred_at_a_time() -> None:
    with pytest.raises(ConfigError) as caught:
        parse("".join(f"nonsense-{number}: 1\n" for number in range(1000)))
    assert len(caught.value.problems) == 101
    assert caught.value.problems[-1] == "sla.yaml:101: and 900 more from here on"


def test_more_rules_than_can_be_proven_in_seconds_are_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_MOST_CUTS", 50)
    rules = "".join(f"  - {{when: {{headers: {{h: v{number}}}}}, class: standard}}\n" for number in range(50))
    assert any(
        "too many different conditions" in doubt for doubt in doubts(f"rules:\n{rules}  - {{class: standard}}\n")
    )


def test_a_pool_with_register_but_no_admin_port_is_reported() -> None:
    text = "classes: {chat: {}}\npools: {own: {register: true}}\nrules: [{class: chat}]\n"
    (doubt,) = doubts(text)
    assert doubt.startswith("sla.yaml:2: pools.own.register: backends announce themselves at the operators' port")
    assert not doubts(f"{text}server: {{admin: '127.0.0.1:9000'}}\n")


PROMPTS = "prompts: {kind: vllm, at: ['http://p:8000']}"


def with_prefill(pool: str, others: str = PROMPTS) -> str:
    return f"pools:\n  answers: {pool}\n  {others}\n"


def test_a_pool_may_name_the_one_that_computes_its_prompts() -> None:
    config = parse(with_prefill("{kind: vllm, at: ['http://a:8000'], prefill: prompts}"))
    assert config.pools["answers"].prefill == "prompts"
    text = with_prefill("{kind: vllm, at: ['http://a:8000'], prefill: prompts}")
    assert doubts(f"{text}classes: {{chat: {{}}}}\nrules: [{{class: chat, pools: [answers]}}]\n") == ()


@pytest.mark.parametrize(
    ("pool", "others", "message"),
    [
        ("{kind: tgi, at: ['http://a:8000'], prefill: prompts}", PROMPTS, "kind tgi fetch no KV; only these do"),
        ("{kind: vllm, at: ['http://a:8000'], prefill: prompt}", PROMPTS, "no pool is called 'prompt'"),
        ("{kind: vllm, at: ['http://a:8000'], prefill: answers}", PROMPTS, "gives no answers and has no prefill"),
        (
            "{kind: vllm, at: ['http://a:8000'], prefill: prompts}",
            "prompts: {kind: vllm, at: ['http://p:8000'], prefill: answers}",
            "gives no answers and has no prefill",
        ),
        (
            "{kind: vllm, at: ['http://a:8000'], prefill: prompts}",
            "prompts: {kind: sglang, at: ['http://p:8000']}",
            "between backends of one kind",
        ),
    ],
)
def test_a_pool_that_cannot_compute_its_prompts_is_reported(pool: str, others: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(with_prefill(pool, others))


ISSUERS = "issuers: {corp: {issuer: 'https://x', audience: a}, far: {issuer: 'https://y', audience: a}}"
OWNERS_KEY, VIEWERS_KEY, OPERATORS_KEY = (
    f"{{key: 'sha256:{digit * 64}', role: {role}}}"
    for digit, role in (("c", "owner"), ("d", "viewer"), ("e", "operator"))
)


def guarded(*, rules: str = "", keys: str = "", admin: str = "127.0.0.1:8082", pool: str = "local: 1") -> str:
    lines = [
        "tenants: {acme: {anonymous: true}}",
        f"pools: {{own: {{{pool}}}}}",
        *([f"identity: {{{ISSUERS}, rules: [{rules}]}}"] if rules else []),
        f"server: {{admin: '{admin}'{f', admin_keys: [{keys}]' if keys else ''}}}",
    ]
    return "\n".join(lines) + "\n"


STAFF, OPS = "{when: {claims: {g: staff}}, role: viewer}", "{when: {claims: {g: ops}}, role: operator}"
LOCKED_OUT = "none of this file is an"


@pytest.mark.parametrize("admin", ["127.0.0.1:8082", "0.0.0.0:8082"])
@pytest.mark.parametrize(
    ("rules", "keys", "place", "missing"),
    [
        (STAFF, "", "sla.yaml:3: identity.rules", "operator's"),
        (OPS, "", "sla.yaml:3: identity.rules", "owner's"),
        ("", VIEWERS_KEY, "sla.yaml:3: server.admin_keys", "operator's"),
        ("", OPERATORS_KEY, "sla.yaml:3: server.admin_keys", "owner's"),
        (STAFF, OPERATORS_KEY, "sla.yaml:4: server.admin_keys", "owner's"),
        (f"{OPS}, {STAFF}", VIEWERS_KEY, "sla.yaml:4: server.admin_keys", "owner's"),
    ],
)
def test_a_file_that_gives_nobody_the_highest_role_is_doubted_with_what_to_add(
    rules: str, keys: str, place: str, missing: str, admin: str
) -> None:
    (doubt,) = doubts(guarded(rules=rules, keys=keys, admin=admin))
    assert doubt.startswith(f"{place}: the operators' port asks for a key or token also on this machine")
    assert f"{LOCKED_OUT} {missing}" in doubt
    assert "(write a key with role: owner in server.admin_keys, or a rule of identity with role: owner)" in doubt


@pytest.mark.parametrize(
    "text",
    [
        guarded(),
        guarded(keys=f"'{KEYS[0]}'"),
        guarded(keys=f"{OWNERS_KEY}, {VIEWERS_KEY}"),
        guarded(rules="{tenant: acme}"),
        guarded(rules=STAFF, keys=OWNERS_KEY),
        guarded(rules="{when: {claims: {g: boss}}, role: owner}, " + STAFF),
    ],
)
def test_a_file_with_an_owner_or_without_roles_locks_no_operator_out(text: str) -> None:
    assert doubts(text) == ()


def test_backends_that_nobody_lets_announce_themselves_are_reported() -> None:
    pool = "kind: vllm, register: true"
    found = doubts(guarded(rules=STAFF, pool=pool))
    assert "sla.yaml:2: pools.own.register: backends need the role operator to announce themselves" in found[0]
    assert not any("announce" in doubt for doubt in doubts(guarded(rules=OPS, pool=pool)))


OWNER = "role: owner}"


@pytest.mark.parametrize(
    ("first", "second", "is_doubted"),
    [
        ("{when: {claims: {g: staff}}, role: viewer}", "{when: {claims: {g: boss}}, " + OWNER, True),
        ("{when: {claims: {g: staff}}, role: viewer}", "{when: {issuer: corp}, " + OWNER, True),
        ("{when: {issuer: far}, role: viewer}", "{when: {issuer: corp}, " + OWNER, False),
        ("{when: {issuer: [far, corp]}, role: viewer}", "{when: {issuer: corp, claims: {g: a}}, " + OWNER, None),
        ("{when: {claims: {g: [a, b]}}, role: viewer}", "{when: {claims: {g: a}}, " + OWNER, None),
        ("{when: {claims: {g: [a, b]}}, role: viewer}", "{when: {claims: {g: [a, c]}}, " + OWNER, True),
        ("{when: {claims: {g: a}}, role: viewer}", "{when: {claims: {g: a, h: b}, issuer: corp}, " + OWNER, None),
        ("{when: {claims: {g: a, h: b}}, role: viewer}", "{when: {claims: {g: a}}, " + OWNER, True),
        ("{when: {claims: {g: a}}, tenant: acme}", "{when: {claims: {g: a}}, " + OWNER, False),
        ("{when: {claims: {g: a}}, " + OWNER, "{when: {claims: {g: b}}, role: viewer}", False),
    ],
)
def test_a_role_that_an_earlier_rule_keeps_from_its_tokens_is_reported(
    first: str, second: str, *, is_doubted: bool | None
) -> None:
    text = guarded(rules=f"{first}, {second}", keys=OWNERS_KEY)
    if is_doubted is None:
        with pytest.raises(ConfigError) as caught:
            doubts(text)
        (problem,) = caught.value.problems
        assert "identity.rules[1]: is never reached: a rule before it gives all its tokens a role" in problem
    else:
        found = doubts(text)
        assert len(found) == is_doubted
        assert all("is only a viewer's (put the higher role first" in doubt for doubt in found)


def test_an_issuers_file_of_keys_that_cannot_be_used_is_reported_where_files_are_there() -> None:
    text = guarded(rules="{tenant: acme}").replace("audience: a}", "audience: a, jwks: keys.json}", 1)
    outside = Outside({}, doubt_keys=lambda place: f"its file of keys cannot be read: {place}")
    (doubt,) = examine(text, source="sla.yaml", outside=outside).doubts
    assert doubt.startswith("sla.yaml:3: identity.issuers.corp.jwks: its file of keys cannot be read: keys.json")
    absent = Outside({}, doubt_keys=lambda _: "is not there", may_be_absent=True)
    assert examine(text, source="sla.yaml", outside=absent).doubts == ()


@pytest.mark.parametrize(("network", "is_doubted"), [("0.0.0.0/0", True), ("::/0", True), ("10.0.0.0/8", False)])
def test_proxies_that_are_every_address_are_reported(network: str, *, is_doubted: bool) -> None:
    text = f"server: {{trusted_proxies: ['192.0.2.1', '{network}']}}\n"
    assert [doubt[:40] for doubt in doubts(text)] == ["sla.yaml:1: server.trusted_proxies[1]: t"] * is_doubted


@pytest.mark.parametrize(("reuse", "is_doubtful"), [("chunks", True), ("10%", True), ("off", False)])
def test_approximate_kv_of_documents_is_said_to_be_experimental(reuse: str, is_doubtful: bool) -> None:
    said = doubts(f"tenants: {{a: {{anonymous: true, reuse: {reuse}}}}}\n")
    assert len([doubt for doubt in said if "tenants.a.reuse" in doubt and "is experimental" in doubt]) == is_doubtful

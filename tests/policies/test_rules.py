from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import InvalidRequest, PermissionDenied, UnknownModel
from policies.nouns import Tenant
from policies.rules import (
    BACKGROUND_RANK,
    FACTS,
    Facts,
    Mismatch,
    Range,
    Rule,
    When,
    classify,
    pools_within_reach,
    settled,
    stated,
    with_targets,
    yielding,
)
from policies.sla.config import Config
from policies.sla.parse import parse
from shards.sched import ranks

CONFIG = parse(
    "classes: {chat: {}, rag: {}, night: {}}\n"
    "rules:\n"
    "  - {when: {priority: night}, class: night, pools: own}\n"
    "  - {when: {prompt_tokens: '>= 16k'}, class: rag, policy: least_load}\n"
    "  - {class: chat}\n"
)
ACME = Tenant("acme", domain="acme")


def facts(**what: Any) -> Facts:
    return Facts(
        **{"tenant": ACME, "model": "m", "prompt_tokens": 10, "max_new_tokens": 10, "uncached_tokens": 5, **what}
    )


def class_of(config: Config = CONFIG, **what: Any) -> str:
    return classify(facts(**what), config).service_class.name


def test_the_first_rule_that_matches_wins() -> None:
    ruling = classify(facts(prompt_tokens=16000), CONFIG)
    assert (ruling.service_class.name, ruling.rank, ruling.policy, ruling.pools, ruling.rule) == (
        "rag",
        1,
        "least_load",
        None,
        2,
    )
    assert class_of(prompt_tokens=15999) == "chat"


def test_a_rule_can_match_on_the_priority_and_then_has_the_last_word() -> None:
    ruling = classify(facts(priority="night", prompt_tokens=20000), CONFIG)
    assert (ruling.service_class.name, ruling.pools, ruling.rule) == ("night", ("own",), 1)


def test_a_priority_lowers_the_rank_and_keeps_the_rules_pools_and_policy() -> None:
    ruling = classify(facts(priority="rag"), CONFIG)
    assert (ruling.service_class.name, ruling.policy, ruling.rule) == ("rag", "default", 3)


def test_a_priority_never_raises_the_rank() -> None:
    assert class_of(priority="chat", prompt_tokens=16000) == "rag"


def test_a_priority_that_the_tenant_may_not_use_changes_nothing() -> None:
    assert class_of(priority="rag", tenant=Tenant("a", "a", classes=frozenset({"chat"}))) == "chat"


def test_a_priority_that_is_no_class_is_refused_with_a_hint() -> None:
    with pytest.raises(InvalidRequest, match="did you mean 'night'") as caught:
        class_of(priority="nigth")
    assert caught.value.param == "priority"


def test_a_rule_with_a_class_that_the_tenant_may_not_use_is_skipped() -> None:
    assert class_of(prompt_tokens=16000, tenant=Tenant("a", "a", classes=frozenset({"chat"}))) == "chat"


def test_where_no_rule_is_left_permission_is_denied_with_a_hint() -> None:
    with pytest.raises(PermissionDenied, match="it may use night: ask for one"):
        class_of(tenant=Tenant("a", "a", classes=frozenset({"night"})))


def test_a_model_that_the_tenant_may_not_use_is_unknown_to_it() -> None:
    with pytest.raises(UnknownModel, match="it may use n"):
        class_of(tenant=Tenant("a", "a", models=frozenset({"n"})))


@pytest.mark.parametrize(
    ("when", "holds"),
    [
        (When(), True),
        (When(tenant=("labs", "acme")), True),
        (When(tenant=("labs",)), False),
        (When(model=("m",), tenant=("labs",)), False),
        (When(prompt_tokens=(Range(100), Range(None, 10))), True),
        (When(max_output_tokens=(Range(11),)), False),
        (When(headers=(("x-team", ("ads", "search")),)), True),
        (When(headers=(("x-team", ("search",)),)), False),
        (When(headers=(("x-other", ("ads",)),)), False),
        (When(metadata=(("team", ("search", "ads")),)), True),
        (When(metadata=(("team", ("ads",)),)), False),
        (When(metadata=(("x-team", ("ads",)),)), False),
        (When(stream=("true",)), False),
        (When(stream=("false",)), True),
    ],
)
def test_every_field_must_hold_and_any_entry_will_do(when: When, holds: bool) -> None:
    assert when.holds(facts(headers={"x-team": "ads"}, metadata={"team": "search"})) is holds


def test_metadata_that_does_not_match_is_named() -> None:
    when = When(metadata=(("team", ("ads",)), ("tier", ("pro",))))
    assert list(when.mismatches(facts(metadata={"team": "search"}))) == [
        Mismatch("metadata.team", ("ads",), "search"),
        Mismatch("metadata.tier", ("pro",), None),
    ]


def test_what_yields_goes_where_it_was_ruled_to_behind_every_class_and_gives_way() -> None:
    ruling = yielding(classify(facts(prompt_tokens=16000), CONFIG), CONFIG)
    assert (ruling.pools, ruling.policy, ruling.rule) == (None, "least_load", 2)
    assert (ruling.service_class.name, ruling.rank, ruling.service_class.preemptible) == ("night", 65536, True)
    assert ruling.service_class.prefill_slice_tokens == 256


def test_shards_and_router_mean_the_same_rank_by_background() -> None:
    assert BACKGROUND_RANK == ranks.BACKGROUND


def test_every_fact_that_is_not_basic_can_be_stated() -> None:
    for name in (name for name, fact in FACTS.items() if not fact.basic):
        assert name in {each.name for each in msgspec.structs.fields(Facts) if each.default is not msgspec.NODEFAULT}


def test_other_facts_are_stated_as_text() -> None:
    assert [stated(facts(), {"stream": value}).stream for value in ("true", "false", True)] == [True, False, True]
    assert stated(facts(stream=True), {}).stream


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"steam": "true"}, "there is no fact 'steam' to state"),
        ({"tenant": "labs"}, "there is no fact 'tenant' to state"),
        ({"stream": "perhaps"}, "the fact 'stream' is malformed"),
    ],
)
def test_a_fact_that_is_stated_wrongly_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        stated(facts(), given)


def test_what_depends_on_tenant_and_model_alone_is_settled_for_all_their_requests() -> None:
    config = parse(
        "classes: {chat: {}, rag: {}, night: {}}\n"
        f"tenants: {{acme: {{anonymous: true}}, labs: {{keys: 'sha256:{'a' * 64}'}}}}\n"
        "rules:\n"
        "  - {when: {priority: night}, class: night}\n"
        "  - {when: {tenant: labs, prompt_tokens: '>= 16k'}, class: rag}\n"
        "  - {when: {model: small}, class: rag}\n"
        "  - {when: {stream: true}, class: chat}\n"
        "  - {class: night}\n"
    )
    labs = Tenant("labs", domain="labs")
    small = settled(ACME, "small", config)
    assert small is not None
    assert (small.service_class.name, small.rule) == ("rag", 3)
    assert settled(labs, "small", config) is None, "it depends on the prompt's length"
    assert settled(ACME, "m", config) is None, "it depends on whether the answer is streamed"
    assert settled(Tenant("acme", "acme", models=frozenset({"m"})), "small", config) is None, "it may not use it"
    assert settled(Tenant("acme", "acme", classes=frozenset({"chat"})), "small", config) is None, "no rule is left"


CONDITIONS = st.builds(
    When,
    tenant=st.sampled_from([(), ("acme",), ("labs",)]),
    model=st.sampled_from([(), ("m",), ("n",)]),
    priority=st.sampled_from([(), ("rag",)]),
    stream=st.sampled_from([(), (True,)]),
    prompt_tokens=st.sampled_from([(), (Range(least=1000),)]),
)


@given(
    rules=st.lists(st.builds(Rule, when=CONDITIONS, service_class=st.sampled_from(["chat", "rag"])), max_size=5),
    classes=st.sets(st.sampled_from(["chat", "rag"])),
    model=st.sampled_from(["m", "n"]),
    stream=st.booleans(),
    prompt_tokens=st.sampled_from([10, 5000]),
)
def test_what_is_settled_is_what_the_rules_say(
    rules: list[Rule], classes: set[str], model: str, stream: bool, prompt_tokens: int
) -> None:
    config, tenant = replace(CONFIG, rules=tuple(rules)), Tenant("acme", "acme", classes=frozenset(classes))
    found = settled(tenant, model, config)
    if found is not None:
        assert found == classify(facts(tenant=tenant, model=model, stream=stream, prompt_tokens=prompt_tokens), config)


@given(
    rules=st.lists(
        st.builds(
            Rule,
            when=CONDITIONS,
            service_class=st.sampled_from(["chat", "rag"]),
            pools=st.sampled_from([None, ("own",), ("far",), ("own", "next")]),
        ),
        max_size=5,
    ),
    classes=st.sets(st.sampled_from(["chat", "rag"])),
    model=st.sampled_from(["m", "n"]),
    stream=st.booleans(),
    priority=st.sampled_from([None, "rag"]),
    prompt_tokens=st.sampled_from([10, 5000]),
)
def test_no_request_gets_a_pool_that_is_not_within_reach(
    rules: list[Rule], classes: set[str], model: str, stream: bool, priority: str | None, prompt_tokens: int
) -> None:
    config, tenant = replace(CONFIG, rules=tuple(rules)), Tenant("acme", "acme", classes=frozenset(classes))
    reach = pools_within_reach(tenant, model, config)
    asked = facts(tenant=tenant, model=model, stream=stream, prompt_tokens=prompt_tokens, priority=priority)
    try:
        pools = classify(asked, config).pools
    except PermissionDenied:
        return
    assert reach is None or (pools is not None and set(pools) <= reach)


def test_pools_of_rules_for_others_are_not_within_reach() -> None:
    config = parse(
        "tenants: {acme: {anonymous: true}, labs: {keys: 'sha256:" + "a" * 64 + "', classes: [chat]}}\n"
        "classes: {chat: {}, night: {}}\n"
        "pools: {own: {local: 1}, far: {local: 1}, next: {local: 1}}\n"
        "rules:\n"
        "  - {when: {tenant: labs}, class: chat, pools: far}\n"
        "  - {when: {model: big}, class: night, pools: next}\n"
        "  - {when: {prompt_tokens: '>= 1k'}, class: chat, pools: own}\n"
        "  - {class: chat}\n"
    )
    acme, labs = config.tenants["acme"], config.tenants["labs"]
    assert pools_within_reach(labs, "m", config) == {"far"}
    assert pools_within_reach(acme, "m", config) is None
    assert pools_within_reach(acme, "big", config) == {"next"}


_TARGET = st.none() | st.floats(0.001, 1000)


@given(st.tuples(_TARGET, _TARGET), st.tuples(_TARGET, _TARGET))
def test_targets_of_a_caller_are_never_tighter_than_those_of_its_class(
    of_class: tuple[float | None, float | None], named: tuple[float | None, float | None]
) -> None:
    ruling = classify(facts(), CONFIG)
    ruling = msgspec.structs.replace(
        ruling, service_class=replace(ruling.service_class, ttft_s=of_class[0], tpot_s=of_class[1])
    )
    found = with_targets(ruling, *named).service_class
    for before, hoped, after in zip(of_class, named, (found.ttft_s, found.tpot_s), strict=True):
        assert after == (before if hoped is None else hoped if before is None else max(before, hoped))
    assert replace(found, ttft_s=None, tpot_s=None) == replace(ruling.service_class, ttft_s=None, tpot_s=None)

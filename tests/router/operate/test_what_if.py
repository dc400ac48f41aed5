from pathlib import Path
from typing import Any

import pytest

from policies.errors import InvalidRequest, UnknownModel
from policies.explain import Explanation
from policies.nouns import BackendView, ClusterView, Link
from policies.sla.parse import examine, parse
from router.operate.what_if import WhatIf, explain_on_paper
from router.protocols.explanations import as_text
from tests.policies.sla.examples import FILES, outside_of

FILE = """
classes: {chat: {}, rag: {}}
tenants: {acme: {anonymous: true}, labs: {keys: ["sha256:%s"], models: [big]}}
pools:
  own: {local: 2, model: bundled}
  far: {kind: openai_compatible, at: ["http://h:1"], models: {big: huge}}
rules:
  - {when: {uncached_tokens: ">= 16k"}, class: rag, pools: [own]}
  - {class: chat}
""" % ("0" * 64)


def explain(**what: Any) -> Explanation:
    return explain_on_paper(WhatIf(**{"prompt_tokens": 900, **what}), parse(FILE))


def test_backends_are_idle_and_empty_and_serve_what_the_file_says() -> None:
    explained = explain()
    assert (explained.tenant, explained.model, explained.service_class) == ("acme", "pointsman-reader", "chat")
    assert [(candidate.backend, candidate.running, candidate.held_tokens) for candidate in explained.candidates] == [
        ("own-0", 0, 0),
        ("own-1", 0, 0),
    ]
    assert explained.dropped == {"far-0": "serves_model"}
    assert explain(tenant="labs").chosen == "far-0"


def test_what_backends_hold_and_run_counts() -> None:
    assert explain(prompt_tokens=20000).rule == 1
    explained = explain(prompt_tokens=20000, held_tokens={"own-1": 19000}, running={"own-1": 1})
    assert (explained.rule, explained.uncached_tokens, explained.chosen) == (2, 1000, "own-1")
    assert explain(prompt_tokens=20000, held_tokens={"far-0": 19000}).rule == 1


def test_backends_that_exchange_kv_now_would_fetch_what_is_described_as_held() -> None:
    link = Link("reader", fixed_s=0.001, token_s=1e-7)
    models = frozenset({"pointsman-reader"})
    backends = (BackendView(name, "own", "shard", models, link=link, held_tokens=0) for name in ("own-0", "own-1"))
    live = ClusterView(tuple(backends), taken_at=0.0)
    described = WhatIf(20_000, held_tokens={"own-1": 19_000}, running={"own-1": 60})
    explained = explain_on_paper(described, parse(FILE), live)
    assert explained.chosen == "own-0"
    assert explained.fetch is not None
    assert (explained.fetch.backend, explained.fetch.tokens) == ("own-1", 19_000)
    assert "fetch     19,000 of 20,000 tokens from own-1 in " in as_text(explained)


def test_the_same_description_gets_the_same_answer() -> None:
    assert {explain().chosen for _ in range(20)} == {explain().chosen}


@pytest.mark.parametrize(
    ("what", "hint"),
    [
        ({"tenant": "labz"}, "did you mean 'labs'"),
        ({"held_tokens": {"own-7": 1}}, "did you mean 'own-"),
        ({"running": {"zzz": 1}}, "known: own-0, own-1, far-0"),
        ({"priority": "caht"}, "did you mean 'chat'"),
    ],
)
def test_names_that_the_file_does_not_have_are_refused_with_a_hint(what: Any, hint: str) -> None:
    with pytest.raises(InvalidRequest, match=hint):
        explain(**what)


def test_a_model_that_the_tenant_may_not_use_is_refused() -> None:
    with pytest.raises(UnknownModel):
        explain(tenant="labs", model="pointsman-reader")


def test_without_an_anonymous_tenant_one_must_be_named() -> None:
    config = parse('tenants: {labs: {keys: ["sha256:%s"]}}' % ("0" * 64))
    with pytest.raises(InvalidRequest, match="name the tenant that asks: labs"):
        explain_on_paper(WhatIf(1), config)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_example_can_be_explained_for_each_of_its_tenants(file: Path) -> None:
    text = file.read_text()
    config = examine(text, source=str(file), outside=outside_of(text)).config
    for tenant in config.tenants:
        for tokens in (10, 5_000, 90_000):
            assert explain_on_paper(WhatIf(tokens, tenant=tenant), config).chosen


def test_targets_and_what_follows_a_miss_are_those_of_the_class_that_the_request_gets() -> None:
    config = parse(
        "classes: {chat: {ttft_p95: 800ms, tpot_p50: 40ms}, night: {deadline: 15m}}\n"
        "on_miss: {chat: [{queue: 2s}, shed], night: {spill: far}}\n"
        "pools: {own: {kind: fake}, far: {kind: fake}}\n"
        "rules: [{class: chat, pools: own}]\n"
    )
    chat, night = explain_on_paper(WhatIf(9), config), explain_on_paper(WhatIf(9, priority="night"), config)
    assert (chat.targets, chat.on_miss) == ({"ttft_p95": 0.8, "tpot_p50": 0.04}, ("queue 2s", "shed with 429"))
    assert (night.targets, night.on_miss) == ({"deadline": 900.0}, ("spill to far",))


def test_metadata_is_described_and_decides() -> None:
    config = parse("classes: {a: {}, b: {}}\nrules: [{when: {metadata: {team: ads}}, class: b}, {class: a}]\n")
    assert explain_on_paper(WhatIf(9, metadata={"team": "ads"}), config).service_class == "b"
    assert explain_on_paper(WhatIf(9, metadata={"team": "art"}), config).service_class == "a"


def test_another_fact_is_stated_and_is_shown_if_a_rule_tests_it() -> None:
    config = parse("classes: {a: {}, b: {}}\nrules: [{when: {stream: true}, class: b}, {class: a}]\n")
    streamed, whole = explain_on_paper(WhatIf(9, facts={"stream": "true"}), config), explain_on_paper(WhatIf(9), config)
    assert (streamed.service_class, streamed.facts) == ("b", {"stream": "true"})
    assert (whole.service_class, whole.facts) == ("a", {"stream": "false"})
    assert "          stream false\n" in as_text(whole)
    assert explain_on_paper(WhatIf(9), parse("")).facts == {}

"""Each example is sound, without anything doubtful, and does what its comments say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from policies.nouns import Limits
from policies.on_miss import Degrade, Queue, Shed, Spill
from policies.rules import Facts, classify
from tests.policies.sla.examples import FILES, ROOT, read

NAMES = {
    "one-tenant": [({}, (1, "interactive", None))],
    "saas": [
        ({"tenant": "initech"}, (1, "enterprise", None)),
        ({"tenant": "initech", "priority": "pro"}, (1, "pro", None)),
        ({"tenant": "globex", "priority": "pro"}, (1, "enterprise", None)),
        ({"tenant": "pro-plan"}, (2, "pro", None)),
        ({"tenant": "free-plan", "priority": "enterprise", "model": "small"}, (3, "free", None)),
    ],
    "rag-beside-chat": [
        ({"tenant": "assistant"}, (4, "chat", None)),
        ({"tenant": "search", "prompt_tokens": 90_000, "uncached_tokens": 90_000}, (2, "long-rag", None)),
        ({"tenant": "search", "prompt_tokens": 90_000, "uncached_tokens": 300}, (3, "chat", None)),
        ({"tenant": "search", "prompt_tokens": 100, "metadata": {"job": "index"}}, (1, "long-rag", None)),
        ({"tenant": "search", "prompt_tokens": 100, "metadata": {"job": "quiz"}}, (4, "chat", None)),
    ],
    "batch-at-night": [
        ({"tenant": "app"}, (4, "interactive", None)),
        ({"tenant": "app", "priority": "soon"}, (4, "soon", None)),
        ({"tenant": "app", "max_new_tokens": 8000}, (3, "soon", None)),
        ({"tenant": "reports", "prompt_tokens": 50_000}, (2, "batch", None)),
        ({"tenant": "reports", "priority": "soon"}, (1, "soon", None)),
        ({"tenant": "reports", "priority": "interactive"}, (2, "batch", None)),
    ],
    "mixed-fleet": [
        ({"tenant": "rag"}, (5, "interactive", ("own", "vllm"))),
        ({"tenant": "rag", "priority": "batch"}, (1, "batch", ("vllm", "own"))),
        ({"tenant": "rag", "prompt_tokens": 90_000, "uncached_tokens": 16_000}, (3, "long-rag", ("own",))),
        ({"tenant": "chat", "max_new_tokens": 63}, (4, "interactive", ("vllm", "own"))),
        ({"tenant": "chat", "model": "llama-1b"}, (2, "interactive", ("rented",))),
    ],
    "gateway/sla": [
        ({"tenant": "acme", "priority": "batch"}, (1, "batch", None)),
        ({"tenant": "acme"}, (2, "interactive", None)),
    ],
    "capacity/sla": [
        ({"tenant": "search", "priority": "batch"}, (1, "batch", None)),
        ({"tenant": "search", "prompt_tokens": 9000, "uncached_tokens": 9000}, (2, "long-rag", None)),
        ({"tenant": "search", "prompt_tokens": 9000, "uncached_tokens": 300}, (3, "chat", None)),
    ],
    "compose/sla": [
        ({"tenant": "acme", "prompt_tokens": 1000}, (1, "long-rag", None)),
        ({"tenant": "acme", "prompt_tokens": 999}, (2, "interactive", None)),
    ],
    "demo/sla": [
        ({"tenant": "acme", "prompt_tokens": 1000}, (1, "long-rag", ("own",))),
        ({"tenant": "acme", "prompt_tokens": 999}, (2, "interactive", ("own",))),
        ({"tenant": "labs", "prompt_tokens": 1000}, (2, "interactive", ("own",))),
    ],
}
REQUESTS = [(name, what, given) for name, cases in NAMES.items() for what, given in cases]


@pytest.mark.parametrize("name", NAMES)
def test_every_example_is_sound_and_leaves_no_doubt(name: str) -> None:
    assert read(name).doubts == ()


@pytest.mark.parametrize(
    ("name", "what", "given"), REQUESTS, ids=[f"{case[0]}-{at}" for at, case in enumerate(REQUESTS)]
)
def test_a_request_gets_the_class_and_pools_of_the_comments(
    name: str, what: dict[str, Any], given: tuple[int, str, tuple[str, ...] | None]
) -> None:
    config = read(name).config
    sizes = {"prompt_tokens": 900, "uncached_tokens": 900, "max_new_tokens": 512}
    facts = Facts(**{"model": "llama-8b", **sizes, **what, "tenant": config.tenants[what.get("tenant", "team")]})
    ruling = classify(facts, config)
    assert (ruling.rule, ruling.service_class.name, ruling.pools) == given


@pytest.mark.parametrize("name", NAMES)
def test_every_rule_of_an_example_is_shown_by_a_request(name: str) -> None:
    shown = {given[0] for _, given in NAMES[name]}
    assert shown == set(range(1, len(read(name).config.rules) + 1))


def test_the_steps_after_a_miss_are_those_of_the_comments() -> None:
    mixed, saas = read("mixed-fleet").config, read("saas").config
    assert mixed.on_miss["interactive"] == (Spill("rented"), Degrade("llama-1b"), Shed(429))
    assert mixed.on_miss["long-rag"] == (Queue(10), Spill("rented"), Shed(503))
    assert "batch" not in mixed.on_miss
    assert saas.on_miss["free"] == (Shed(),)
    assert saas.tenants["globex"].model_limits == {"large": Limits(tokens_per_minute=2_000_000, concurrent=16)}
    assert [service_class.floor for service_class in saas.classes.values()] == [0.0, 0.2, 0.05]


def test_every_file_is_tested_and_in_the_list() -> None:
    page = (ROOT / "examples/README.md").read_text()
    assert {f"{name}.yaml" for name in NAMES} == {str(file.relative_to(ROOT / "examples")) for file in FILES}
    assert all(f"({name}.yaml)" in page or f"({Path(name).parent}/)" in page for name in NAMES)

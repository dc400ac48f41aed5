from __future__ import annotations

import random
from typing import Any

import pytest

from backends.base import CacheSalter, Prefiller
from backends.http.backend import HttpBackend
from backends.kinds import KINDS, Place, Surroundings, make
from backends.openai.compatible import OpenAICompatible
from policies.errors import ConfigError
from policies.sla.parse import parse
from policies.sla.pools import AT_HOST_AND_PORT


def a_place(**fields: Any) -> Place:
    return Place(**{"name": "b", "pool": "p", "address": "127.0.0.1:1", **fields})


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_makes_its_backend(kind: str) -> None:
    backend = make(kind, a_place(), Surroundings(rng=random.Random(1)))
    assert (backend.name, backend.pool, backend.kind) == ("b", "p", kind)


def test_reports_are_dated_by_the_routers_clock() -> None:
    def clock() -> float:
        return 7.0

    backend = make("vllm", a_place(address="http://h:1"), Surroundings(clock=clock))
    assert isinstance(backend, HttpBackend)
    assert backend._clock is clock


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_may_have_its_prompts_computed_elsewhere_exactly_if_its_backends_do_that(kind: str) -> None:
    answers, prompts = ("h:1", "h:2") if kind in AT_HOST_AND_PORT else ("http://h:1", "http://h:2")
    shared = f"kind: {kind}, model: m"
    text = (
        f"pools:\n  answers: {{{shared}, at: ['{answers}'], prefill: prompts}}\n"
        f"  prompts: {{{shared}, at: ['{prompts}']}}\n"
    )
    if isinstance(make(kind, a_place(), Surroundings(rng=random.Random(1))), Prefiller):
        assert parse(text).pools["answers"].prefill == "prompts"
    else:
        with pytest.raises(ConfigError, match=f"backends of kind {kind} fetch no KV; only these do: sglang, shard"):
            parse(text)


def test_options_are_read_from_text() -> None:
    options = {"takes_token_ids": "false", "connect_s": "2.5", "max_requests": "8", "served": ("m",)}
    backend = make("openai_compatible", a_place(options=options, key="k", models={"a": "b"}), Surroundings())
    assert isinstance(backend, OpenAICompatible)
    assert (backend._options.takes_token_ids, backend._options.connect_s) == (False, 2.5)
    assert (backend._options.key, backend._options.models, backend.load().max_requests) == ("k", {"a": "b"}, 8)
    assert backend._options.served == {"m"}


@pytest.mark.parametrize("kind", ["vllm", "sglang", "tensorrt_llm"])
def test_a_backend_reports_whether_it_sends_cache_domains_as_salts(kind: str) -> None:
    for written in ("true", "false"):
        backend = make(kind, a_place(options={"cache_salt": written}), Surroundings())
        assert isinstance(backend, CacheSalter)
        assert backend.sends_salts == (written == "true")
    assert not isinstance(make("openai_compatible", a_place(), Surroundings()), CacheSalter)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("shrad", {}, "did you mean 'shard'?"),
        ("zzz", {}, "known: anthropic, "),
        ("openai_compatible", {"conect_s": 1}, "did you mean 'connect_s'?"),
        ("openai_compatible", {"connect_s": "soon"}, "option 'connect_s' must be a number, not 'soon'"),
        ("openai_compatible", {"key": "x"}, "there is no option 'key'"),
        ("shard", {"credentials": "x"}, "there is no option 'credentials'"),
    ],
)
def test_a_slip_is_reported_with_what_was_meant(kind: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as failure:
        make(kind, a_place(options=options), Surroundings())
    assert message in str(failure.value)

from __future__ import annotations

from typing import Any

import pytest

from backends.base import EventAddress
from policies.errors import ConfigError
from policies.sla.pools import PoolSpec
from router.fleet.feeds.options import backend_options, feed_specs, published_specs, unheard
from router.fleet.feeds.sink import RankCache


def a_pool(*at: str, kind: str = "vllm", **options: Any) -> PoolSpec:
    return PoolSpec("gpu", kind=kind, at=at or ("http://a:8000",), options=options)


def addresses(pool: PoolSpec) -> list[tuple[str, str, str | None]]:
    names = tuple(f"gpu-{number}" for number in range(len(pool.at)))
    return [(str(spec.source), spec.events, spec.replay) for spec in feed_specs(pool, names)]


def test_a_pool_that_names_no_events_has_no_feeds() -> None:
    assert feed_specs(a_pool(idle_s="30"), ("gpu-0",)) == ()


def test_a_star_is_the_host_of_each_backend() -> None:
    pool = a_pool("http://a:8000", "https://[::1]:8000/v1", events="tcp://*:5557", replay="tcp://*:5558")
    assert addresses(pool) == [
        ("gpu-0", "tcp://a:5557", "tcp://a:5558"),
        ("gpu-1", "tcp://[::1]:5557", "tcp://[::1]:5558"),
    ]


def test_addresses_may_be_written_one_by_one() -> None:
    pool = a_pool("http://a:1", "http://b:1", events=("tcp://x:5", "tcp://y:6"))
    assert addresses(pool) == [("gpu-0", "tcp://x:5", None), ("gpu-1", "tcp://y:6", None)]


def test_each_rank_has_the_next_port() -> None:
    pool = a_pool(events="tcp://*:5557", replay="tcp://*:6557", events_ranks="2")
    assert addresses(pool) == [("gpu-0", "tcp://a:5557", "tcp://a:6557"), ("gpu-0/1", "tcp://a:5558", "tcp://a:6558")]


def test_tensorrt_llm_is_asked_over_http() -> None:
    pool = a_pool(kind="openai_compatible", events="http://*:8000", events_engine="tensorrt_llm")
    (spec,) = feed_specs(pool, ("gpu-0",))
    assert (spec.engine, spec.events, spec.source) == ("tensorrt_llm", "http://a:8000", RankCache("gpu-0"))


def test_topic_and_engine_are_read() -> None:
    (spec,) = feed_specs(a_pool(events="ipc:///run/kv", events_engine="sglang", events_topic="kv@"), ("gpu-0",))
    assert (spec.engine, spec.topic, spec.events) == ("sglang", "kv@", "ipc:///run/kv")


def test_the_backends_see_only_their_own_options() -> None:
    assert backend_options({"events": "tcp://*:1", "replay": "tcp://*:2", "idle_s": "30"}) == {"idle_s": "30"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"events": "localhost:5557"}, "must be an address like tcp://\\*:5557"),
        ({"events": "http://*:8000"}, "must be an address like tcp"),
        ({"events": "tcp://*:5557", "events_engine": "tensorrt_llm"}, "must be an address like http"),
        ({"events": "tcp://*:5557", "events_engine": "tgi"}, "one of vllm, sglang, tensorrt_llm"),
        ({"events": ("tcp://x:1", "tcp://y:1")}, "has 1 addresses and 2 of events"),
        ({"events": "tcp://*:5557", "replay": "5558"}, "replay must be an address"),
        ({"events": "tcp://*:5557", "events_ranks": "0"}, "a number from 1 to"),
        ({"events": "tcp://*:5557", "events_ranks": "two"}, "a number from 1 to"),
        ({"events": "ipc:///run/kv", "events_ranks": "2"}, "has no port"),
        ({"events": "tcp://*:5557", "events_topic": ("a", "b")}, "one text, not a list"),
        ({"events_topic": "kv@"}, "has no effect without events"),
        ({"events": "http://*:1", "replay": "http://*:1", "events_engine": "tensorrt_llm"}, "has no replay"),
    ],
)
def test_mistakes_are_reported(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        feed_specs(a_pool(**options), ("gpu-0",))


def test_a_pool_of_another_kind_must_name_the_engine_of_its_events() -> None:
    with pytest.raises(ConfigError, match="events_engine"):
        feed_specs(a_pool(kind="openai_compatible", events="tcp://*:5557"), ("gpu-0",))


@pytest.mark.parametrize(
    ("address", "published", "heard"),
    [
        ("10.0.0.7:8000", "tcp://*:5557", "tcp://10.0.0.7:5557"),
        ("http://gpu-7:8000/v1", "tcp://0.0.0.0:5557", "tcp://gpu-7:5557"),
        ("http://[fd00::7]:8000", "tcp://[::]:5557", "tcp://[fd00::7]:5557"),
        ("gpu-7:8000", "tcp://10.0.0.7:41234", "tcp://10.0.0.7:41234"),
        ("127.0.0.1:8000", "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5557"),
        ("gpu-7:8000", "tcp://127.0.0.1:5557", None),
        ("gpu-7:8000", "ipc:///tmp/events", None),
        ("gpu-7:8000", "inproc://events", None),
        ("gpu-7:8000", "nonsense", None),
    ],
)
def test_a_reported_publisher_is_read_at_the_engines_own_host(address: str, published: str, heard: str | None) -> None:
    specs = published_specs("gpu-0", address, [EventAddress(1, published, "tcp://*:5558")])
    assert [(spec.source, spec.engine, spec.events) for spec in specs] == (
        [(RankCache("gpu-0", 1), "vllm", heard)] if heard else []
    )


def test_without_pyzmq_every_pool_with_unreadable_events_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = [
        PoolSpec("a", kind="vllm", at=("http://here:1",)),
        PoolSpec("b", kind="vllm", at=("http://here:2",), options={"events": "none"}),
        PoolSpec("c", kind="openai_compatible", at=("http://here:3",)),
        PoolSpec(
            "d",
            kind="openai_compatible",
            at=("http://here:4",),
            options={"events": "tcp://*:5557", "events_engine": "sglang"},
        ),
    ]
    assert unheard(pools) == []
    monkeypatch.setattr("router.fleet.feeds.options.find_spec", lambda _: None)
    assert [line.split("'")[1] for line in unheard(pools)] == ["a", "d"]
    assert "pointsman[feeds]" in unheard(pools)[0]


def test_events_none_takes_no_other_option_of_events() -> None:
    pool = PoolSpec("a", kind="vllm", at=("http://here:1",), options={"events": "none", "replay": "tcp://*:5558"})
    with pytest.raises(ConfigError, match="replay"):
        feed_specs(pool, ("a-0",))

"""The steps after a missed target: parsed, and proven."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.errors import ConfigError
from policies.on_miss import Degrade, Queue, Shed, Spill
from policies.quantities import read_seconds, written_seconds
from policies.sla.config import Config
from policies.sla.parse import examine, parse
from policies.sla.secrets import Outside

FILE = """
classes: {chat: {ttft_p95: 1s}, rag: {ttft_p95: 9s, deadline: 60s}, night: {}}
pools:
  own: {kind: fake, models: {big: big}}
  far: {kind: fake, models: {big: big, small: small}}
rules:
  - {when: {model: big, priority: rag}, class: rag}
  - {when: {priority: night}, class: night, pools: any}
  - {class: chat, pools: [own]}
on_miss:
"""


def steps(text: str) -> Config:
    return parse(f"{FILE}  {text}\n")


def problem(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        steps(text)
    (found,) = caught.value.problems
    return found


def doubts(text: str) -> tuple[str, ...]:
    return examine(f"{FILE}  {text}\n", source="sla.yaml", outside=Outside({})).doubts


def test_steps_are_read_in_order() -> None:
    config = steps("chat: [{queue: 2s}, {spill: far}, {degrade: small}, {shed: 503}]")
    assert config.on_miss == {"chat": (Queue(2), Spill("far"), Degrade("small"), Shed(503))}


def test_one_step_may_stand_alone_and_shed_is_429() -> None:
    config = steps("{chat: shed, rag: {spill: far}, night: [shed]}")
    assert config.on_miss == {"chat": (Shed(429),), "rag": (Spill("far"),), "night": (Shed(),)}


def test_without_steps_nothing_is_there() -> None:
    assert parse("").on_miss == {} == parse("on_miss:").on_miss


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("caht: shed", "on_miss.caht: there is no class 'caht' (did you mean 'chat'?)"),
        ("chat: [shed, {queue: 1s}]", "on_miss.chat[1]: is never tried: the step before it rejects"),
        ("chat: [{queue: 1s}, {queue: 1s}]", "on_miss.chat[1]: is here twice"),
        ("chat: {spill: fra}", "there is no pool 'fra' (did you mean 'far'?)"),
        ("chat: {degrade: smal}", "no pool names a model 'smal' (did you mean 'small'?)"),
        ("chat: {shed: 404}", "must be 429 (Too Many Requests) or 503 (Service Unavailable), not '404'"),
        ("chat: {queue: soon}", "must be a duration like"),
        ("chat: []", "on_miss.chat: is an empty list"),
        ("chat: spill", "needs a value (write {spill: ...}"),
        ("chat: {spill: far, shed: 429}", "must be one step"),
        ("chat: wait", "there is no step 'wait'"),
        ("rag: {degrade: big}", "every rule of this class is for 'big' already"),
    ],
)
def test_steps_that_make_no_sense_are_mistakes(text: str, says: str) -> None:
    assert says in problem(text)
    assert problem(text).startswith("sla.yaml:11: ")


def test_degrading_in_a_circle_is_a_mistake() -> None:
    text = (
        "classes: {a: {ttft_p95: 1s}, b: {ttft_p95: 1s}, c: {ttft_p95: 1s}}\n"
        "rules: [{when: {model: x}, class: a}, {when: {model: y}, class: b}, {when: {model: z}, class: c},\n"
        "  {class: a}]\n"
        "on_miss: {a: {degrade: y}, b: {degrade: z}, c: {degrade: %s}}\n"
    )
    assert len(parse(text % "w").on_miss) == 3
    with pytest.raises(ConfigError, match=r"on_miss.c: 'x' is degraded to 'z' again"):
        parse(text % "x")


def test_a_model_may_be_degraded_to_by_a_class_that_serves_it_too() -> None:
    assert steps("chat: {degrade: small}").on_miss["chat"] == (Degrade("small"),)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("night: shed", "on_miss.night: this class has no target for the time to first token and no deadline"),
        ("night: {spill: far}", "every rule of this class names the pool 'far' already"),
        ("chat: {spill: own}", "on_miss.chat: every rule of this class names the pool 'own' already"),
        ("rag: [{queue: 1s}, {queue: 90s}]", "on_miss.rag[1]: waits longer than the deadline of the class"),
    ],
)
def test_steps_that_do_nothing_are_doubted(text: str, says: str) -> None:
    assert any(says in doubt for doubt in doubts(text)), doubts(text)


def test_where_a_pool_leaves_it_to_its_backends_what_they_serve_no_model_is_doubted() -> None:
    text = FILE.replace("own: {kind: fake, models: {big: big}}", "own: {local: 1}") + "  chat: {degrade: anything}\n"
    assert parse(text).on_miss["chat"] == (Degrade("anything"),)


def test_steps_read_like_what_was_written() -> None:
    written = [str(step) for step in (Queue(0.8), Spill("far"), Degrade("small"), Shed(503))]
    assert written == ["queue 800ms", "spill to far", "degrade to small", "shed with 503"]


@given(st.integers(1, 10**12).map(lambda microseconds: microseconds / 1e6))
def test_durations_are_written_as_they_are_read(seconds: float) -> None:
    assert read_seconds(written_seconds(seconds)) == pytest.approx(seconds, rel=1e-9)

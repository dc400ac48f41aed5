"""Answers that are held to a grammar while the engine draws them, among others that are not."""

from __future__ import annotations

import json
import random
import re
import threading
import time

import jsonschema
import pytest

from shards.exec.fake import FakeNetwork
from shards.exec.fake_device import FakeDevice
from shards.grammar.grammars import Grammars
from shards.nouns import Cause, FinishReason, Grammar, GrammarForm
from shards.wire.limits import MOST_GRAMMAR_CHARACTERS
from tests.shards.copying import CopyingNetwork
from tests.shards.driver import Driver, some_tokens
from tests.shards.grammar.parts import VOCABULARY, SlowCompiler, a_narrow_compiler, a_schema, a_tokenizer, end_id

OBJECT = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "minimum": 3, "maximum": 90}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
YES_OR_NO = Grammar(GrammarForm.CHOICE, '["yes", "no"]')
LETTERS = Grammar(GrammarForm.REGEX, "[a-c]{2,6}")
ANY_LETTERS = Grammar(GrammarForm.REGEX, "[a-z]+")


def a_driver(network: FakeNetwork | None = None, **options: object) -> Driver:
    network = network or FakeNetwork(vocabulary=VOCABULARY)
    return Driver(network, tokenizer=a_tokenizer(), eos=end_id(), **options)


def schema(written: object) -> Grammar:
    return Grammar(GrammarForm.JSON_SCHEMA, json.dumps(written))


def ask(driver: Driver, key: object, grammar: Grammar | None, new: int = 200, seed: int = 0, **more: object) -> None:
    more = {"temperature": 1.0, "ignore_eos": False, **more}
    driver.ask(key, some_tokens(20, seed), new, grammar=grammar, seed=seed, **more)  # type: ignore[arg-type]


def run(driver: Driver) -> None:
    """Until nothing is left to do; grammars are compiled by the clock of the wall."""
    until_s = time.monotonic() + 30
    while driver.engine.has_work and time.monotonic() < until_s:
        driver.step()
    assert not driver.engine.has_work, "still at work"


def text_of(driver: Driver, key: object, choice: int = 0) -> str:
    return str(a_tokenizer().decode(driver.drawn[key, choice]))


@pytest.mark.parametrize("seed", range(40))
def test_an_answer_that_stops_is_valid_and_one_that_does_not_says_so(seed: int) -> None:
    rng, driver = random.Random(seed), a_driver()
    schemas = [a_schema(rng) for _ in range(6)]
    for key, wanted in enumerate(schemas):
        ask(
            driver,
            key,
            schema(wanted),
            new=rng.choice([5, 150, 150, 150]),
            seed=seed * 10 + key,
            top_k=rng.choice([0, 9]),
        )
    run(driver)
    for key, wanted in enumerate(schemas):
        reason = driver.ended[key, 0].reason
        if reason is FinishReason.STOP:
            jsonschema.validate(json.loads(text_of(driver, key)), wanted)
        else:
            assert reason is FinishReason.LENGTH, driver.ended[key, 0]
    driver.assert_nothing_is_held()


def test_nothing_is_guessed_of_a_held_answer_and_its_neighbours_are_guessed_as_ever() -> None:
    drivers = [a_driver(CopyingNetwork(likes=8, vocabulary=VOCABULARY), speculate=how) for how in ("auto", "off")]
    guessed = []
    for driver in drivers:
        for key, grammar in (("held", ANY_LETTERS), ("free", None)):
            driver.ask(key, some_tokens(40) * 3, 80, grammar=grammar, temperature=0.7, seed=3)
            run(driver)
            assert driver.load is not None
            guessed.append(driver.load.drafted_tokens)
    assert drivers[0].drawn == drivers[1].drawn
    assert (guessed[0], guessed[1] > 0, guessed[2:]) == (0, True, [0, 0])


def test_most_answers_with_room_stop() -> None:
    driver = a_driver(max_running=64, kv_blocks=1000)
    for key in range(40):
        ask(driver, key, schema(OBJECT), seed=key)
    run(driver)
    stopped = [key for key in range(40) if driver.ended[key, 0].reason is FinishReason.STOP]
    assert len(stopped) == 40
    for key in stopped:
        jsonschema.validate(json.loads(text_of(driver, key)), OBJECT)
    assert len({text_of(driver, key) for key in stopped}) > 30, "each has its own seed"


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (YES_OR_NO, "yes|no"),
        (LETTERS, "[a-c]{2,6}"),
        (Grammar(GrammarForm.RULES, 'root ::= "n" [0-9]+ "!"'), "n[0-9]+!"),
        (Grammar(GrammarForm.RULES, 'start: "n" /[0-9]{3}/ "!"'), "n[0-9]{3}!"),
    ],
)
def test_other_forms_hold_too(grammar: Grammar, pattern: str) -> None:
    driver = a_driver()
    for key in range(8):
        ask(driver, key, grammar, seed=key)
    run(driver)
    for key in range(8):
        assert driver.ended[key, 0].reason is FinishReason.STOP
        assert re.fullmatch(pattern, text_of(driver, key))


@pytest.mark.parametrize("on", ["host", "device"])
def test_neighbours_draw_what_they_draw_alone(on: str) -> None:
    answers = []
    for held in (False, True):
        driver = a_driver(FakeDevice(vocabulary=VOCABULARY) if on == "device" else None)
        for key in range(6):
            more: dict[str, object] = [{}, {"temperature": 0.0}, {"top_p": 0.7}, {"repetition_penalty": 1.3}][key % 4]
            ask(driver, key, None, new=30, seed=key, ignore_eos=True, **more)
        for key in range(6, 9) if held else ():
            ask(driver, key, schema(OBJECT), new=25, seed=key)
        run(driver)
        answers.append([driver.drawn[key, 0] for key in range(6)])
    assert answers[0] == answers[1]


def test_on_a_device_answers_with_a_grammar_draw_in_every_step_and_steps_run_ahead() -> None:
    answers, steps = [], []
    for run_ahead in ("on", "off"):
        device = FakeDevice(vocabulary=VOCABULARY)
        driver = a_driver(device, run_ahead=run_ahead)
        # compiled before it matters, so that it takes no steps
        ask(driver, "first", schema(OBJECT), new=5)
        run(driver)
        device.most_due = 0
        for key in range(4):
            ask(driver, key, schema(OBJECT) if key % 2 else None, new=25, seed=key, repetition_penalty=1.1)
        before = device.calls
        run(driver)
        steps.append(device.calls - before)
        assert device.most_due == (2 if run_ahead == "on" else 1)
        answers.append(driver.drawn)
    assert answers[0] == answers[1]
    # one more, for the ends that are seen a step later
    assert steps[1] <= steps[0] <= steps[1] + 1


def test_each_choice_and_each_seed_has_its_own_answer_again_and_again() -> None:
    answers = []
    for _ in range(2):
        driver = a_driver()
        ask(driver, "n", schema(OBJECT), seed=7, choices=5)
        run(driver)
        answers.append([text_of(driver, "n", choice) for choice in range(5)])
    assert answers[0] == answers[1]
    assert len(set(answers[0])) == 5
    for text in answers[0]:
        jsonschema.validate(json.loads(text), OBJECT)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("host_bytes", [0, 2**20], ids=["recomputed", "parked"])
def test_a_preempted_sequence_goes_on_where_it_was(host_bytes: int, deterministic: bool) -> None:
    answers = []
    for disturbed in (False, True):
        driver = a_driver(max_running=1, host_bytes=host_bytes, deterministic=deterministic)
        # the grammar is compiled before it matters: that takes time of the wall, and "low" could end meanwhile
        ask(driver, "first", LETTERS, seed=5)
        run(driver)
        ask(driver, "low", schema({"type": "string", "minLength": 60, "maxLength": 80}), seed=3, rank=1)
        while len(driver.drawn["low", 0]) < 10:
            driver.step()
        if disturbed:
            ask(driver, "high", LETTERS, seed=4, rank=0)
        run(driver)
        assert not disturbed or [key for key, _ in driver.ended] == ["first", "high", "low"]
        answers.append(text_of(driver, "low"))
    assert answers[0] == answers[1]
    assert 60 <= len(json.loads(answers[0])) <= 80


def test_an_answer_ends_no_sooner_than_it_may() -> None:
    driver = a_driver()
    for key in range(10):
        ask(driver, key, ANY_LETTERS, new=40, seed=key, min_new_tokens=12)
        ask(driver, ("whole", key), YES_OR_NO, new=40, seed=key, min_new_tokens=12)
        ask(driver, ("ignores", key), ANY_LETTERS, new=20, seed=key, ignore_eos=True)
    run(driver)
    for key in range(10):
        assert driver.ended[key, 0].output_tokens >= 12
        # what nothing can be added to is over
        assert driver.ended[("whole", key), 0].reason is FinishReason.STOP
        assert driver.ended[("ignores", key), 0].reason is FinishReason.LENGTH


def test_bias_penalties_and_logprobs_are_those_of_what_may_be_drawn() -> None:
    driver = a_driver()
    token = a_tokenizer().encode("yes", add_special_tokens=False).ids[0]
    ask(driver, "b", YES_OR_NO, logit_bias={token: -100.0}, top_logprobs=2, presence_penalty=1.0, temperature=0.0)
    run(driver)
    assert text_of(driver, "b") == "no"
    assert all(len(logprobs.top) == 2 for drawn in driver.draws for logprobs in drawn.logprobs)
    assert all(drawn.logprobs for drawn in driver.draws)


def test_a_stop_string_ends_an_answer_before_its_grammar_does() -> None:
    driver = a_driver()
    ask(driver, "s", Grammar(GrammarForm.REGEX, "ab{30}"), stop=("bbb",))
    run(driver)
    assert driver.ended["s", 0].stop == "bbb"


def test_what_cannot_be_compiled_is_rejected_and_nothing_is_computed() -> None:
    driver = a_driver()
    ask(driver, "wrong", schema({"type": "array", "uniqueItems": True}), choices=2)
    ask(driver, "newer", Grammar(None, "x"))
    ask(driver, "none", schema(False))
    run(driver)
    for key, choice in (("wrong", 0), ("wrong", 1), ("newer", 0), ("none", 0)):
        end = driver.ended[key, choice]
        assert (end.reason, end.cause) == (FinishReason.REJECTED, Cause.GRAMMAR)
    assert "uniqueItems" in driver.ended["wrong", 0].message
    assert driver.network.calls == 0
    driver.assert_nothing_is_held()


def test_one_that_is_too_long_is_rejected_at_once() -> None:
    driver = a_driver()
    ask(driver, "long", Grammar(GrammarForm.REGEX, "a" * (MOST_GRAMMAR_CHARACTERS + 1)))
    driver.step()
    assert driver.ended["long", 0].cause is Cause.GRAMMAR
    assert "131073 characters" in driver.ended["long", 0].message


def test_a_request_cancelled_while_its_grammar_is_compiled_is_not_waited_for() -> None:
    driver = a_driver()
    ask(driver, "gone", schema(OBJECT))
    driver.engine.cancel("gone")
    driver.step()
    assert driver.ended.pop(("gone", 0)).reason is FinishReason.CANCELLED
    ask(driver, "gone", LETTERS, seed=1)
    run(driver)
    assert re.fullmatch("[a-c]{2,6}", text_of(driver, "gone"))
    driver.assert_nothing_is_held()


def test_a_closed_engine_leaves_no_thread_that_compiles() -> None:
    driver, before = a_driver(), set(threading.enumerate())
    ask(driver, "held", LETTERS)
    run(driver)
    (thread,) = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("grammars")]
    assert thread.is_alive()
    driver.engine.close()
    thread.join(10.0)
    assert not thread.is_alive()


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    driver, compiler = a_driver(), SlowCompiler()
    driver.engine._grammars = Grammars(compiler)
    ask(driver, "held", LETTERS)
    ask(driver, "free", None, new=5, ignore_eos=True)
    while ("free", 0) not in driver.ended:
        driver.step()
    assert driver.engine.has_work
    assert not driver.drawn["held", 0]
    assert driver.progress["held"] == []
    compiler.may_go_on.set()
    run(driver)
    assert re.fullmatch("[a-c]{2,6}", text_of(driver, "held"))


def test_one_that_finds_too_many_being_compiled_is_sent_elsewhere() -> None:
    driver, compiler = a_driver(), SlowCompiler()
    driver.engine._grammars = Grammars(compiler, capacity=1)
    ask(driver, "first", LETTERS)
    ask(driver, "second", YES_OR_NO)
    driver.step()
    assert driver.ended["second", 0].cause is Cause.OVERLOADED
    compiler.may_go_on.set()
    run(driver)
    assert driver.ended["first", 0].reason is FinishReason.STOP


def test_a_grammar_that_would_end_the_process_ends_its_request_alone() -> None:
    driver = a_driver()
    chain = "start: r0\n" + "".join(f"r{number}: r{number + 1}\n" for number in range(3000)) + 'r3000: "a"\n'
    ask(driver, "chain", Grammar(GrammarForm.RULES, chain))
    ask(driver, "free", None, new=30, ignore_eos=True)
    run(driver)
    assert driver.ended["chain", 0].cause is Cause.GRAMMAR
    assert "nests too deeply" in driver.ended["chain", 0].message
    assert driver.ended["free", 0].output_tokens == 30
    driver.assert_nothing_is_held()


def test_an_answer_fails_alone_if_its_grammar_becomes_too_complex() -> None:
    driver = a_driver()
    driver.engine._grammars = Grammars(a_narrow_compiler())
    ask(driver, "complex", Grammar(GrammarForm.REGEX, "(a|b)*a(a|b){12}"))
    ask(driver, "free", None, new=30, ignore_eos=True)
    run(driver)
    # no other shard would do better
    assert driver.ended["complex", 0].reason is FinishReason.REJECTED
    assert driver.ended["complex", 0].cause is Cause.GRAMMAR
    assert "too complex to go on" in driver.ended["complex", 0].message
    assert "too many states" in driver.ended["complex", 0].message
    assert driver.ended["free", 0].output_tokens == 30
    driver.assert_nothing_is_held()

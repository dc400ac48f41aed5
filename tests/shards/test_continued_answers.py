"""An answer that one engine began and another continues is the answer that one engine would have drawn."""

from __future__ import annotations

import json
from typing import Any

import pytest

from shards.exec.fake import FakeNetwork
from shards.exec.fake_device import FakeDevice
from shards.exec.network import Network
from shards.nouns import Cause, Finished, FinishReason, Grammar, GrammarForm
from tests.shards.driver import Driver, packed, some_tokens
from tests.shards.grammar.parts import VOCABULARY, a_tokenizer, end_id
from tests.shards.test_structured_output import run as run_with_grammars

LENGTH = 24

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "warm": {"temperature": 1.0, "seed": 7},
    "filtered": {"temperature": 1.3, "seed": 8, "top_k": 20, "top_p": 0.9},
    "repetition": {"temperature": 1.0, "seed": 9, "repetition_penalty": 1.8},
    "penalized": {"temperature": 1.0, "seed": 10, "presence_penalty": 1.5, "frequency_penalty": 1.5},
    "at least": {"temperature": 1.0, "seed": 11, "min_new_tokens": 20, "stop_token_ids": frozenset(range(0, 250, 3))},
    "logprobs": {"temperature": 1.0, "seed": 12, "top_logprobs": 2},
}


def answer(prompt: list[int], new: int, network: Network, *, answered: int = 0, **sampling: Any) -> tuple[Driver, Any]:
    driver = Driver(network)
    driver.ask("it", prompt, new, answered_tokens=answered, **sampling)
    driver.run()
    driver.assert_nothing_is_held()
    return driver, driver.ended["it", 0]


@pytest.mark.parametrize("make", [FakeNetwork, FakeDevice], ids=["host", "device"])
@pytest.mark.parametrize("cut", [1, 2, 13, 19, 23])
@pytest.mark.parametrize("way", WAYS)
def test_the_rest_is_drawn_as_if_the_beginning_had_been_drawn_here(way, cut, make):
    prompt = some_tokens(70)
    whole, _ = answer(prompt, LENGTH, make(), **WAYS[way])
    drawn = whole.drawn["it", 0]
    assert len(drawn) == LENGTH or way == "at least"
    if cut >= len(drawn):
        pytest.skip("the answer is shorter")
    rest, end = answer([*prompt, *drawn[:cut]], LENGTH - cut, make(), answered=cut, **WAYS[way])
    assert rest.drawn["it", 0] == drawn[cut:]
    assert end.reason is whole.ended["it", 0].reason
    assert end.output_tokens == len(drawn) - cut
    assert [found.logprob for each in rest.draws for found in each.logprobs] == pytest.approx(
        [found.logprob for each in whole.draws for found in each.logprobs][cut:]
    )


@pytest.mark.parametrize("cut", range(1, 9))
def test_a_stop_string_is_found_across_the_cut(cut):
    prompt, network = some_tokens(40), FakeNetwork()
    drawn = network.answer(prompt, 12)
    stop = "".join(Driver().engine.model.tokenizer.decode([token]) for token in drawn[3:9])
    rest, end = answer([*prompt, *drawn[:cut]], 12 - cut, FakeNetwork(), answered=cut, stop=(stop,))
    assert rest.drawn["it", 0] == drawn[cut:9]
    assert (end.reason, end.stop) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("cut", [1, 5, 9, 14])
def test_a_grammar_goes_on_where_the_answer_was_cut(cut):
    schema = json.dumps({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]})
    shaped: dict[str, Any] = {
        "grammar": Grammar(GrammarForm.JSON_SCHEMA, schema),
        "temperature": 1.0,
        "seed": 3,
        "ignore_eos": False,
    }

    def shaped_answer(prompt: list[int], new: int, answered: int) -> tuple[list[int], Finished]:
        driver = Driver(FakeNetwork(vocabulary=VOCABULARY), tokenizer=a_tokenizer(), eos=end_id())
        driver.ask("it", prompt, new, answered_tokens=answered, **shaped)
        run_with_grammars(driver)
        return driver.drawn["it", 0], driver.ended["it", 0]

    prompt = some_tokens(20)
    drawn, end = shaped_answer(prompt, 100, 0)
    cut = min(cut, len(drawn) - 1)
    assert shaped_answer([*prompt, *drawn[:cut]], 100 - cut, cut) == (
        drawn[cut:],
        Finished(
            "it", 0, end.reason, 20 + cut, 0, len(drawn) - cut, stop=end.stop, message=end.message, cause=end.cause
        ),
    )


def test_a_prompt_in_pieces_with_an_answer_behind_it_is_continued_too():
    prompt, network = some_tokens(100), FakeNetwork()
    drawn = network.answer(prompt, 20)
    driver = Driver(FakeNetwork())
    driver.open("it", 110, 10, answered_tokens=10, stop=("never there",))
    for at in range(0, 110, 30):
        driver.engine.extend("it", packed([*prompt, *drawn[:10]][at : at + 30]))
        driver.step()
    driver.run()
    assert driver.drawn["it", 0] == drawn[10:]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"answered_tokens": 5}, "answered_tokens is 5; it must be 0 or more, and below prompt_tokens"),
        ({"answered_tokens": 2, "choices": 2}, "choices is 2; an answer that began elsewhere has one"),
    ],
)
def test_what_cannot_be_continued_is_rejected(more, message):
    driver = Driver()
    driver.open("it", 5, 5, **more)
    driver.run()
    end = driver.ended["it", 0]
    assert (end.reason, end.message, end.cause) == (FinishReason.REJECTED, message, Cause.INVALID)

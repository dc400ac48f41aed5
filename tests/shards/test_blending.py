"""Documents that are taken from chunks, wherever they stand in a prompt."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shards.kv.chunks import DocumentChunk
from shards.kv.keys import BLOCK_TOKENS, block_keys, chunk_domain, root_key
from shards.kv.options import PoolOptions
from shards.nouns import Blend, Cause, DocumentSpan, FinishReason, KvSource
from tests.shards.driver import Driver, packed, some_tokens
from tests.shards.test_kv_exchange import address_of, drivers, work

SINK = some_tokens(4, 99)
HOST = BLOCK_TOKENS * 8 * 200


class Library:
    """Documents, and prompts of them."""

    def __init__(self, count: int = 6, *, seed: int = 0, least: int = 40, most: int = 300) -> None:
        rng = random.Random(seed)
        self.documents = [some_tokens(rng.randrange(least, most), seed * 1000 + at) for at in range(count)]

    def prompt(
        self, places: list[int], *, question: int = 0, preamble: int = 20
    ) -> tuple[list[int], list[DocumentSpan]]:
        tokens, spans = [*SINK, *some_tokens(preamble, 7)], []
        for place in places:
            spans.append(DocumentSpan(len(tokens), len(tokens) + len(self.documents[place])))
            tokens += self.documents[place]
        return [*tokens, *some_tokens(17, 500 + question)], spans


def ask(driver: Driver, key: object, given: tuple[list[int], list[DocumentSpan]], budget: float = 0.15, **more: object):
    prompt, spans = given
    driver.ask(key, prompt, blend=Blend(tuple(spans), budget), **more)


def ask_and_run(driver: Driver, key: object, given: tuple[list[int], list[DocumentSpan]], budget: float = 0.15):
    ask(driver, key, given, budget)
    driver.run()
    return driver.ended[key, 0]


def test_the_first_time_a_document_is_computed_in_place_and_later_it_is_blended_wherever_it_stands():
    driver, library = Driver(), Library()
    first = ask_and_run(driver, "first", library.prompt([0, 1, 2]))
    assert (first.cached_tokens, first.blended_tokens) == (0, 0)
    before = sum(driver.network.computed)
    second = ask_and_run(driver, "second", library.prompt([2, 0, 1], question=1))
    tokens = sum(map(len, library.documents[:3]))
    assert second.blended_tokens == pytest.approx(0.85 * tokens, abs=3)
    prompt, _ = library.prompt([2, 0, 1], question=1)
    assert sum(driver.network.computed) - before == len(prompt) - second.blended_tokens + 4
    assert driver.drawn["second", 0] == driver.network.answer(prompt, 5)
    driver.assert_nothing_is_held()


@pytest.mark.parametrize("budget", [0.0, 0.05, 0.3, 0.99, 1.0])
def test_a_budget_is_the_share_of_a_document_that_is_computed_again(budget):
    driver, library = Driver(), Library()
    ask_and_run(driver, "first", library.prompt([0, 1]))
    end = ask_and_run(driver, "second", library.prompt([1, 0]), budget)
    kept = sum(int((1 - budget) * len(document) + 1e-9) for document in library.documents[:2])
    assert end.blended_tokens == kept
    assert driver.drawn["second", 0] == driver.network.answer(library.prompt([1, 0])[0], 5)


def test_blocks_behind_a_blended_document_are_never_cached_for_exact_requests():
    driver, library = Driver(), Library()
    ask_and_run(driver, "first", library.prompt([0, 1, 2]))
    ask_and_run(driver, "blended", library.prompt([2, 1, 0]))
    prompt, _ = library.prompt([2, 1, 0])
    driver.ask("exact", prompt)
    driver.run()
    # the preamble is less than a block
    assert driver.ended["exact", 0].cached_tokens == 0
    assert driver.drawn["exact", 0] == driver.network.answer(prompt, 5)


def test_a_prompt_that_is_cached_exactly_is_not_blended():
    driver, library = Driver(), Library()
    given = library.prompt([0, 1, 2])
    ask_and_run(driver, "first", given)
    again = ask_and_run(driver, "again", given)
    assert (again.cached_tokens, again.blended_tokens) == ((len(given[0]) - 1) // BLOCK_TOKENS * BLOCK_TOKENS, 0)


def test_an_exactly_cached_beginning_comes_first_and_the_rest_of_its_last_document_is_blended():
    driver, library = Driver(), Library(least=200)
    ask_and_run(driver, "first", library.prompt([0, 1, 2]))
    end = ask_and_run(driver, "second", library.prompt([0, 2, 1]))
    assert end.cached_tokens == (24 + len(library.documents[0])) // BLOCK_TOKENS * BLOCK_TOKENS
    assert end.blended_tokens > 0.8 * (len(library.documents[1]) + len(library.documents[2]))
    assert driver.drawn["second", 0] == driver.network.answer(library.prompt([0, 2, 1])[0], 5)


def test_without_permission_a_document_is_neither_blended_nor_kept_as_a_chunk():
    driver, library = Driver(), Library()
    prompt, _ = library.prompt([0, 1])
    driver.ask("first", prompt)
    driver.run()
    assert sum(driver.network.computed) == len(prompt) + 4


def test_an_engine_that_is_deterministic_or_forbids_it_computes_everything():
    for options in ({"deterministic": True}, {"blend": "off"}):
        driver, library = Driver(**options), Library()
        assert not driver.engine.blends
        ask_and_run(driver, "first", library.prompt([0, 1]))
        assert ask_and_run(driver, "second", library.prompt([1, 0])).blended_tokens == 0
    with pytest.raises(ValueError, match="blend is on; it must be auto or off"):
        Driver(blend="on")


@pytest.mark.parametrize(
    ("blend", "message"),
    [
        (Blend((DocumentSpan(4, 60),), 1.5), "the budget of reuse is 1.5; it must be between 0 and 1"),
        (Blend((DocumentSpan(4, 60),), float("nan")), "the budget of reuse is nan; it must be between 0 and 1"),
        (Blend((DocumentSpan(40, 30),), 0.1), "a document is at 40 to 30 behind 0, of 100 prompt tokens"),
        (Blend((DocumentSpan(4, 60), DocumentSpan(50, 70)), 0.1), "a document is at 50 to 70 behind 60"),
        (Blend((DocumentSpan(4, 160),), 0.1), "a document is at 4 to 160 behind 0"),
        (Blend((DocumentSpan(4, 60),) * 513, 0.1), "it has 513 documents to reuse; at most 512 are"),
    ],
)
def test_documents_that_cannot_be_are_rejected(blend, message):
    driver = Driver()
    driver.ask("a", some_tokens(100), blend=blend)
    driver.run()
    end = driver.ended["a", 0]
    assert (end.reason, end.cause) == (FinishReason.REJECTED, Cause.INVALID)
    assert message in end.message


def test_a_domain_cannot_pretend_to_be_that_of_chunks():
    driver = Driver()
    driver.ask("a", some_tokens(100), domain=chunk_domain("other"))
    driver.run()
    assert driver.ended["a", 0].reason is FinishReason.REJECTED
    assert "in which no prompt is computed" in driver.ended["a", 0].message


def test_cancelling_a_request_ends_the_chunks_that_are_computed_for_it():
    driver, library = Driver(step_s=1e-9, chunk_tokens=64), Library(8)
    ask(driver, "a", library.prompt(list(range(8))))
    for _ in range(3):
        driver.step()
    assert driver.load.running > 1
    driver.engine.cancel("a")
    driver.run()
    assert driver.ended["a", 0].reason is FinishReason.CANCELLED
    assert list(driver.ended) == [("a", 0)]
    driver.assert_nothing_is_held()


def test_a_chunk_that_was_evicted_to_the_host_comes_back_and_one_that_is_lost_is_computed_again():
    for host_bytes in (HOST, 0):
        driver, library = Driver(kv_blocks=24, host_bytes=host_bytes), Library(4, least=200, most=201)
        ask_and_run(driver, "first", library.prompt([0, 1]))
        driver.ask("other", some_tokens(23 * BLOCK_TOKENS, 55))
        driver.run()
        end = ask_and_run(driver, "second", library.prompt([1, 0]))
        assert bool(end.blended_tokens) == bool(host_bytes)
        assert driver.drawn["second", 0] == driver.network.answer(library.prompt([1, 0])[0], 5)
        driver.assert_nothing_is_held()


def test_clearing_a_domain_forgets_its_chunks():
    driver, library = Driver(), Library()
    ask_and_run(driver, "first", library.prompt([0, 1]))
    assert driver.engine.clear_cache("") > 0
    driver.run()
    assert not driver.held
    assert ask_and_run(driver, "second", library.prompt([1, 0])).blended_tokens == 0


def test_no_report_speaks_of_the_requests_that_compute_chunks():
    driver, library = Driver(step_s=1e-9), Library()
    ask(driver, "a", library.prompt([0, 1, 2]))
    driver.run()
    assert {drawn.key for drawn in driver.draws} == set(driver.progress) == {"a"}


@pytest.mark.parametrize("host_bytes", [0, HOST], ids=["recomputed", "parked"])
@pytest.mark.parametrize("at", [1, 2, 5, 12])
def test_a_blended_sequence_outlives_a_preemption(host_bytes, at):
    driver, library = Driver(max_running=1, host_bytes=host_bytes, step_s=1e-9, chunk_tokens=64), Library()
    ask_and_run(driver, "first", library.prompt([0, 1, 2]))
    ask(driver, "low", library.prompt([2, 1, 0]), new=20, rank=1)
    for _ in range(at):
        driver.step()
    driver.ask("high", some_tokens(100, 1), new=10)
    driver.run()
    prompt, _ = library.prompt([2, 1, 0])
    assert driver.drawn["low", 0] == driver.network.answer(prompt, 20)
    assert driver.ended["low", 0].blended_tokens > 0
    driver.assert_nothing_is_held()


def a_driver(rng: random.Random) -> Driver:
    return Driver(
        kv_blocks=rng.choice([30, 80]),
        host_bytes=rng.choice([0, HOST]),
        max_running=rng.choice([2, 8]),
        step_s=rng.choice([1e-9, 0.05]),
        chunk_tokens=rng.choice([64, 8192]),
    )


@pytest.mark.parametrize("seed", range(8))
def test_through_any_history_every_answer_is_that_of_its_own_tokens(seed):
    rng = random.Random(seed)
    driver, library, asked = a_driver(rng), Library(8, seed=seed), {}
    for number in range(40):
        prompt, spans = library.prompt(rng.sample(range(8), rng.randrange(1, 4)), question=number)
        asked[number] = prompt
        budget, domain = rng.choice([0.0, 0.1, 0.5, 1.0]), rng.choice("ab")
        ask(
            driver, number, (prompt, spans), budget, rank=rng.randrange(2), domain=domain, choices=rng.choice([1, 1, 2])
        )
        for _ in range(rng.randrange(6)):
            driver.step()
        if rng.random() < 0.1:
            driver.engine.cancel(rng.choice(list(asked)))
        if rng.random() < 0.05:
            driver.engine.clear_cache(rng.choice("ab"))
    driver.run()
    ends = [end for end in driver.ended.values() if end.reason is not FinishReason.CANCELLED]
    assert sum(end.blended_tokens for end in ends) > 0
    for end in ends:
        assert driver.drawn[end.key, end.choice] == driver.network.answer(asked[end.key], 5)
    driver.assert_nothing_is_held()


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_shared", [False, True], ids=["apart", "together"])
def test_no_chunk_of_one_domain_is_used_in_another(seed, is_shared):
    rng = random.Random(seed)
    driver, library = a_driver(rng), Library(12, seed=seed)
    # each domain has each document once: what it reuses all the same, it has from another one
    asked = [
        (domain, places[at : at + 3])
        for domain in "abcd"
        for places in [rng.sample(range(12), 12)]
        for at in range(0, 12, 3)
    ]
    rng.shuffle(asked)
    for number, (domain, places) in enumerate(asked):
        named = "all" if is_shared else domain
        ask(driver, number, library.prompt(places, question=number), rng.choice([0.0, 0.2]), domain=named)
        for _ in range(rng.randrange(20)):
            driver.step()
    driver.run()
    blended = sum(end.blended_tokens for end in driver.ended.values())
    assert (blended > 0) == is_shared


def test_a_chunk_is_read_from_disk_after_a_restart_and_not_by_another_domain(tmp_path: Path) -> None:
    library = Library(3, least=200)
    first = Driver(kv_dir=tmp_path)
    ask(first, "first", library.prompt([0, 1]), domain="a")
    first.run()
    first.engine.preserve(5.0)
    first.engine.close()
    for domain, is_found in (("b", False), ("a", True)):
        later = Driver(kv_dir=tmp_path)
        ask(later, "later", library.prompt([1, 0]), 0.0, domain=domain)
        later.run()
        assert bool(later.ended["later", 0].blended_tokens) == is_found
        assert later.drawn["later", 0] == later.network.answer(library.prompt([1, 0])[0], 5)
        later.engine.close()


def test_a_chunk_is_fetched_from_the_shard_that_is_named_for_the_request() -> None:
    library = Library(3, least=200)
    with drivers({}, {}) as (owner, other):
        ask(owner, "first", library.prompt([0, 1]))
        work(owner, until="first")
        prompt, _ = given = library.prompt([1, 0])
        ask(other, "second", given, 0.0, source=KvSource(address_of(owner), len(prompt)))
        work(other, owner, until="second")
        assert other.ended["second", 0].blended_tokens > 0.9 * sum(map(len, library.documents[:2]))
        assert other.drawn["second", 0] == other.network.answer(prompt, 5)
        assert other.load.peers.blocks > 0


def test_a_chunk_can_be_pinned_like_a_prefix() -> None:
    driver, library = Driver(kv_blocks=24, pool=PoolOptions(pin_share=0.3)), Library(2, least=200, most=201)
    ask_and_run(driver, "first", library.prompt([0]))
    prompt, ((start, stop),) = library.prompt([0])
    chunk = DocumentChunk(packed(prompt), start, stop)
    whole = chunk.prompt[:-4]
    keys = block_keys(whole, root_key("m", chunk_domain("")))
    pinned = driver.engine.pin("it", keys, domain=chunk_domain(""), for_s=60.0)
    assert (pinned.held, pinned.pinned) == (len(keys), len(keys)) == (4, 4)
    driver.ask("other", some_tokens(18 * BLOCK_TOKENS, 55))
    driver.run()
    assert ask_and_run(driver, "second", library.prompt([0], question=1, preamble=33)).blended_tokens > 0

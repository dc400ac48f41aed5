"""Engines' blocks of 16 become ours of 64, for requests with the same salt only."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest

from backends.events.nouns import Cleared, Removed, Stored
from backends.events.vllm import decode
from backends.fake import FakeBackend
from policies.nouns import Delta
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
from router.fleet.feeds.folding import FoldingSink
from router.fleet.feeds.sink import RankCache
from router.fleet.prompt_keys import PromptKeys
from shards.kv.keys import block_keys, root_key
from tests.golden.event_encoders import vllm_0_26
from tests.policies.builders import a_backend, a_request
from tests.router.fleet.feeds.engine import Engine

SOURCE = RankCache("gpu-0")
PROMPT = tuple(range(1000, 1000 + 64 * 4))


def some_beliefs() -> Beliefs:
    return Beliefs(lambda _: False, lambda: 100.0)


def a_sink(beliefs: Beliefs, *models: str) -> FoldingSink:
    return FoldingSink(beliefs, lambda _: models or ("tiny",))


def ids(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}I", *tokens)


def keys_of(tokens: Sequence[int], domain: str = "acme", model: str = "tiny") -> tuple[int, ...]:
    return block_keys(ids(tokens), root_key(model, domain))


def stored(tokens: Sequence[int] = PROMPT, *, first: int = 0, size: int = 16, **what: object) -> Stored:
    names = tuple(range(first, first + len(tokens) // size))
    fields = {"parent": None, "salt": "acme", **what}
    return Stored(names, token_ids=ids(tokens), block_tokens=size, **fields)  # type: ignore[arg-type]


def held(beliefs: Beliefs, keys: Sequence[int]) -> dict[str, int]:
    return {name: match.blocks for name, match in beliefs.longest(PromptKeys(keys)).items()}


def test_four_blocks_of_sixteen_are_one_of_ours_and_the_first_that_goes_takes_it_along() -> None:
    beliefs = some_beliefs()
    sink = a_sink(beliefs)
    sink.hear(SOURCE, stored())
    assert held(beliefs, keys_of(PROMPT)) == {"gpu-0": 4}
    sink.hear(SOURCE, Removed((9,)))
    assert held(beliefs, keys_of(PROMPT)) == {"gpu-0": 2}
    sink.hear(SOURCE, Cleared())
    assert held(beliefs, keys_of(PROMPT)) == {}
    beliefs.check()


def test_another_domain_or_model_finds_nothing() -> None:
    beliefs = some_beliefs()
    a_sink(beliefs).hear(SOURCE, stored())
    assert held(beliefs, keys_of(PROMPT, domain="labs")) == {}
    assert held(beliefs, keys_of(PROMPT, model="other")) == {}


def test_a_block_that_an_image_is_in_is_left_out_with_all_that_continues_it() -> None:
    beliefs = some_beliefs()
    sink = a_sink(beliefs)
    sink.hear(SOURCE, stored(extra_keys=(("image",), *[()] * 15)))
    more = tuple(range(64))
    sink.hear(SOURCE, stored(more, first=100, parent=15, salt=None))
    assert held(beliefs, keys_of((*PROMPT, *more))) == {}


def asked(domain: str, tokens: Sequence[int] = PROMPT) -> PromptKeys:
    return PromptKeys(keys_of(tokens, domain), "tiny", token_ids=ids(tokens), shared_root=root_key("tiny", ""))


def answer(beliefs: Beliefs, prompt: PromptKeys) -> None:
    """`prompt` is sent to the backend and answered."""
    cluster = Cluster([FakeBackend("gpu-0")])
    flight = cluster.begin("gpu-0", a_request(prompt_tokens=len(prompt.token_ids) // 4), 1)
    flight.heard(Delta(text="x"), 100.0)
    cluster.end(flight)
    beliefs.longest(prompt)
    beliefs.sent("gpu-0", prompt)
    beliefs.ended(prompt, flight, a_backend("gpu-0"))


def reported(beliefs: Beliefs, prompt: PromptKeys) -> dict[str, int]:
    """The matches from events alone."""
    beliefs.longest(prompt)
    return {name: match.blocks for name, match in prompt.reported.items()}


def test_at_an_engine_without_salts_in_events_a_domain_finds_only_its_own_prompts() -> None:
    beliefs = some_beliefs()
    sink = a_sink(beliefs)
    sink.hear(SOURCE, stored(salt=None))
    assert reported(beliefs, asked("acme")) == reported(beliefs, asked("labs")) == {}
    answer(beliefs, asked("acme", PROMPT[: 64 * 3]))
    assert reported(beliefs, asked("acme")) == {"gpu-0": 3}
    assert reported(beliefs, asked("labs")) == {}
    sink.hear(SOURCE, Removed((4,)))
    assert reported(beliefs, asked("acme")) == {"gpu-0": 1}
    beliefs.forget("gpu-0")
    sink.forget("gpu-0")
    assert reported(beliefs, asked("acme")) == {}
    beliefs.check()


def test_events_without_salts_are_proven_by_the_engines_answers() -> None:
    beliefs = some_beliefs()
    sink = a_sink(beliefs)
    beliefs.trust("gpu-0", 0, 1.0)
    for number in range(6):
        tokens = tuple(range(number * 1000, number * 1000 + 128))
        sink.hear(SOURCE, stored(tokens, first=100 * number, salt=None))
        answer(beliefs, asked("acme", tokens))
    assert beliefs.parity.proven("tiny") == {"gpu-0"}
    # another domain's prompt of the same tokens is in the shared cache already, so no event tells of it
    for number in range(6):
        answer(beliefs, asked("labs", tuple(range(number * 1000, number * 1000 + 128))))
    beliefs.parity.tick()
    assert beliefs.parity.proven("tiny") == {"gpu-0"}
    beliefs.check()


def test_if_an_engine_reports_salts_prompts_without_one_belong_to_no_tenant() -> None:
    beliefs = some_beliefs()
    sink = FoldingSink(beliefs, lambda _: ("tiny",), lambda salt: salt == "acme")
    # the identifier of an image can be taken for a salt
    sink.hear(SOURCE, stored(salt="sha-of-an-image"))
    sink.hear(SOURCE, stored(tuple(range(64)), first=100, salt=None))
    assert len(beliefs.index) == 5
    sink.hear(SOURCE, stored(first=200))
    sink.hear(SOURCE, stored(tuple(range(500, 564)), first=300, salt=None))
    assert len(beliefs.index) == 9
    answer(beliefs, asked("acme", tuple(range(64))))
    assert reported(beliefs, asked("acme", tuple(range(64)))) == {}


def test_an_engine_that_is_sent_no_salts_is_proven_by_its_answers_whatever_salts_other_routers_have_sent_it() -> None:
    beliefs = some_beliefs()
    sink = FoldingSink(beliefs, lambda _: ("tiny",), is_salted=lambda _: False)
    beliefs.trust("gpu-0", 0, 1.0)
    for number in range(6):
        tokens = tuple(range(number * 1000, number * 1000 + 128))
        sink.hear(SOURCE, stored(tokens, first=200 * number, salt="acme"))
        # what another router has sent with a salt is no hit for a prompt without one
        assert reported(beliefs, asked("acme", tokens)) == {}
        sink.hear(SOURCE, stored(tokens, first=200 * number + 100, salt=None))
        answer(beliefs, asked("acme", tokens))
        assert reported(beliefs, asked("acme", tokens)) == {"gpu-0": 2}
    assert beliefs.parity.proven("tiny") == {"gpu-0"}
    beliefs.check()


def test_an_engine_with_more_blocks_than_are_remembered_need_not_report_every_block() -> None:
    beliefs = some_beliefs()
    sink = FoldingSink(beliefs, lambda _: ("tiny",), most_blocks=64)
    sink.hear(SOURCE, stored())
    for first, is_whole in ((0, True), (100, True), (1000, False), (2000, False)):
        tokens = tuple(range(first, first + 512))
        sink.hear(SOURCE, stored(tokens, first=first))
        beliefs.trust("gpu-0", 0, 1.0, is_whole=True)
        assert beliefs.is_whole("gpu-0") == is_whole, first
    sink.hear(SOURCE, Cleared(is_empty=True))
    beliefs.trust("gpu-0", 0, 1.0, is_whole=True)
    assert beliefs.is_whole("gpu-0")


def test_the_blocks_of_an_adapter_are_found_under_its_name_and_not_under_its_models() -> None:
    beliefs = some_beliefs()
    sink = a_sink(beliefs)
    sink.hear(SOURCE, stored(adapter="sql"))
    more = tuple(range(64))
    sink.hear(SOURCE, stored(more, first=100, parent=15, salt=None, adapter="sql"))
    assert held(beliefs, keys_of((*PROMPT, *more))) == {}
    assert held(beliefs, keys_of((*PROMPT, *more), model="sql")) == {"gpu-0": 5}
    sink.hear(SOURCE, Removed((100,)))
    assert held(beliefs, keys_of((*PROMPT, *more), model="sql")) == {"gpu-0": 4}


def test_a_model_of_several_names_is_found_under_each_of_them() -> None:
    beliefs = some_beliefs()
    sink = a_sink(beliefs, "tiny", "tiny-chat")
    sink.hear(SOURCE, stored())
    for model in ("tiny", "tiny-chat"):
        assert held(beliefs, keys_of(PROMPT, model=model)) == {"gpu-0": 4}
    sink.hear(SOURCE, Removed((0,)))
    assert held(beliefs, keys_of(PROMPT, model="tiny-chat")) == {}


def test_what_comes_before_an_image_is_held() -> None:
    beliefs = some_beliefs()
    a_sink(beliefs).hear(SOURCE, stored(extra_keys=(*[()] * 9, ("image",), *[()] * 6)))
    assert held(beliefs, keys_of(PROMPT)) == {"gpu-0": 2}


def test_before_a_backend_was_reached_its_name_of_the_model_is_unknown() -> None:
    beliefs = some_beliefs()
    FoldingSink(beliefs, lambda _: ()).hear(SOURCE, stored())
    assert held(beliefs, keys_of(PROMPT)) == {}


def test_a_hit_at_one_of_two_ranks_is_a_chance_of_one_half() -> None:
    beliefs = some_beliefs()
    sink = a_sink(beliefs)
    sink.hear(RankCache("gpu-0", 0), stored())
    sink.hear(RankCache("gpu-0", 1), Cleared())
    match = beliefs.longest(PromptKeys(keys_of(PROMPT)))["gpu-0"]
    assert (match.blocks, match.p_hit, match.expected_blocks) == (4, 0.5, 2.0)


def test_a_feed_that_is_behind_is_believed_less() -> None:
    beliefs = some_beliefs()
    a_sink(beliefs).hear(SOURCE, stored())
    beliefs.trust("gpu-0", 0, 0.25)
    assert beliefs.longest(PromptKeys(keys_of(PROMPT)))["gpu-0"].expected_blocks == 1.0


@pytest.mark.parametrize("seed", range(60))
def test_the_index_claims_exactly_the_whole_blocks_that_an_engine_holds_of_any_prompt(seed: int) -> None:
    rng = random.Random(seed)
    beliefs = some_beliefs()
    sink = a_sink(beliefs)
    engine = Engine(vllm_0_26, rng, size=rng.randint(8, 40), block_size=16, salts=("acme", "labs"))
    documents = [tuple(rng.randrange(5000) for _ in range(64 * 3)) for _ in range(3)]
    prompts = [
        (rng.choice(("acme", "labs")), rng.choice(documents) + tuple(rng.randrange(5000) for _ in range(96)))
        for _ in range(6)
    ]
    for _ in range(30):
        batch = decode(engine.publish(list(engine.run(rng.choice(prompts)))).payload)
        for event in batch.events:
            sink.hear(SOURCE, event)
        for salt, tokens in prompts:
            whole = 0
            while (salt, tokens[: 64 * (whole + 1)]) in engine.held and all(
                (salt, tokens[: 64 * whole + end]) in engine.held for end in (16, 32, 48, 64)
            ):
                whole += 1
                if 64 * (whole + 1) > len(tokens):
                    break
            assert held(beliefs, keys_of(tokens, domain=salt)) == ({"gpu-0": whole} if whole else {})
    beliefs.check()

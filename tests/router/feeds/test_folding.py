"""What engines tell in blocks of 16 becomes ours of 64, for whoever asks with the same salt, and for nobody else."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

import pytest

from backends.events.nouns import Cleared, Removed, Stored
from backends.events.vllm import decode
from router.beliefs import Beliefs
from router.feeds.folding import FoldingSink
from router.feeds.sink import Source
from router.prompt_keys import PromptKeys
from shards.kv.keys import block_keys, root_key
from tests.golden.event_encoders import vllm_0_26
from tests.router.feeds.engine import Engine

SOURCE = Source("gpu-0")
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


@pytest.mark.parametrize(
    "event",
    [stored(salt=None), stored(extra_keys=(("image",), *[()] * 15))],
    ids=["no salt", "an image"],
)
def test_what_nobody_here_can_ask_for_is_left_out_with_all_that_continues_it(event: Stored) -> None:
    beliefs = some_beliefs()
    sink = a_sink(beliefs)
    sink.hear(SOURCE, event)
    more = tuple(range(64))
    sink.hear(SOURCE, stored(more, first=100, parent=event.hashes[-1], salt=None))
    assert held(beliefs, keys_of((*PROMPT, *more))) == {}


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


def test_before_a_backend_was_reached_nobody_knows_what_its_model_is_called() -> None:
    beliefs = some_beliefs()
    FoldingSink(beliefs, lambda _: ()).hear(SOURCE, stored())
    assert held(beliefs, keys_of(PROMPT)) == {}


def test_a_hit_at_one_of_two_ranks_is_a_chance_of_one_half() -> None:
    beliefs = some_beliefs()
    sink = a_sink(beliefs)
    sink.hear(Source("gpu-0", 0), stored())
    sink.hear(Source("gpu-0", 1), Cleared())
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

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from shards.model import Model
from shards.nouns import Drawn
from tests.shards.driver import Driver
from tests.shards.tiny_checkpoints import VOCABULARY, save_checkpoint

NEW = 30


def some_tokens(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(count)]


PROMPT = some_tokens(400)


@pytest.fixture(scope="module", params=["qwen3", "mistral, window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_checkpoint(path, request.param)
    return path


def a_driver(model: Path, **options: object) -> Driver:
    network = Model.load(model).network
    return Driver(network, **{"kv_blocks": 600, "max_running": 64, **options})


def ask(driver: Driver, key: str = "it", **more: object) -> None:
    driver.ask(key, PROMPT, new=NEW, top_logprobs=20, rank=1, **more)


def drawn_by(driver: Driver, key: str = "it") -> list[Drawn]:
    return [Drawn("it", 0, draw.token_ids, draw.logprobs) for draw in driver.draws if draw.key == key]


def beside_63_others(driver: Driver) -> None:
    rng = random.Random(1)
    for other in range(63):
        driver.ask(other, some_tokens(rng.randint(1, 150), other + 1), new=rng.randint(1, 6), rank=1)
        if rng.random() < 0.2:
            driver.step(check=False)
    ask(driver)
    driver.run()


def warm(driver: Driver) -> None:
    ask(driver, "cold")
    driver.run()
    ask(driver)
    driver.run()


def warm_up_to_a_part_of_a_block(driver: Driver) -> None:
    driver.ask("other", PROMPT[:350] + some_tokens(20, 5))
    driver.run()
    ask(driver)
    driver.run()


def in_crumbs(driver: Driver) -> None:
    driver.open("it", len(PROMPT), NEW, top_logprobs=20, prefill_slice=64)
    for start in range(0, len(PROMPT), 30):
        driver.engine.extend("it", b"".join(token.to_bytes(4, "little") for token in PROMPT[start : start + 30]))
        driver.step()
    driver.run()


def after_its_own_answer(driver: Driver) -> None:
    ask(driver, "first")
    driver.run()
    answer = driver.drawn["first", 0]
    driver.ask("second", PROMPT + answer, new=1)
    ask(driver)
    driver.run()


def preempted(driver: Driver, steps: int) -> None:
    ask(driver)
    for _ in range(steps):
        driver.step()
    driver.ask("better", some_tokens(100, 7), rank=0)
    driver.run()
    assert [key for key, _ in driver.ended] == ["better", "it"]


def restored_from_the_host(driver: Driver) -> None:
    ask(driver, "cold")
    driver.run()
    driver.ask("flood", some_tokens(460, 3), rank=1)
    driver.run()
    assert driver.tiers["host"]
    ask(driver)
    driver.run()
    assert driver.ended["it", 0].cached_tokens >= 256


ONE_SLOT = {"max_running": 1}
HOST = {"host_bytes": 2**24}

SCENES: dict[str, tuple[Callable[[Driver], None], dict[str, object]]] = {
    "beside 63 others": (beside_63_others, {}),
    "with blocks that lie apart": (beside_63_others, {"kv_blocks": 60}),
    "warm": (warm, {}),
    "warm up to a part of a block": (warm_up_to_a_part_of_a_block, {}),
    "in crumbs": (in_crumbs, {}),
    "after its own answer": (after_its_own_answer, {}),
    "preempted in its prompt": (lambda driver: preempted(driver, 1), {**ONE_SLOT, "chunk_tokens": 256}),
    "preempted and recomputed": (lambda driver: preempted(driver, 20), ONE_SLOT),
    "preempted and parked": (lambda driver: preempted(driver, 20), {**ONE_SLOT, **HOST}),
    "restored from the host": (restored_from_the_host, {"kv_blocks": 8, **HOST}),
}


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[bool, list[Drawn]]:
    answers = {}
    for deterministic in (True, False):
        driver = a_driver(model, deterministic=deterministic)
        ask(driver)
        driver.run()
        answers[deterministic] = drawn_by(driver)
    return answers


@pytest.mark.parametrize("scene", SCENES)
def test_a_deterministic_engine_answers_the_same_to_the_last_bit(
    model: Path, alone: dict[bool, list[Drawn]], scene: str
):
    play, options = SCENES[scene]
    driver = a_driver(model, deterministic=True, **options)
    play(driver)
    assert len(alone[True]) == NEW
    assert drawn_by(driver) == alone[True]


@pytest.mark.parametrize("scene", SCENES)
def test_any_engine_answers_the_same_up_to_rounding(model: Path, alone: dict[bool, list[Drawn]], scene: str):
    play, options = SCENES[scene]
    driver = a_driver(model, **options)
    play(driver)
    for together_answer, alone_answer in zip(drawn_by(driver), alone[False], strict=True):
        assert together_answer.token_ids == alone_answer.token_ids
        ours, theirs = dict(together_answer.logprobs[0].top), dict(alone_answer.logprobs[0].top)
        for token in ours.keys() & theirs.keys():
            assert ours[token] == pytest.approx(theirs[token], abs=1e-4)

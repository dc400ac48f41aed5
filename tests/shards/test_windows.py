"""The engine with networks whose layers see only the last positions, and have pages of their own for their KV."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from shards.exec.fake import FakeNetwork
from shards.kv.keys import BLOCK_TOKENS
from shards.kv.window_layout import KvWindow
from shards.kv.window_pages import WindowPages
from shards.model import Model
from shards.nouns import Cause, FinishReason
from tests.shards.driver import Driver
from tests.shards.tiny_checkpoints import save_checkpoint, some_tokens

KINDS = ["mistral, window", "phi3", "gemma3", "gpt-oss", "qwen2, window from layer 1, yarn"]


def a_driver(
    network: FakeNetwork | None = None, *, window: int = 100, page_bytes: int = 256, **options: object
) -> Driver:
    return Driver(network or FakeNetwork(window=KvWindow(window, page_bytes)), **options)


def windows_of(driver: Driver) -> WindowPages:
    windows = driver.engine._pool.windows
    assert windows is not None
    return windows


def random_prompt(rng: random.Random, tokens: int) -> list[int]:
    return [rng.randrange(200) for _ in range(tokens)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("kv_dtype", "tolerance"), [("auto", 1e-4), ("int8", 0.03)])
def test_logits_are_those_of_one_pool_over_several_windows(
    tmp_path: Path, kind: str, kv_dtype: str, tolerance: float
) -> None:
    save_checkpoint(tmp_path, kind)
    divided, whole = (
        Driver(
            Model.load(tmp_path, kv_dtype=kv_dtype).network,
            kv_blocks=11,
            max_running=4,
            chunk_tokens=128,
            window_kv=window_kv,
        )
        for window_kv in ("auto", "all")
    )
    assert windows_of(divided).size <= 11
    assert whole.engine._pool.windows is None
    for driver in (divided, whole):
        for number in range(4):
            # the second and the fourth begin like the others
            driver.ask(number, some_tokens(150 + 60 * number, seed=number % 2), new=40, top_logprobs=20)
            driver.step()
        driver.run()
    assert divided.drawn == whole.drawn
    # in eight bits, another cut of a prompt rounds some numbers the other way
    assert logprobs_of(divided) == pytest.approx(logprobs_of(whole), abs=tolerance)


def logprobs_of(driver: Driver) -> list[float]:
    """Those of all drawn tokens, answer by answer."""
    return [
        logprobs.logprob for draw in sorted(driver.draws, key=lambda draw: str(draw.key)) for logprobs in draw.logprobs
    ]


def test_logits_are_those_of_transformers_far_behind_the_window(tmp_path: Path) -> None:
    theirs, tokens = save_checkpoint(tmp_path, "gemma3"), some_tokens(450)
    driver = Driver(Model.load(tmp_path).network, kv_blocks=8, max_running=2, chunk_tokens=128)
    assert windows_of(driver).size < 8
    driver.ask("it", tokens, new=5, top_logprobs=5)
    driver.run()
    answer = driver.drawn["it", 0]
    with torch.inference_mode():
        expected = theirs(torch.tensor([tokens + answer])).logits[0].log_softmax(-1)
    logprobs = [logprobs for draw in driver.draws for logprobs in draw.logprobs]
    for place, (token, found) in enumerate(zip(answer, logprobs, strict=True)):
        assert abs(found.logprob - expected[len(tokens) + place - 1, token].item()) < 1e-3


@pytest.mark.parametrize("seed", range(8))
def test_random_loads_get_their_answers_and_lose_nothing(seed: int) -> None:
    rng = random.Random(seed)
    window = KvWindow(rng.choice([1, 40, 64, 65, 100, 128, 200, 300]), rng.choice([64, 256, 384, 448, 512]))
    network = FakeNetwork(window=window)
    deterministic = seed % 4 == 3
    driver = a_driver(
        network,
        kv_blocks=rng.choice([16, 24, 40]),
        max_running=rng.choice([2, 4, 8]),
        deterministic=deterministic,
        chunk_tokens=rng.choice([256, 512, 8192]),
    )
    prefixes = [random_prompt(rng, rng.randrange(1200)) for _ in range(3)]
    asked: dict[int, tuple[list[int], int]] = {}
    for number in range(10):
        prefix = rng.choice(prefixes)
        prompt = prefix[: rng.randrange(len(prefix) + 1)] + random_prompt(rng, rng.randint(1, 300))
        asked[number] = (prompt, rng.randint(1, 100))
        # every step is checked: blocks, pages, their holders, and room for all that run
        driver.ask(number, prompt, asked[number][1], rank=rng.randrange(3), preemptible=True)
        for _ in range(rng.randrange(25)):
            driver.step()
        if rng.random() < 0.1:
            driver.engine.cancel(rng.choice(list(asked)))
        if rng.random() < 0.1:
            driver.engine.clear_cache()
    driver.run()
    for number, (prompt, new) in asked.items():
        ended = driver.ended[number, 0]
        if ended.cause is Cause.CONTEXT:
            assert len(prompt) + new > driver.engine._limits.blocks * BLOCK_TOKENS - BLOCK_TOKENS
        elif ended.reason is not FinishReason.CANCELLED:
            assert ended.reason is FinishReason.LENGTH, ended.message
            assert driver.drawn[number, 0] == network.answer(prompt, new)
    driver.assert_nothing_is_held()


def test_a_prompt_that_one_pool_refuses_fits() -> None:
    prompt = random_prompt(random.Random(0), 3000)
    whole, divided = (a_driver(kv_blocks=40, max_running=4, window_kv=kv) for kv in ("all", "auto"))
    for driver in (whole, divided):
        driver.ask("it", prompt, new=3)
        driver.run()
    assert "need 47 KV blocks and this shard has 40" in whole.ended["it", 0].message
    assert divided.drawn["it", 0] == FakeNetwork().answer(prompt, 3)


def test_more_long_sequences_run_at_the_same_time_in_the_same_memory() -> None:
    running: dict[str, int] = {}
    for window_kv in ("all", "auto"):
        driver = a_driver(page_bytes=448, kv_blocks=48, max_running=8, window_kv=window_kv)
        for number in range(8):
            driver.ask(number, random_prompt(random.Random(number), 1000), new=20)
        running[window_kv] = 0
        while len(driver.ended) < 8:
            driver.step()
            assert driver.load is not None
            running[window_kv] = max(running[window_kv], driver.load.running)
    assert running == {"all": 3, "auto": 7}


def test_no_sequence_starts_without_pages_for_it() -> None:
    driver = a_driver(window=640, page_bytes=500, kv_blocks=30, max_running=8)
    windows = windows_of(driver)
    for number in range(8):
        driver.ask(number, random_prompt(random.Random(number), 800), new=20)
    driver.step()
    assert driver.load is not None
    assert driver.load.running < 8
    assert driver.load.running * windows.window.pages(1) <= windows.size
    driver.run()
    assert len(driver.ended) == 8


def test_the_next_turn_finds_the_whole_conversation() -> None:
    driver = a_driver(kv_blocks=40, max_running=4)
    prompt = random_prompt(random.Random(0), 1000)
    driver.ask("first", prompt, new=30)
    driver.run()
    driver.ask("second", prompt + driver.drawn["first", 0] + [1, 2, 3], new=3)
    driver.run()
    assert driver.ended["second", 0].cached_tokens == 1029 // BLOCK_TOKENS * BLOCK_TOKENS


def test_a_hit_of_which_pages_are_missing_is_shorter_and_the_answer_the_same() -> None:
    driver = a_driver(kv_blocks=40, max_running=2)
    prompt = random_prompt(random.Random(0), 1500)
    driver.ask("first", prompt, new=3)
    driver.run()
    # of the middle of a prompt the pages went to what came behind it
    driver.ask("branch", [*prompt[:700], 7], new=3)
    driver.run()
    assert 0 <= driver.ended["branch", 0].cached_tokens < 640
    driver.ask("again", [*prompt[:700], 8], new=3)
    driver.run()
    assert driver.ended["again", 0].cached_tokens == 640
    for key, last in (("branch", 7), ("again", 8)):
        assert driver.drawn[key, 0] == FakeNetwork().answer([*prompt[:700], last], 3)


@pytest.mark.parametrize("option", [{"host_bytes": 2**16}, {"window_kv": "all"}])
def test_blocks_that_leave_the_device_have_all_layers(option: dict[str, object]) -> None:
    driver = a_driver(kv_blocks=40, max_running=4, **option)
    assert driver.engine._pool.windows is None
    assert driver.engine.blends
    assert not a_driver(kv_blocks=40, max_running=4).engine.blends


def test_another_choice_of_window_kv_is_refused() -> None:
    with pytest.raises(ValueError, match="window_kv is some; it must be auto or all"):
        a_driver(window_kv="some")


def test_chunks_are_no_longer_than_their_pages_allow() -> None:
    driver = a_driver(kv_blocks=40, max_running=4)
    assert driver.engine.options.chunk_tokens == (windows_of(driver).size // 4 - 3) * BLOCK_TOKENS
    driver.ask("it", random_prompt(random.Random(0), 2000), new=1)
    driver.run()
    assert max(driver.network.computed) <= driver.engine.options.chunk_tokens  # type: ignore[attr-defined]


def test_kv_of_layers_apart_cannot_be_moved(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "gemma3")
    network = Model.load(tmp_path).network
    network.allocate_divided(8, 4)  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="so they cannot be moved"):
        network.host_memory(2)  # type: ignore[attr-defined]

import random

import pytest

from policies.prefix.speculation import Speculation


def a_prompt(blocks: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.getrandbits(64) for _ in range(blocks)]


def test_a_burst_of_equal_prompts_finds_where_the_first_one_went() -> None:
    speculation, prompt = Speculation(p_hit=0.8), a_prompt(100)
    assert speculation.longest(prompt, 0.0) == {}
    speculation.sent("a", prompt, 0.0)
    (match,) = speculation.longest(prompt, 0.1).values()
    # 16 one by one, then every 16th: 16 + 5 * 16
    assert (match.blocks, match.p_hit) == (96, 0.8)
    assert speculation.longest([], 0.1) == {}


def test_what_differs_late_shares_its_beginning() -> None:
    speculation, prompt = Speculation(), a_prompt(100)
    speculation.sent("a", prompt, 0.0)
    for shared, found in [(5, 5), (16, 16), (31, 16), (32, 32), (99, 96)]:
        other = prompt[:shared] + a_prompt(200, seed=1)
        assert speculation.longest(other, 0.0)["a"].blocks == found


def test_an_entry_lasts_its_time_and_no_longer_than_twice_it() -> None:
    speculation, prompt = Speculation(lasts_s=5.0), a_prompt(10)
    speculation.longest(prompt, 100.0)
    speculation.sent("a", prompt, 104.0)
    assert "a" in speculation.longest(prompt, 109.5)
    assert speculation.longest(prompt, 114.6) == {}
    speculation.sent("a", prompt, 115.0)
    assert speculation.longest(prompt, 500.0) == {}
    speculation.check()


def test_a_backend_that_failed_is_not_believed() -> None:
    speculation, prompt = Speculation(), a_prompt(10)
    speculation.sent("a", prompt, 0.0)
    speculation.sent("b", prompt, 0.0)
    speculation.forget("a")
    assert set(speculation.longest(prompt, 0.0)) == {"b"}


def test_it_stays_within_its_bytes() -> None:
    speculation = Speculation(max_bytes=2**17)
    for seed in range(300):
        speculation.sent(f"b{seed % 5}", a_prompt(60, seed), seed * 0.001)
    speculation.check()
    assert speculation.size_bytes() <= 2**17
    assert "young" in repr(speculation)


def test_a_full_young_generation_grows_old_early_and_the_newest_prompt_is_kept() -> None:
    speculation, prompts = Speculation(max_bytes=2**15), [a_prompt(60, seed) for seed in range(20)]
    for prompt in prompts:
        speculation.sent("a", prompt, 0.0)
        speculation.check()
        assert speculation.longest(prompt, 0.0)["a"].blocks == 48
    assert speculation.longest(prompts[-2], 0.0)
    assert speculation.longest(prompts[0], 0.0) == {}
    assert speculation.size_bytes() <= 2**15


def test_a_prompt_of_more_keys_than_are_kept_is_known_by_its_beginning() -> None:
    speculation, prompt = Speculation(max_bytes=2**12), a_prompt(400)
    speculation.sent("a", prompt, 0.0)
    speculation.check()
    assert 0 < speculation.longest(prompt, 0.0)["a"].blocks < 400


@pytest.mark.parametrize("seed", range(30))
def test_of_any_history_it_knows_for_each_backend_the_longest_beginning_that_was_sent_there(seed: int) -> None:
    rng, speculation, sent = random.Random(seed), Speculation(lasts_s=1e9), dict[str, list[list[int]]]()
    trunk = a_prompt(300, seed)
    prompts = [trunk[: rng.randrange(301)] + a_prompt(rng.choice([0, 1, 20, 60]), 1000 + at) for at in range(6)]
    for _ in range(40):
        backend, prompt = f"b{rng.randrange(12)}", rng.choice(prompts)
        if rng.random() < 0.1:
            speculation.forget(backend)
            sent.pop(backend, None)
        else:
            speculation.sent(backend, prompt, 0.0)
            sent.setdefault(backend, []).append(prompt)
        speculation.check()
        asked = rng.choice(prompts)
        found = {name: match.blocks for name, match in speculation.longest(asked, 0.0).items()}
        expected = {name: max(recorded_of(asked, other) for other in others) for name, others in sent.items()}
        assert found == {name: blocks for name, blocks in expected.items() if blocks}


def recorded_of(asked: list[int], other: list[int]) -> int:
    """The blocks that both begin with, up to a recorded one: of the first 16 each, then every 16th."""
    pairs = zip(asked, other, strict=False)
    shared = next((at for at, (one, two) in enumerate(pairs) if one != two), min(len(asked), len(other)))
    return shared if shared < 16 else shared // 16 * 16

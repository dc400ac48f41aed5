import random

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

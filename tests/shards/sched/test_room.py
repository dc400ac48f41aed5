from __future__ import annotations

import random

import pytest

from shards.kv.keys import BLOCK_TOKENS
from shards.sched.room import Claim, Room, peak_blocks


def a_decoding(context: int, left: int, blocks: tuple[int, ...]) -> Claim:
    return Claim(blocks, context + 1, context + left, is_steady=True)


def blocks_of(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


def test_no_sequences_need_no_blocks():
    assert peak_blocks([]) == 0


def test_one_sequence_wants_its_peak():
    assert peak_blocks([a_decoding(100, 100, (1, 2))]) == 4
    assert peak_blocks([Claim((), 1000, 1063, is_steady=False)]) == 17


def test_sequences_that_end_soon_make_room_for_growing_ones():
    early = a_decoding(640, 10, tuple(range(10)))
    late = a_decoding(64, 640, (20,))
    # at the early one's end 11 + 2; at the late one's 11: together they would be 11 + 11
    assert peak_blocks([early, late]) == 13


def test_a_prefilling_sequence_may_take_any_time_and_keeps_its_claim():
    prefilling = Claim((), 64, 704, is_steady=False)
    assert peak_blocks([prefilling, a_decoding(64, 640, (20,))]) == 22


def test_shared_blocks_count_once_and_for_the_sequence_that_lives_longest():
    shared = tuple(range(10))
    short, long = a_decoding(640, 10, (*shared,)), a_decoding(700, 300, (*shared, 10))
    # after the short one's end the shared blocks are still held
    assert peak_blocks([short, long]) == 16
    assert peak_blocks([short, long, Claim(shared, 650, 650, is_steady=False)]) == 17


def test_a_room_says_which_sequences_fit_now_and_after_another_leaves():
    room = Room(10, {1: a_decoding(64, 300, (1,))})
    large = Claim((), 400, 500, is_steady=False)
    assert room.is_sound
    assert not room.fits(large)
    assert room.without(1).fits(large)
    room.add(2, large)
    assert not room.is_sound


def by_brute_force(claims: list[Claim]) -> int:
    """Each step looked at, each block in a set; a block that no sequence holds yet gets a name of its own."""
    worst = 0
    last = max(claim.final_tokens for claim in claims) + 1
    for step in range(1, last + 1):
        held: set[object] = set()
        for number, claim in enumerate(claims):
            if step <= claim.steps_left:
                wanted = blocks_of(min(claim.next_tokens + step - 1, claim.final_tokens))
                held.update(claim.blocks)
                held.update((number, new) for new in range(len(claim.blocks), wanted))
        worst = max(worst, len(held))
    return worst


@pytest.mark.parametrize("seed", range(40))
def test_the_closed_form_is_the_peak_over_all_steps(seed):
    rng = random.Random(seed)
    trunks = [tuple(range(at, at + 8)) for at in (0, 100)]
    claims = []
    for number in range(rng.randint(1, 6)):
        shared = rng.choice(trunks)[: rng.randint(0, 8)]
        blocks = (*shared, *range(1000 * (number + 1), 1000 * (number + 1) + rng.randint(0, 3)))
        context = max(0, len(blocks) * BLOCK_TOKENS - rng.randint(0, 63))
        if blocks and rng.random() < 0.6:
            claims.append(a_decoding(context, rng.randint(1, 300), blocks))
        else:
            prompt = len(blocks) * BLOCK_TOKENS + rng.randint(1, 300)
            claims.append(Claim(blocks, prompt, prompt + rng.randint(0, 300), is_steady=False))
    assert peak_blocks(claims) == by_brute_force(claims)


def test_pages_are_claimed_until_the_end_whether_shared_or_not() -> None:
    claims = {number: Claim((1, 2), 100, 120, is_steady=True, pages=3) for number in range(2)}
    room, third = Room(100, claims, pages=8), Claim((), 10, 20, is_steady=False, pages=3)
    assert room.is_sound
    assert not room.fits(third)
    assert room.fits(third._replace(pages=2))
    assert room.without(0).fits(third)
    assert not Room(100, claims, pages=5).is_sound

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from shards.exec.request import Request
from shards.exec.sequence import Sequence
from shards.kv.pool import BlockPool
from shards.kv.table import BlockTable
from shards.nouns import Progress, Submission
from shards.options import EngineOptions
from shards.scheduler import Scheduler
from tests.shards.driver import packed, some_tokens


def a_scheduler(blocks: int = 20, **options: object) -> Scheduler:
    return Scheduler(BlockPool(blocks, model="m"), EngineOptions(**options))  # type: ignore[arg-type]


def enter(scheduler: Scheduler, arrival: int, tokens: int, *, new: int = 10, rank: int = 0, lag: int = 0) -> Sequence:
    request = Request(Submission(arrival, tokens, new, rank=rank))
    request.prompt += packed(some_tokens(tokens, arrival))
    sequence = Sequence(request, 0, arrival=arrival, table=BlockTable(scheduler.pool, ""), lag=lag)
    scheduler.roster.enter(sequence)
    return sequence


def advance(scheduler: Scheduler, *, check: bool = True) -> None:
    """One step with a network that always draws token 1."""
    step = scheduler.next_step(0.0)
    for piece in step.pieces:
        sequence = piece.sequence
        scheduler.advance(piece)
        scheduler.store(sequence)
        if piece.draws:
            scheduler.take(sequence, 1)
            if len(sequence.output) == sequence.request.submission.max_new_tokens:
                scheduler.finish(sequence)
    if check:
        scheduler.check()


def test_it_needs_no_torch():
    code = "import sys, shards.scheduler; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_serves_without_a_network():
    scheduler = a_scheduler()
    enter(scheduler, 1, 100, new=2)
    advance(scheduler)
    assert scheduler.drain_progress() == (Progress(1, 100, 0),)
    advance(scheduler)
    assert not scheduler.roster.requests


def test_the_computed_part_of_a_prompt_brings_its_first_token_nearer():
    scheduler = a_scheduler(blocks=40)
    enter(scheduler, 1, 2000)
    whole_s = scheduler.predictions(0.0)[1]
    for _ in range(2):
        advance(scheduler)
    (progress,) = scheduler.drain_progress()
    assert 500 < progress.computed_tokens < 1500
    rest_share = 1 - progress.computed_tokens / 2000
    assert scheduler.predictions(0.0)[1] == pytest.approx(rest_share * whole_s, rel=0.1)


def test_more_are_admitted_than_the_sum_of_all_peaks_allows():
    scheduler = a_scheduler(blocks=12)
    early = enter(scheduler, 1, 300, new=20)
    advance(scheduler)
    late = enter(scheduler, 2, 64, new=400)
    # 5 and 8 blocks at their peaks, which are not at the same time
    advance(scheduler)
    assert set(scheduler.roster.running) == {1, 2}
    for _ in range(500):
        advance(scheduler, check=False)
    assert (len(early.output), len(late.output)) == (20, 400)
    assert early.request.preemptions == late.request.preemptions == 0


def test_a_sequence_out_of_blocks_for_an_outside_reason_waits_at_no_cost_to_others():
    scheduler = a_scheduler(blocks=4)
    first = enter(scheduler, 1, 128, new=40)
    advance(scheduler)
    taken = scheduler.pool.take(scheduler.pool.available)
    step = scheduler.next_step(0.0)
    assert step.pieces == ()
    assert first.arrival in scheduler.roster.waiting
    scheduler.pool.release(taken)
    for _ in range(60):
        advance(scheduler)
    assert len(first.output) == 40


@pytest.mark.parametrize("seed", range(16))
def test_a_running_sequence_never_lacks_a_block_however_slowly_others_prefill(seed):
    rng = random.Random(seed)
    scheduler = a_scheduler(blocks=rng.choice([8, 12]), batch_tokens=1, step_s=1e-9, lanes=rng.choice([1, 8]))
    everybody = []
    for _ in range(120):
        if rng.random() < 0.2:
            everybody.append(enter(scheduler, len(everybody), rng.randint(1, 400), new=rng.randint(1, 110)))
        if everybody:
            rng.choice(everybody).request.is_paused = rng.random() < 0.5
        had, peak = set(scheduler.roster.running), scheduler._room().peak_blocks
        advance(scheduler)
        if scheduler.roster.running.keys() <= had:
            assert scheduler._room().peak_blocks <= peak
    for sequence in everybody:
        sequence.request.is_paused = False
    while scheduler.roster.requests:
        advance(scheduler, check=False)
    # all ranks are equal, so no sequence gave way to a better one
    assert not any(sequence.request.preemptions for sequence in everybody)


@pytest.mark.parametrize(
    ("options", "hint"), [({"ageing_s": 0.0}, "ageing_s is 0.0"), ({"window_tokens": 100}, "a block of 256")]
)
def test_options_that_make_no_sense_are_refused(options, hint):
    with pytest.raises(ValueError, match=hint):
        EngineOptions(deterministic=True, **options).blocks(1)

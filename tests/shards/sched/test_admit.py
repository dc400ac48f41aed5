from __future__ import annotations

from collections.abc import Iterable

from shards.kv.keys import BLOCK_TOKENS
from shards.sched.admit import LOOKAHEAD, MOST_OVERTAKEN, Admission, Victim, Waiting, admit
from shards.sched.room import Claim, Room


def a_claim(blocks: int, *, held: tuple[int, ...] = ()) -> Claim:
    return Claim(held, 1, blocks * BLOCK_TOKENS, is_steady=False)


def a_waiting(id: int, blocks: int = 1, *, rank: int = 0, overtaken: int = 0) -> Waiting:  # noqa: A002
    return Waiting(id, rank, lambda: a_claim(blocks), overtaken)


def admitting(
    waiting: Iterable[Waiting],
    *,
    slots: int,
    blocks: int,
    running: dict[int, tuple[int, int]] | None = None,
) -> Admission:
    """`running`: id -> (rank, blocks) of the running sequences."""
    running = running or {}
    room = Room(blocks, {id_: a_claim(size) for id_, (_, size) in running.items()})
    return admit(waiting, room, slots=slots, victims=[Victim(id_, rank, id_) for id_, (rank, _) in running.items()])


def test_sequences_that_fit_start_in_order_until_slots_or_blocks_are_gone():
    waiting = [a_waiting(i, 3) for i in range(5)]
    assert admitting(waiting, slots=2, blocks=100).admitted == [0, 1]
    assert admitting(waiting, slots=9, blocks=7).admitted == [0, 1]


def test_a_large_one_is_overtaken_and_that_is_counted():
    admission = admitting([a_waiting(1, 50), a_waiting(2, 3)], slots=8, blocks=10)
    assert admission.admitted == [2]
    assert admission.overtaken == [1]


def test_a_large_one_is_not_overtaken_for_ever():
    admission = admitting([a_waiting(1, 50, overtaken=MOST_OVERTAKEN), a_waiting(2, 3)], slots=8, blocks=10)
    assert admission.admitted == []


def test_nothing_is_looked_at_without_a_slot():
    def explode():
        raise AssertionError("a full engine must not match prefixes")
        yield

    assert admitting(explode(), slots=0, blocks=10).admitted == []


def test_only_so_many_that_do_not_fit_are_looked_past():
    waiting = iter([*(a_waiting(i, 50) for i in range(LOOKAHEAD + 5)), a_waiting(99, 1)])
    assert admitting(waiting, slots=8, blocks=10).admitted == []
    assert next(waiting).id == LOOKAHEAD


def test_a_worse_rank_gives_up_its_slot():
    admission = admitting([a_waiting(9)], slots=0, blocks=10, running={1: (0, 1), 2: (1, 1)})
    assert (admission.admitted, admission.preempted) == ([9], [2])


def test_a_worse_rank_gives_up_its_blocks_and_no_more_of_them_than_needed():
    running = {1: (3, 2), 2: (3, 2), 3: (2, 6)}
    admission = admitting([a_waiting(9, 3, rank=1)], slots=5, blocks=10, running=running)
    assert (admission.admitted, admission.preempted) == ([9], [2, 1])


def test_the_worst_rank_goes_first_and_in_it_the_youngest():
    running = {1: (2, 1), 2: (3, 1), 3: (3, 1), 4: (1, 1)}
    waiting = [a_waiting(9), a_waiting(10), a_waiting(11), a_waiting(12)]
    assert admitting(waiting, slots=0, blocks=10, running=running).preempted == [3, 2, 1, 4]


def test_no_sequence_is_preempted_for_an_equal_rank_or_in_vain():
    assert not admitting([a_waiting(9, rank=1)], slots=0, blocks=10, running={1: (1, 1)}).preempted
    assert not admitting([a_waiting(9, 9)], slots=1, blocks=10, running={1: (0, 5), 2: (1, 5)}).preempted


def test_a_sequence_that_lacks_only_a_slot_is_passed_by_one_that_may_preempt():
    waiting = [*(a_waiting(i, rank=2) for i in range(LOOKAHEAD + 1)), a_waiting(99, rank=0)]
    admission = admitting(waiting, slots=0, blocks=10, running={1000: (2, 1)})
    assert (admission.admitted, admission.preempted) == ([99], [1000])
    assert len(admission.overtaken) == LOOKAHEAD + 1

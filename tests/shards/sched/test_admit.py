from __future__ import annotations

from shards.sched.admit import LOOKAHEAD, MOST_OVERTAKEN, Waiting, admit


def test_who_fits_starts_in_order_until_slots_or_blocks_are_gone():
    waiting = [Waiting(i, need_blocks=3) for i in range(5)]
    assert admit(waiting, slots=2, blocks=100).admitted == (0, 1)
    assert admit(waiting, slots=9, blocks=7).admitted == (0, 1)


def test_a_large_one_is_overtaken_and_that_is_counted():
    admission = admit([Waiting(1, 50), Waiting(2, 3)], slots=8, blocks=10)
    assert admission.admitted == (2,)
    assert admission.overtaken == (1,)


def test_a_large_one_is_not_overtaken_for_ever():
    admission = admit([Waiting(1, 50, overtaken=MOST_OVERTAKEN), Waiting(2, 3)], slots=8, blocks=10)
    assert admission.admitted == ()


def test_nothing_is_looked_at_without_a_slot():
    def explode():
        raise AssertionError("a full engine must not match prefixes")
        yield

    assert admit(explode(), slots=0, blocks=10).admitted == ()


def test_only_so_many_that_do_not_fit_are_looked_past():
    waiting = iter([*(Waiting(i, 50) for i in range(LOOKAHEAD + 5)), Waiting(99, 1)])
    assert admit(waiting, slots=8, blocks=10).admitted == ()
    assert next(waiting).id == LOOKAHEAD

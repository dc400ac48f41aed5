"""Whether an engine agrees with what the router computes: few comparisons are enough, and accidents are none."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as some

from policies.prefix.parity import Doubt, Parity, Trust, Watch

NOTES = some.lists(some.tuples(some.sampled_from(Doubt), some.booleans()), max_size=80)


def after(notes: list[tuple[Doubt, bool]]) -> Parity:
    parity = Parity()
    for what, is_equal in notes:
        parity.note(what, is_equal=is_equal)
    return parity


def test_a_feed_is_proven_by_four_prompts_with_stored_blocks() -> None:
    assert after([(Doubt.BLOCKS, True)] * 3).trust is Trust.UNPROVEN
    assert after([(Doubt.BLOCKS, True)] * 4).trust is Trust.PROVEN


def test_equal_counts_alone_prove_nothing_and_different_ones_break_it() -> None:
    assert after([(Doubt.COUNT, True)] * 40).trust is Trust.UNPROVEN
    broken = after([(Doubt.COUNT, False)] * 6)
    assert (broken.trust, broken.doubt) == (Trust.BROKEN, Doubt.COUNT)


def test_with_blocks_as_expected_another_count_is_reported_and_does_not_break_the_feed() -> None:
    parity = after([(Doubt.BLOCKS, True), (Doubt.COUNT, False)] * 20)
    assert (parity.trust, parity.doubt) == (Trust.PROVEN, Doubt.COUNT)


def test_unreported_blocks_break_nothing_and_while_there_are_some_what_is_learnt_counts_beside_events() -> None:
    parity = after([(Doubt.BLOCKS, True), (Doubt.UNREPORTED, False)] * 20)
    assert (parity.trust, parity.doubt) == (Trust.UNPROVEN, Doubt.UNREPORTED)
    parity = after([(Doubt.BLOCKS, True), (Doubt.UNREPORTED, False), (Doubt.COUNT, False)] * 20)
    assert (parity.trust, parity.doubt) == (Trust.UNPROVEN, Doubt.UNREPORTED)
    for _ in range(12):
        parity.note(Doubt.BLOCKS, is_equal=True)
        parity.note(Doubt.UNREPORTED, is_equal=True)
    assert (parity.trust, parity.doubt) == (Trust.PROVEN, Doubt.COUNT)


@given(NOTES, some.sampled_from((Doubt.BLOCKS, Doubt.CACHED)))
def test_whatever_was_before_eight_differences_break_it(before: list[tuple[Doubt, bool]], what: Doubt) -> None:
    assert after([*before, *[(what, False)] * 8]).trust is Trust.BROKEN


@given(NOTES)
def test_whatever_was_before_twelve_agreements_of_each_kind_prove_it(before: list[tuple[Doubt, bool]]) -> None:
    parity = after([*before, *[(doubt, True) for doubt in Doubt] * 12])
    assert (parity.trust, parity.doubt) == (Trust.PROVEN, None)


@given(some.sets(some.integers(0, 39), max_size=5), some.sampled_from(Doubt))
def test_five_accidents_never_break_it(accidents: set[int], what: Doubt) -> None:
    parity = Parity()
    for at in range(40):
        parity.note(what, is_equal=at not in accidents)
        assert parity.trust is not Trust.BROKEN


@given(NOTES)
def test_only_the_last_twenty_of_each_kind_count_and_changes_are_reported(notes: list[tuple[Doubt, bool]]) -> None:
    parity = Parity()
    for what, is_equal in notes:
        before = (parity.trust, parity.doubt)
        assert parity.note(what, is_equal=is_equal) == (before != (parity.trust, parity.doubt))
    last = [list(filter(lambda note, doubt=doubt: note[0] is doubt, notes))[-20:] for doubt in Doubt]  # type: ignore[misc]
    again = after([note for some_of_one in last for note in some_of_one])
    assert (again.trust, again.doubt) == (parity.trust, parity.doubt)
    for doubt, kept in zip(Doubt, last, strict=True):
        assert parity.seen(doubt) == (len(kept), sum(not is_equal for _, is_equal in kept))


STEPS = some.lists(
    some.tuples(some.sampled_from(("begin", "end", "stored", "lost", "cleared")), some.integers(1, 6)), max_size=60
)


@given(STEPS)
def test_a_watch_keeps_the_events_of_its_blocks_since_they_were_watched(steps: list[tuple[str, int]]) -> None:
    watch, users = Watch(most=4), {key: [] for key in range(1, 7)}  # type: ignore[var-annotated]
    reported: dict[int, set[str]] = {}
    for now, (what, key) in enumerate(steps):
        if what == "begin":
            watched = watch.begin(key, now)
            assert (watched is None) == (not users[key] and len(reported) == 4)
            if watched is not None:
                users[key].append(watched)
                reported.setdefault(key, set())
        elif what == "end" and users[key]:
            watch.end(key, users[key].pop())
            if not users[key]:
                del reported[key]
        elif what in ("stored", "lost"):
            getattr(watch, what)([key, 99])
            if key in reported:
                reported[key].add(what)
        elif what == "cleared":
            watch.cleared()
            for seen in reported.values():
                seen.add("lost")
        for key_of, seen in reported.items():
            assert users[key_of][0].was_stored == ("stored" in seen)
            assert users[key_of][0].was_lost == ("lost" in seen)
        watch.check()
    assert len(watch) == len(reported)


def test_a_watched_block_that_was_never_released_makes_room_in_the_end() -> None:
    watch = Watch(most=1, forgotten_s=10.0)
    assert watch.begin(1, 0.0) is not None
    assert watch.begin(2, 9.0) is None
    assert watch.begin(2, 10.0) is not None

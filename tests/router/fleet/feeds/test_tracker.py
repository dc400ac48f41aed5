from __future__ import annotations

import pytest

from backends.events.nouns import Batch, CacheEvent, Cleared, Removed
from router.fleet.feeds.health import FeedCounts, FeedHealth, FeedState
from router.fleet.feeds.sink import RankCache
from router.fleet.feeds.tracker import Message, Replay, Tracker


def removal(seq: int) -> Removed:
    return Removed((seq,))


def a_message(seq: int, at: float | None = None, *, epoch: str | None = None) -> Message:
    return Message(seq, Batch((removal(seq),), sent_at=100.0 + seq if at is None else at), epoch)


def a_live_tracker(*, replays: bool = True, upto: int = 5, epoch: str | None = None, most_held: int = 4096) -> Tracker:
    tracker = Tracker(replays=replays, most_held=most_held)
    tracker.connected()
    if tracker.wanted:
        tracker.replay_ended(tracker.wanted.number, 0.0)
    for seq in range(upto + 1):
        assert tracker.hear(a_message(seq, epoch=epoch), 0.0) == [removal(seq)]
    assert tracker.state is FeedState.LIVE
    return tracker


def heard(tracker: Tracker, *messages: Message, now: float = 1.0) -> list[CacheEvent]:
    events = [event for message in messages for event in tracker.hear(message, now)]
    tracker.check()
    return events


def replayed(tracker: Tracker, *messages: Message, ends: bool = True) -> list[CacheEvent]:
    assert tracker.wanted is not None
    number = tracker.wanted.number
    events = [event for message in messages for event in tracker.replayed(number, message, 2.0)]
    if ends:
        events += tracker.replay_ended(number, 2.0)
    tracker.check()
    return events


def test_a_feed_begins_with_everything_that_can_be_had() -> None:
    tracker = Tracker(replays=True)
    assert tracker.connected() == []
    assert (tracker.state, tracker.wanted) == (FeedState.EMPTY, Replay(1, 0))
    assert heard(tracker, a_message(9)) == []
    assert replayed(tracker, a_message(7), a_message(8), a_message(9)) == [removal(7), removal(8), removal(9)]
    assert (tracker.state, tracker.wanted, tracker.applied) == (FeedState.LIVE, None, 9)


def test_without_replay_it_begins_with_what_comes() -> None:
    tracker = Tracker(replays=False)
    tracker.connected()
    assert tracker.state is FeedState.EMPTY
    assert heard(tracker, a_message(9)) == [removal(9)]
    assert tracker.state is FeedState.LIVE


def test_repeats_and_stragglers_change_nothing() -> None:
    tracker = a_live_tracker()
    assert heard(tracker, a_message(5), a_message(2)) == []
    assert (tracker.state, tracker.counts.repeats) == (FeedState.LIVE, 2)


def test_a_gap_asks_again_from_what_was_heard_last() -> None:
    tracker = a_live_tracker()
    assert heard(tracker, a_message(8)) == []
    assert tracker.state is FeedState.GAP
    assert tracker.wanted is not None
    assert tracker.wanted.start == 5
    assert replayed(tracker, a_message(5), a_message(6), a_message(7), ends=False) == [removal(6), removal(7)]
    assert tracker.state is FeedState.RESYNC
    assert replayed(tracker) == [removal(8)]
    assert (tracker.state, tracker.counts.gaps, tracker.counts.resyncs) == (FeedState.LIVE, 1, 1)


def test_what_was_only_overtaken_heals_by_itself() -> None:
    tracker = a_live_tracker()
    assert heard(tracker, a_message(7), a_message(8)) == []
    assert heard(tracker, a_message(6)) == [removal(6), removal(7), removal(8)]
    assert (tracker.state, tracker.wanted) == (FeedState.LIVE, None)


def test_a_replay_that_no_longer_has_the_beginning_clears_and_keeps_the_rest() -> None:
    tracker = a_live_tracker()
    heard(tracker, a_message(99))
    assert replayed(tracker, a_message(98), a_message(99)) == [Cleared(), removal(98), removal(99)]
    assert tracker.state is FeedState.LIVE


def test_a_replay_with_a_hole_clears_up_to_the_hole() -> None:
    tracker = a_live_tracker()
    heard(tracker, a_message(9))
    answer = [a_message(seq) for seq in (5, 6, 8, 9)]
    assert replayed(tracker, *answer) == [removal(6), Cleared(), removal(8), removal(9)]


def test_answers_to_an_earlier_wish_go_nowhere() -> None:
    tracker = a_live_tracker()
    heard(tracker, a_message(8))
    assert tracker.wanted is not None
    stale = tracker.wanted.number - 1
    assert tracker.replayed(stale, a_message(6), 2.0) == []
    assert tracker.replay_ended(stale, 2.0) == []
    assert tracker.replay_failed(stale, 2.0) == []
    assert tracker.state is FeedState.GAP


def test_a_replay_that_fails_clears_and_begins_with_what_came_meanwhile() -> None:
    tracker = a_live_tracker()
    heard(tracker, a_message(8), a_message(9), a_message(11))
    assert tracker.wanted is not None
    assert tracker.replay_failed(tracker.wanted.number, 2.0) == [
        Cleared(),
        removal(8),
        removal(9),
        Cleared(),
        removal(11),
    ]
    assert (tracker.state, tracker.applied) == (FeedState.LIVE, 11)
    tracker.check()


def test_after_a_failed_first_replay_what_was_only_overtaken_heals_by_itself() -> None:
    tracker = Tracker(replays=True)
    tracker.connected()
    assert heard(tracker, a_message(8)) == []
    assert tracker.wanted is not None
    assert tracker.replay_failed(tracker.wanted.number, 2.0) == [removal(8)]
    assert heard(tracker, a_message(10)) == []
    assert heard(tracker, a_message(9)) == [removal(9), removal(10)]
    assert (tracker.state, tracker.wanted) == (FeedState.LIVE, None)


def test_a_lower_number_that_was_sent_later_is_another_life() -> None:
    tracker = a_live_tracker(replays=False)
    assert heard(tracker, a_message(0, at=900.0)) == [Cleared(), removal(0)]
    assert (tracker.state, tracker.counts.restarts) == (FeedState.LIVE, 1)


def test_with_replay_another_life_is_heard_from_its_beginning() -> None:
    tracker = a_live_tracker()
    assert heard(tracker, a_message(2, at=900.0)) == [Cleared()]
    assert tracker.wanted is not None
    assert tracker.wanted.start == 0
    again = [a_message(seq, at=898.0 + seq) for seq in range(3)]
    assert replayed(tracker, *again) == [removal(0), removal(1), removal(2)]


def test_another_epoch_is_another_life_whatever_the_numbers() -> None:
    tracker = a_live_tracker(replays=False, epoch="one")
    assert heard(tracker, a_message(6, epoch="two")) == [Cleared(), removal(6)]
    assert heard(tracker, a_message(1, at=999.0, epoch="two")) == [], "within an epoch nothing begins anew"


def test_numbers_without_times_go_back_only_in_another_life() -> None:
    tracker = Tracker(replays=False)
    for seq in (3, 4):
        heard(tracker, Message(seq, Batch((removal(seq),))))
    assert heard(tracker, Message(0, Batch((removal(0),)))) == [Cleared(), removal(0)]


def test_an_engine_with_a_clock_set_back_is_believed_after_a_while() -> None:
    tracker = a_live_tracker(replays=False)
    assert heard(tracker, *(a_message(seq, at=1.0 + seq) for seq in range(6))) == []
    late = [a_message(seq, at=1.0 + seq) for seq in range(6, 40)]
    assert Cleared() in heard(tracker, *late)
    assert (tracker.state, tracker.applied) == (FeedState.LIVE, 39)


def test_what_is_ahead_and_yet_sent_earlier_makes_what_is_known_doubtful() -> None:
    tracker = a_live_tracker(replays=False)
    assert heard(tracker, a_message(6, at=50.0)) == []
    assert tracker.state is FeedState.GAP
    assert heard(tracker, a_message(6)) == [removal(6)]
    assert tracker.state is FeedState.LIVE


def test_an_engine_with_a_clock_set_back_a_little_is_asked_and_nothing_is_lost() -> None:
    tracker = a_live_tracker()
    stepped = [a_message(seq, at=90.0 + seq) for seq in (6, 7)]
    assert heard(tracker, *stepped) == []
    assert tracker.wanted is not None
    assert replayed(tracker, a_message(5), *stepped) == [removal(6), removal(7)]
    assert heard(tracker, a_message(8, at=98.0)) == [removal(8)]
    assert (tracker.state, tracker.counts.cleared) == (FeedState.LIVE, 0)


def test_a_straggler_of_a_former_life_is_dropped() -> None:
    tracker = a_live_tracker(replays=False)
    heard(tracker, a_message(0, at=900.0))
    assert heard(tracker, a_message(57, at=157.0)) == []
    assert tracker.applied == 0


def test_an_unreadable_message_clears_when_its_turn_comes() -> None:
    tracker = a_live_tracker()
    assert heard(tracker, Message(6, None)) == [Cleared()]
    assert heard(tracker, a_message(7), a_message(3)) == [removal(7)]


def test_out_of_reach_what_is_known_may_be_old_and_is_verified_afterwards() -> None:
    tracker = a_live_tracker()
    assert tracker.lost(10.0) == []
    assert (tracker.state, tracker.age_s(13.0)) == (FeedState.GAP, 3.0)
    tracker.connected()
    assert heard(tracker, a_message(6)) == [], "it could be another engine's"
    assert replayed(tracker, a_message(5), a_message(6)) == [removal(6)]
    assert (tracker.state, tracker.age_s(99.0)) == (FeedState.LIVE, 0.0)


def test_an_engine_that_has_another_last_message_is_another_engine() -> None:
    tracker = a_live_tracker()
    tracker.lost(10.0)
    tracker.connected()
    assert replayed(tracker, a_message(5, at=900.0), ends=False) == [Cleared()]
    assert tracker.wanted is not None
    assert tracker.wanted.start == 0


def test_numbers_that_fit_prove_nothing_without_the_message_that_we_know() -> None:
    tracker = a_live_tracker()
    tracker.lost(10.0)
    tracker.connected()
    assert replayed(tracker, a_message(6), a_message(7)) == [Cleared(), removal(6), removal(7)]


def test_an_engine_that_does_not_have_what_we_heard_is_another_engine() -> None:
    tracker = a_live_tracker()
    tracker.lost(10.0)
    tracker.connected()
    assert replayed(tracker) == [Cleared()]
    assert replayed(tracker) == []
    assert tracker.state is FeedState.EMPTY


def test_without_replay_out_of_reach_is_forgotten() -> None:
    tracker = a_live_tracker(replays=False)
    assert tracker.lost(10.0) == [Cleared()]
    assert (tracker.state, tracker.age_s(11.0)) == (FeedState.EMPTY, None)


def test_what_waits_is_bounded() -> None:
    tracker = a_live_tracker(most_held=3)
    heard(tracker, *(a_message(seq) for seq in range(8, 15)))
    assert tracker.counts.dropped > 0
    replayed(tracker, *(a_message(seq) for seq in range(5, 15)))
    assert (tracker.state, tracker.applied) == (FeedState.LIVE, 14)


def test_a_number_from_nowhere_is_given_up_after_some_replays() -> None:
    tracker = a_live_tracker()
    heard(tracker, a_message(2**60, at=106.0))
    asked = 0
    while tracker.wanted is not None:
        asked += 1
        assert asked < 10
        replayed(tracker, a_message(5))
    assert (tracker.state, tracker.applied) == (FeedState.LIVE, 5)
    assert heard(tracker, a_message(6)) == [removal(6)]


def test_a_quiet_engine_is_asked_now_and_then() -> None:
    tracker = a_live_tracker()
    tracker.tick(29.0)
    assert tracker.wanted is None
    tracker.tick(31.0)
    assert tracker.wanted is not None
    assert replayed(tracker, a_message(5)) == []
    assert (tracker.state, tracker.counts.gaps) == (FeedState.LIVE, 0)
    tracker.tick(70.0)
    assert replayed(tracker, a_message(5), a_message(6)) == [removal(6)]
    assert (tracker.state, tracker.counts.gaps) == (FeedState.LIVE, 1)


def test_an_unanswered_check_changes_nothing() -> None:
    tracker = a_live_tracker()
    tracker.tick(31.0)
    assert tracker.wanted is not None
    assert tracker.replay_failed(tracker.wanted.number, 36.0) == []
    assert heard(tracker, a_message(6)) == [removal(6)]
    assert tracker.state is FeedState.LIVE


def test_a_relay_that_is_away_makes_it_old_and_not_wrong() -> None:
    tracker = a_live_tracker(replays=False)
    tracker.doubt(10.0)
    assert (tracker.state, tracker.age_s(14.0)) == (FeedState.GAP, 4.0)
    tracker.trust(15.0)
    assert tracker.state is FeedState.LIVE
    tracker.doubt(20.0)
    assert heard(tracker, a_message(6)) == [removal(6)]
    assert tracker.state is FeedState.LIVE


@pytest.mark.parametrize(
    ("state", "age_s", "confidence"),
    [
        (FeedState.LIVE, 0.0, 1.0),
        (FeedState.GAP, 0.0, 0.9),
        (FeedState.RESYNC, 10.0, 0.45),
        (FeedState.GAP, 20.0, 0.225),
        (FeedState.EMPTY, None, 0.0),
    ],
)
def test_the_older_the_less_it_is_believed(state: FeedState, age_s: float | None, confidence: float) -> None:
    health = FeedHealth(RankCache("vllm-0"), state, connected=True, age_s=age_s, quiet_s=None, counts=FeedCounts())
    assert health.confidence == pytest.approx(confidence)


def test_all_that_an_engine_holds_is_known_if_it_was_heard_since_its_first_message_or_since_it_emptied_its_cache() -> (
    None
):
    whole, late = a_live_tracker(), Tracker(replays=False)
    late.connected()
    heard(late, a_message(9))
    assert (whole.is_whole, late.is_whole) == (True, False)
    for seq, events, is_whole in (
        (10, (Cleared(is_empty=True), removal(10)), True),
        (11, (removal(11),), True),
        (12, (Cleared(is_empty=True), Cleared()), False),
        (13, (Cleared(is_empty=True),), True),
    ):
        heard(late, Message(seq, Batch(events, sent_at=100.0 + seq)))
        assert late.is_whole == is_whole
    heard(late, Message(14, Batch((), sent_at=114.0, malformed=1)))
    assert not late.is_whole
    whole.connected()
    # what was heard last can no longer be had
    replayed(whole, a_message(9))
    assert not whole.is_whole

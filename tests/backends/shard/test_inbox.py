from __future__ import annotations

import asyncio

import pytest

from backends.shard.inbox import Inbox
from policies.errors import BackendFailed
from shards.nouns import Drawn
from shards.wire.v1 import shard_pb2 as wire


async def test_a_slow_reader_gets_one_bigger_piece() -> None:
    inbox = Inbox(choices=2)
    for token in range(1000):
        inbox.hear_tokens(Drawn(1, token % 2, (token,)))
        inbox.hear_progress(wire.Progress(computed_tokens=token))
    inbox.hear_end(wire.Finished(choice=1, reason=wire.Finished.STOP))
    news = await inbox.take()
    assert news.progress is not None
    assert news.progress.computed_tokens == 999
    assert [len(piece.token_ids) for piece in news.pieces] == [500, 500]
    assert [piece.end is not None for piece in news.pieces] == [False, True]
    assert repr(inbox) == "<Inbox 0 tokens wait, 1 choices open>"


async def test_take_waits_for_news() -> None:
    inbox = Inbox(choices=1)
    taking = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    assert not taking.done()
    inbox.hear_tokens(Drawn(1, 0, (7,)))
    assert (await taking).pieces[0].token_ids == [7]


async def test_only_the_newest_prediction_counts_and_it_is_reported_once() -> None:
    inbox = Inbox(choices=1)
    inbox.hear_prediction(3.0)
    inbox.hear_prediction(2.5)
    assert (await inbox.take()).expected_s == 2.5
    inbox.hear_tokens(Drawn(1, 0, (7,)))
    assert (await inbox.take()).expected_s is None


async def test_a_failure_wins_over_what_was_heard_before() -> None:
    inbox = Inbox(choices=1)
    inbox.hear_tokens(Drawn(1, 0, (7,)))
    inbox.fail(BackendFailed("lost"))
    with pytest.raises(BackendFailed, match="lost"):
        await inbox.take()


async def test_an_answer_that_was_heard_to_its_end_cannot_fail_any_more() -> None:
    inbox = Inbox(choices=1)
    inbox.hear_end(wire.Finished(reason=wire.Finished.STOP))
    inbox.fail(BackendFailed("lost"))
    assert (await inbox.take()).pieces[0].end is not None

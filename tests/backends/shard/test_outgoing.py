from __future__ import annotations

import random

import pytest

from backends.shard.outgoing import Outgoing
from shards.wire import limits
from shards.wire.v1 import shard_pb2 as wire

PIECE_TOKENS = limits.PROMPT_PIECE_BYTES // 4


def drain(outgoing: Outgoing) -> list[wire.Command]:
    commands = []
    while (command := outgoing.next()) is not None:
        commands.append(command)
        outgoing.check()
    return commands


def submit(request: int) -> wire.Submit:
    return wire.Submit(request=request)


def test_a_prompt_follows_its_submit_in_pieces() -> None:
    outgoing, prompt = Outgoing(10**6), random.Random(0).randbytes(150_000 * 4)
    outgoing.submit(submit(1), prompt)
    first, *pieces = drain(outgoing)
    assert first.submit.request == 1
    assert max(len(piece.prompt.token_ids) for piece in pieces) == limits.PROMPT_PIECE_BYTES
    assert b"".join(piece.prompt.token_ids for piece in pieces) == prompt


def test_a_prompt_waits_for_its_window() -> None:
    outgoing = Outgoing(1000)
    outgoing.submit(submit(1), bytes(2500 * 4))
    assert [len(piece.prompt.token_ids) // 4 for piece in drain(outgoing)[1:]] == [1000]
    outgoing.grant(1, 600)
    assert [len(piece.prompt.token_ids) // 4 for piece in drain(outgoing)] == [600]
    outgoing.grant(1, 500)
    assert drain(outgoing) == []
    outgoing.grant(1, 2500)
    assert [len(piece.prompt.token_ids) // 4 for piece in drain(outgoing)] == [900]


def test_prompts_take_turns() -> None:
    outgoing = Outgoing(10**6)
    outgoing.submit(submit(1), bytes(3 * limits.PROMPT_PIECE_BYTES))
    outgoing.submit(submit(2), bytes(2 * limits.PROMPT_PIECE_BYTES))
    assert [command.prompt.request for command in drain(outgoing)[2:]] == [1, 2, 1, 2, 1]


def test_a_cancelled_prompt_is_not_sent_on() -> None:
    outgoing = Outgoing(10**6)
    outgoing.submit(submit(1), bytes(3 * limits.PROMPT_PIECE_BYTES))
    outgoing.next()
    outgoing.next()
    outgoing.cancel(1)
    assert [command.WhichOneof("command") for command in drain(outgoing)] == ["cancel"]
    assert repr(outgoing) == "<Outgoing 0 commands, 0 prompts>"


def test_a_stream_that_takes_nothing_has_no_room_at_last() -> None:
    outgoing = Outgoing(1000, most_commands=2)
    for request in range(2):
        assert outgoing.has_room
        outgoing.submit(submit(request), b"1234")
    assert not outgoing.has_room


@pytest.mark.parametrize("seed", range(50))
def test_every_prompt_arrives_whole_in_any_order_of_grants(seed: int) -> None:
    rng, outgoing, arrived = random.Random(seed), Outgoing(64), {}
    prompts = {request: rng.randbytes(4 * rng.randrange(1, 500)) for request in range(5)}
    for request, prompt in prompts.items():
        outgoing.submit(submit(request), prompt)
        arrived[request] = b""
    while arrived != prompts:
        for command in drain(outgoing):
            arrived[command.prompt.request] += command.prompt.token_ids
        request = rng.choice(list(prompts))
        outgoing.grant(request, len(arrived[request]) // 4)
        outgoing.check()

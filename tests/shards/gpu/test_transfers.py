from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shards.exec.drawing import GREEDY, Drawing, Sample

pytest.importorskip("triton")

from shards.gpu.transfers import TURNS, Inbound, Outbound, Ticket
from shards.kernels.logprobs import LOGPROB_WORDS
from shards.kernels.sampling import DrawnRows
from shards.nouns import TokenLogprobs

CPU = torch.device("cpu")


class Marks:
    """Notes which copies were waited for, by their number."""

    def __init__(self) -> None:
        self.made = 0
        self.waited: list[int] = []

    def __call__(self, device: torch.device) -> _Mark:
        self.made += 1
        return _Mark(self, self.made - 1)


class _Mark:
    def __init__(self, marks: Marks, number: int) -> None:
        self._marks, self._number = marks, number

    def synchronize(self) -> None:
        self._marks.waited.append(self._number)


def put(inbound: Inbound, *tokens: int, sound: int = 1, drawings: Sequence[Drawing] = ()) -> Ticket:
    ticket = inbound.next(drawings or [GREEDY] * len(tokens))
    logprobs = torch.zeros(len(tokens), LOGPROB_WORDS, dtype=torch.int32)
    values, ids = torch.tensor([-0.5, -0.25, -0.5]), torch.tensor([8, 1])
    logprobs[:, :3], logprobs[:, 33:35] = values.view(torch.int32), ids
    inbound.put(ticket, DrawnRows(torch.tensor([tokens, [sound] * len(tokens)], dtype=torch.int32), logprobs))
    return ticket


def samples(*tokens: int) -> list[Sample | None]:
    return [Sample(token) for token in tokens]


def test_tokens_come_back_in_order_and_each_after_its_own_copy() -> None:
    marks = Marks()
    inbound = Inbound(CPU, 4, on_copied=marks)
    tickets = [put(inbound, 1, 2), put(inbound, 3)]
    inbound.check()
    assert marks.waited == []
    assert inbound.take(tickets[0]) == samples(1, 2)
    assert marks.waited == [0]
    tickets.append(put(inbound, 4, 5, sound=0))
    assert [inbound.take(ticket) for ticket in tickets[1:]] == [samples(3), [None, None]]
    inbound.check()


def test_logprobs_come_with_the_rows_that_asked_for_them() -> None:
    inbound = Inbound(CPU, 4)
    drawings = [Drawing(top_logprobs=2), GREEDY, Drawing(top_logprobs=0)]
    first, second, third = inbound.take(put(inbound, 1, 2, 3, drawings=drawings))
    assert first == Sample(1, TokenLogprobs(-0.5, ((8, -0.25), (1, -0.5))))
    assert second == Sample(2)
    assert third == Sample(3, TokenLogprobs(-0.5, ()))
    assert inbound.take(put(inbound, 1, sound=0, drawings=drawings[:1])) == [None]


def test_a_step_is_not_collected_out_of_turn_nor_twice() -> None:
    inbound = Inbound(CPU, 4)
    first, second = put(inbound, 1), put(inbound, 2)
    with pytest.raises(ValueError, match="step 1 is not the one that is due"):
        inbound.take(second)
    inbound.take(first)
    with pytest.raises(ValueError, match="step 0"):
        inbound.take(first)


def test_what_was_not_collected_is_not_overwritten() -> None:
    inbound = Inbound(CPU, 4)
    for token in range(TURNS):
        put(inbound, token)
    with pytest.raises(RuntimeError, match="3 of 3 steps were not collected"):
        put(inbound, 9)
    with pytest.raises(RuntimeError, match="5 of 4 rows"):
        put(Inbound(CPU, 4), 1, 2, 3, 4, 5)


def test_a_buffer_is_filled_again_only_once_it_was_copied() -> None:
    marks = Marks()
    outbound = Outbound(CPU, on_copied=marks)
    for number in range(TURNS):
        outbound.next(8).fill_(number)
        outbound.send(outbound.next(8))
    assert marks.waited == []
    outbound.next(8)
    assert marks.waited == [0]


def test_what_is_sent_arrives_where_it_should_and_buffers_grow() -> None:
    outbound = Outbound(CPU)
    target = torch.zeros(4, dtype=torch.int32)
    assert outbound.send(outbound.next(4).fill_(5), target) is target
    assert target.tolist() == [5] * 4
    for _ in range(2 * TURNS):
        filled = outbound.next(100).copy_(torch.arange(100))
        assert outbound.send(filled).tolist() == list(range(100))

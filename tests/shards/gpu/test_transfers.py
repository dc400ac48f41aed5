from __future__ import annotations

import pytest
import torch

from shards.gpu.transfers import TURNS, Inbound, Outbound

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


def drawn(*tokens: int, sound: int = 1) -> torch.Tensor:
    return torch.tensor([tokens, [sound] * len(tokens)], dtype=torch.int32)


def test_tokens_come_back_in_order_and_each_after_its_own_copy() -> None:
    marks = Marks()
    inbound = Inbound(CPU, 4, on_copied=marks)
    tickets = [inbound.put(drawn(1, 2)), inbound.put(drawn(3))]
    inbound.check()
    assert marks.waited == []
    assert inbound.take(tickets[0]) == [1, 2]
    assert marks.waited == [0]
    tickets.append(inbound.put(drawn(4, 5, sound=0)))
    assert [inbound.take(ticket) for ticket in tickets[1:]] == [[3], [None, None]]
    inbound.check()


def test_a_step_is_not_collected_out_of_turn_nor_twice() -> None:
    inbound = Inbound(CPU, 4)
    first, second = inbound.put(drawn(1)), inbound.put(drawn(2))
    with pytest.raises(ValueError, match="step 1 is not the one that is due"):
        inbound.take(second)
    inbound.take(first)
    with pytest.raises(ValueError, match="step 0"):
        inbound.take(first)


def test_what_was_not_collected_is_not_overwritten() -> None:
    inbound = Inbound(CPU, 4)
    for token in range(TURNS):
        inbound.put(drawn(token))
    with pytest.raises(RuntimeError, match="3 of 3 steps were not collected"):
        inbound.put(drawn(9))
    with pytest.raises(RuntimeError, match="5 of 4 rows"):
        Inbound(CPU, 4).put(drawn(1, 2, 3, 4, 5))


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

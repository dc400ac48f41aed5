"""Transfers over the links of simulated backends take their turns."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulation.links import NetworkLink


def a_link(bytes_s: float = 1e9, fixed_s: float = 0.005) -> NetworkLink:
    return NetworkLink(bytes_s, fixed_s)


def test_a_transfer_takes_its_bytes_and_a_fixed_time() -> None:
    assert a_link().receive(a_link(), 10**9, 2.0) == (2.0, pytest.approx(3.005))


def test_the_slower_end_sets_the_speed() -> None:
    for ends in ((a_link(1e9), a_link(1e8)), (a_link(1e8), a_link(1e9))):
        _, ends_s = ends[0].receive(ends[1], 10**8, 0.0)
        assert ends_s == pytest.approx(1.005)


def test_a_second_transfer_waits_for_the_end_that_is_busy() -> None:
    source, target = a_link(), a_link()
    _, first_s = target.receive(source, 10**9, 0.0)
    assert a_link().receive(source, 10**9, 0.5) == (first_s, pytest.approx(first_s + 1.005))
    assert target.receive(a_link(), 10**9, 0.5)[0] == first_s


def test_both_directions_are_used_at_once() -> None:
    source, target = a_link(), a_link()
    target.receive(source, 10**9, 0.0)
    assert source.receive(target, 10**9, 0.0)[0] == 0.0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 10**9)), max_size=30))
def test_no_link_carries_more_than_it_can(transfers: list[tuple[int, int, int]]) -> None:
    links = [a_link(fixed_s=0.0) for _ in range(4)]
    sent, received, last_s = [0] * 4, [0] * 4, 0.0
    for source, target, size in transfers:
        _, ends_s = links[target].receive(links[source], size, 0.0)
        sent[source] += size
        received[target] += size
        last_s = max(last_s, ends_s)
    assert last_s >= max(*sent, *received) / 1e9 - 1e-9

import pytest

from policies.peers import Peers


def test_nobody_was_heard_yet() -> None:
    peers = Peers()
    assert (peers.moved, peers.changes) == ((), 0)
    assert repr(peers) == "<Peers moved by nothing>"


def test_the_first_one_is_believed_and_later_ones_move_the_mean() -> None:
    peers = Peers()
    peers.hear([2.0, -1.0])
    assert peers.moved == [2.0, -1.0]
    peers.hear([1.0, -1.0])
    assert peers.moved == pytest.approx([1.5, -1.0])
    for _ in range(10):
        peers.hear([0.5, 0.0])
    assert peers.moved == pytest.approx([0.5, 0.0], abs=0.01)
    assert peers.changes == 12


def test_those_that_are_alike_have_the_same_coefficients() -> None:
    peers = Peers()
    peers.hear([1.0, 2.0])
    with pytest.raises(ValueError, match=r"shorter|longer"):
        peers.hear([1.0])

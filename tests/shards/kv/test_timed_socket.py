from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from shards.kv.peer_wire import received
from shards.kv.timed_socket import TimedSocket

SOON_S = 0.15


@pytest.fixture
def ends() -> Iterator[tuple[TimedSocket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname())
        with TimedSocket(listener.accept()[0]) as here, there:
            yield here, there


def test_bytes_go_both_ways(ends: tuple[TimedSocket, socket.socket]) -> None:
    here, there = ends
    here.sendall(b"ping")
    assert there.recv(4) == b"ping"
    there.sendall(b"pong")
    here.within(5)
    assert received(here, 4) == b"pong"


def test_a_peer_that_sends_byte_by_byte_does_not_prolong_the_deadline(ends: tuple[TimedSocket, socket.socket]) -> None:
    here, there = ends
    is_over = threading.Event()

    def trickle() -> None:
        while not is_over.wait(SOON_S / 10):
            there.sendall(b"x")

    sender = threading.Thread(target=trickle)
    sender.start()
    here.within(SOON_S)
    # with a deadline that each byte prolongs this would go on for hours
    with pytest.raises(TimeoutError):
        received(here, 1 << 20)
    is_over.set()
    sender.join()


def test_a_peer_that_reads_nothing_does_not_keep_the_sender(ends: tuple[TimedSocket, socket.socket]) -> None:
    here, _ = ends
    here.within(SOON_S)
    with pytest.raises(TimeoutError):
        here.sendall(bytes(64 << 20))


def test_nothing_begins_after_the_deadline(ends: tuple[TimedSocket, socket.socket]) -> None:
    here, there = ends
    there.sendall(b"early")
    here.within(0)
    with pytest.raises(TimeoutError, match="took too long"):
        here.recv(5)
    with pytest.raises(TimeoutError, match="took too long"):
        here.recv_into(bytearray(5))
    with pytest.raises(TimeoutError, match="took too long"):
        here.sendall(b"late")


def test_a_connection_is_quiet_until_something_comes_or_it_is_closed(ends: tuple[TimedSocket, socket.socket]) -> None:
    here, there = ends
    assert here.is_quiet()
    there.sendall(b"unasked")
    time.sleep(0.01)
    assert not here.is_quiet()


def test_a_connection_that_the_other_end_closed_is_not_quiet(ends: tuple[TimedSocket, socket.socket]) -> None:
    here, there = ends
    there.close()
    time.sleep(0.01)
    assert not here.is_quiet()

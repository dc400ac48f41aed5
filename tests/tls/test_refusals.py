"""Log lines for refused peers: clear, and few."""

import ssl

import pytest

from tests.tls.clock import Clock
from tls.errors import TlsError
from tls.refusals import ONCE_IN_S, Refusals


def test_a_line_names_port_peer_reason_and_remedy(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    Refusals("server.http", clock=clock).refuse("10.0.0.7", TlsError("it is late", "be on time"))
    assert caplog.messages == ["server.http: no TLS with 10.0.0.7: it is late (be on time)"]


def test_a_peer_is_named_once_a_minute_for_a_reason_and_the_rest_is_counted(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    refusals = Refusals("server.http", on_refused=heard.append, clock=clock)
    for _ in range(500):
        refusals.refuse("10.0.0.7", TlsError("it is late"))
    assert len(caplog.messages) == 1
    clock.now_s += ONCE_IN_S - 1
    refusals.refuse("10.0.0.7", TlsError("it is late"))
    assert len(caplog.messages) == 1
    clock.now_s += 1
    refusals.refuse("10.0.0.7", TlsError("it is late"))
    assert len(caplog.messages) == 2
    assert caplog.messages[1].endswith("it is late; 500 more since the last line")
    assert heard == ["it is late"] * 502


def test_another_peer_and_another_reason_have_lines_of_their_own(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    refusals = Refusals("server.http", clock=clock)
    for peer, reason in [("10.0.0.7", "late"), ("10.0.0.8", "late"), ("10.0.0.7", "old")]:
        refusals.refuse(peer, TlsError(reason))
    assert len(caplog.messages) == 3


def test_a_flood_of_addresses_fills_neither_memory_nor_log(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals("server.http", clock=clock)
    for number in range(10_000):
        refusals.refuse(f"10.0.{number >> 8}.{number & 255}", TlsError("late"))
    assert len(caplog.messages) == 256
    clock.now_s += ONCE_IN_S
    refusals.refuse("10.9.9.9", TlsError("late"))
    assert len(caplog.messages) == 257


def test_a_connection_without_a_handshake_is_no_warning(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    Refusals("server.http", clock=clock).refuse("10.0.0.7", ConnectionResetError())
    assert not caplog.messages


def test_an_unknown_reason_of_openssl_is_shown_in_its_words(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    Refusals("server.http", clock=clock).refuse("10.0.0.7", ssl.SSLError(1, "[SSL: BAD_WEATHER] bad weather"))
    assert caplog.messages[0] == "server.http: no TLS with 10.0.0.7: bad weather"

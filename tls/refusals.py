"""Log lines for peers that are refused: few, whatever arrives."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from tls.errors import reason_of

ONCE_IN_S = 60.0
"""The same peer is named for the same reason at most this often."""

_MOST_REMEMBERED = 256
"""Peers and reasons; while there are more, further ones are only counted."""

_log = logging.getLogger("pointsman.tls")


class Refusals:
    """Logs why handshakes of `what` failed, each peer and reason once a minute, so that there is `lack`. `on_refused`
    gets the reason each time. `clock` is in seconds.
    """

    def __init__(
        self,
        what: str,
        *,
        lack: str = "no TLS",
        on_refused: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lack = lack
        self._what, self._on_refused, self._clock = what, on_refused, clock
        self._logged_at: dict[tuple[str, str], float] = {}
        self._unlogged = 0

    def __repr__(self) -> str:
        return f"<Refusals of {self._what}: {self._unlogged} without a line>"

    def refuse(self, peer: str, error: BaseException) -> None:
        """A handshake with `peer`, an address, failed with `error`."""
        reason, hint = reason_of(error)
        self._on_refused(reason)
        if isinstance(error, ConnectionResetError | BrokenPipeError):
            # health checks of load balancers connect and hang up
            _log.info("%s: %s hung up during the handshake", self._what, peer)
            return
        now = self._clock()
        if not self._may_log((peer, reason), now):
            self._unlogged += 1
            return
        others = f"; {self._unlogged} more since the last line" if self._unlogged else ""
        self._unlogged = 0
        _log.warning(
            "%s: %s with %s: %s%s%s", self._what, self._lack, peer, reason, f" ({hint})" if hint else "", others
        )

    def _may_log(self, about: tuple[str, str], now: float) -> bool:
        logged = self._logged_at
        if about not in logged and len(logged) >= _MOST_REMEMBERED:
            for old in [each for each, at in logged.items() if now - at >= ONCE_IN_S]:
                del logged[old]
            if len(logged) >= _MOST_REMEMBERED:
                return False
        if now - logged.get(about, -ONCE_IN_S) < ONCE_IN_S:
            return False
        logged[about] = now
        return True

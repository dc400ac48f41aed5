"""Where a server listens."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass

from policies.errors import ConfigError
from policies.quantities import digits


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens. Port 0 takes a free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """`host:port`, `[v6]:port` or `:port` for all interfaces. Raises ConfigError."""
        host, colon, port = text.rpartition(":")
        if not (colon and (number := digits(port, most=65535)) is not None):
            raise ConfigError(f"'{text}' is not an address", hint="write host:port, such as 127.0.0.1:8080")
        return cls(host.strip("[]") or "0.0.0.0", number)  # noqa: S104 - that is what ":8080" means

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in {"127.0.0.1", "::1", "localhost"}

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


_HINTS = {
    errno.EADDRINUSE: "is another router running? choose another port with --http, --grpc or --admin, or in the file",
    errno.EACCES: "ports below 1024 need root; choose a higher one",
    errno.EADDRNOTAVAIL: "this machine does not have this address; 0.0.0.0 stands for all that it has",
}


def cannot_listen(address: Address, error: Exception) -> ConfigError:
    """The error for a server that failed to listen at `address` with `error`."""
    number = getattr(error, "errno", None) or 0
    # grpc raises a RuntimeError without a number; the second half of its text is advice to developers
    why = os.strerror(number).lower() if number in _HINTS else str(error).partition(";")[0]
    return ConfigError(f"cannot listen on {address}: {why}", hint=_HINTS.get(number, _HINTS[errno.EADDRINUSE]))

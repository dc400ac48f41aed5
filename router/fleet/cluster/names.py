"""What backends are called."""

from __future__ import annotations


def backend_name(pool: str, number: int) -> str:
    """The name of a backend that the file names, as decisions and metrics show it; the first has number 0."""
    return f"{pool}-{number}"


def found_name(pool: str, address: str) -> str:
    """The name of a backend that was found at `address` while the router runs: the same in every router."""
    return f"{pool}@{address.partition('://')[2] or address}"


def pool_of(backend: str) -> str:
    """The pool of a backend with one of these names; any other name is returned as it is."""
    pool, found, _ = backend.partition("@")
    return pool if found else backend.rpartition("-")[0] or backend

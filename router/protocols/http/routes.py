"""Handlers by method and path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from http1.request import Handler


class _Below(NamedTuple):
    """Handlers by method for the paths below `prefix`: one more segment, or any number of them."""

    prefix: str
    is_deep: bool
    by_method: dict[str, Handler]


class Routes:
    """Handlers by path and method. A path may end with /* (one more segment) or /** (one or more); handlers read the
    rest from the request's path.
    """

    def __init__(self) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._below: list[_Below] = []

    def __repr__(self) -> str:
        return f"<Routes {', '.join(self)}>"

    def __iter__(self) -> Iterator[str]:
        """The paths without a wildcard."""
        return iter(self._exact)

    def add(self, method: str, path: str, handler: Handler) -> None:
        """Have `handler` answer `method` at `path`."""
        if not path.endswith("*"):
            self._exact.setdefault(path, {})[method] = handler
            return
        prefix, is_deep = path.rstrip("*"), path.endswith("**")
        for below in self._below:
            if below.prefix == prefix:
                below.by_method[method] = handler
                return
        self._below.append(_Below(prefix, is_deep, {method: handler}))

    def at(self, path: str) -> Mapping[str, Handler] | None:
        """The handlers of `path` by method; None if there is no such path."""
        if (found := self._exact.get(path)) is not None:
            return found
        for prefix, is_deep, by_method in self._below:
            rest = path.removeprefix(prefix)
            if rest and rest != path and (is_deep or "/" not in rest):
                return by_method
        return None

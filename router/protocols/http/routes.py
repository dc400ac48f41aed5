"""Handlers by method and path."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial

from http1.request import Handler, Reply
from policies.suggest import nearest

_VARIABLE = re.compile(r"\{\w+(:path)?\}")

_ROOT = "/v1/"

_LEAST_LIKENESS = 0.75
"""`message` and `messages` have 0.93, `files` and `prefixes` 0.62."""


class Routes:
    """Handlers by path and method. A path may have variables: `{name}` is one segment, `{name:path}` one or more. The
    handler gets their values after the request.
    """

    def __init__(self) -> None:
        self._exact: dict[str, dict[str, Handler]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], dict[str, Callable[..., Awaitable[Reply]]]]] = {}

    def __repr__(self) -> str:
        return f"<Routes {', '.join(self)}>"

    def __iter__(self) -> Iterator[str]:
        """The paths without a variable."""
        return iter(self._exact)

    def add(self, method: str, path: str, handler: Callable[..., Awaitable[Reply]]) -> None:
        """Have `handler` answer `method` at `path`."""
        if "{" in path:
            self._patterns.setdefault(path, (_pattern(path), {}))[1][method] = handler
        else:
            self._exact.setdefault(path, {})[method] = handler

    def nearest(self, path: str) -> str | None:
        """The path without a variable that `path` probably misspells; None if none is close."""
        # what most paths begin with would make any two of them alike
        names = {known.removeprefix(_ROOT): known for known in self._exact}
        meant = nearest(path.removeprefix(_ROOT), names, cutoff=_LEAST_LIKENESS)
        return None if meant is None else names[meant]

    def every(self) -> Iterator[tuple[str, str]]:
        """Method and path of every handler, the path as it was added."""
        for path, by_method in self._exact.items():
            yield from ((method, path) for method in by_method)
        for path, (_, handlers) in self._patterns.items():
            yield from ((method, path) for method in handlers)

    def at(self, path: str) -> Mapping[str, Handler] | None:
        """The handlers of `path` by method; None if there is no such path."""
        found = self.find(path)
        return None if found is None else found[1]

    def find(self, path: str) -> tuple[str, Mapping[str, Handler]] | None:
        """`path` as it was added, and its handlers by method; None if there is no such path."""
        if (found := self._exact.get(path)) is not None:
            return path, found
        for added, (pattern, by_method) in self._patterns.items():
            if (match := pattern.fullmatch(path)) is not None:
                bound = {method: partial(_called, handler, match.groups()) for method, handler in by_method.items()}
                return added, bound
        return None


def _pattern(path: str) -> re.Pattern[str]:
    parts, at = list[str](), 0
    for variable in _VARIABLE.finditer(path):
        parts += [re.escape(path[at : variable.start()]), "(.+)" if variable[1] else "([^/]+)"]
        at = variable.end()
    return re.compile("".join((*parts, re.escape(path[at:]))), re.DOTALL)


def _called(handler: Callable[..., Awaitable[Reply]], values: tuple[str, ...], request: object) -> Awaitable[Reply]:
    return handler(request, *values)

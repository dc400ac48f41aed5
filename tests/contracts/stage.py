"""The contract suite's view of a backend and of the server behind it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from backends.base import Backend
from policies.nouns import Prompt, Request
from tests.backends.parts import a_prompt, a_request
from tests.standins.standin import StandIn

NOWHERE = "127.0.0.1:1"


class Stage(Protocol):
    """A backend and what is behind it, which answers `tests.standins.standin.TEXT` to a prompt of five tokens."""

    backend: Any
    prompt: Prompt
    """Five tokens, in the dialect that is on stage."""

    def hang(self) -> None:
        """After the first piece of the next answer nothing follows."""

    def refuse(self) -> Request:
        """A request that will be refused because it is too long."""

    @property
    def open_behind(self) -> int:
        """Generations that go on behind the backend."""


class StandInStage:
    """A backend in front of a stand-in."""

    def __init__(self, backend: Backend, standin: StandIn, prompt: Prompt | None = None) -> None:
        self.backend, self.standin = backend, standin
        self.prompt = prompt or a_prompt()

    def hang(self) -> None:
        self.standin.hangs_after = 1

    def refuse(self) -> Request:
        self.standin.context_tokens = 4
        return a_request()

    @property
    def open_behind(self) -> int:
        return self.standin.open_requests


class StageModule(Protocol):
    """One file of `tests/contracts/stages`."""

    a_stage: Callable[[Path], AbstractAsyncContextManager[Stage]]
    """A stage before the start of its backend; the folder is empty."""

    an_unreachable: Callable[[], Backend]
    """A backend at an address without a server."""

"""How a prompt gets to the backend that was chosen for it, and its answer back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Hashable
from typing import Protocol

from backends.base import Backend
from policies.nouns import ClusterView, Delta, Prompt
from router.call.bid import Placed
from router.text.tool_calls import heard


class Carrier(Protocol):
    """Takes prompts to backends. `way` is equal for those that can reach the same backends.

    `continues`: it can take an answer that one backend began to another one.
    """

    continues: bool

    @property
    def way(self) -> Hashable:
        """What tells it from carriers that reach other backends."""
        ...

    def seen(self, view: ClusterView) -> ClusterView:
        """`view` with `unfit` set at the backends that it cannot reach."""
        ...

    def carry(self, placed: Placed, backend: Backend, prompt: Prompt) -> AsyncIterator[Delta]:
        """Take `prompt` to `backend`, where it was placed, and stream the answer; raises as `Backend.generate`."""
        ...


class Ourselves:
    """The router itself sends the prompt and passes the answer on. It reaches every backend."""

    way = None
    continues = True

    def seen(self, view: ClusterView) -> ClusterView:
        """All of it."""
        return view

    def carry(self, placed: Placed, backend: Backend, prompt: Prompt) -> AsyncIterator[Delta]:
        """What the backend answers."""
        return heard(backend, placed.bid.request, prompt, placed.bid.tools)

"""How a prompt gets to the backend that was chosen for it, and its answer back."""

from __future__ import annotations

from collections.abc import Coroutine, Hashable
from typing import Any, Protocol

from backends.base import Backend, Taker, give_all
from backends.http.backend import HttpBackend
from policies.nouns import ClusterView, Prompt
from router.call.bid import Placed
from router.text.tool_calls import reading_calls


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

    def carry(self, placed: Placed, backend: Backend, prompt: Prompt, to: Taker) -> Coroutine[Any, Any, None]:
        """Take `prompt` to `backend`, where it was placed, and the answer to `to`.

        Raises as `Backend.generate` does, and what `to` raises.
        """
        ...


class Ourselves:
    """The router itself sends the prompt and passes the answer on. It reaches every backend."""

    way = None
    continues = True

    def seen(self, view: ClusterView) -> ClusterView:
        """All of it."""
        return view

    def carry(self, placed: Placed, backend: Backend, prompt: Prompt, to: Taker) -> Coroutine[Any, Any, None]:
        """What the backend answers, with tool calls parsed out of its text unless the backend has parsed them."""
        request = placed.bid.request
        if (tools := placed.bid.tools) is not None:
            to = reading_calls(to, backend, request, tools)
        if isinstance(backend, HttpBackend):
            return backend.relay(request, prompt, to)
        return give_all(backend.generate(request, prompt), to)

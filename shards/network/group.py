"""The processes that compute one network together, as its parts see each other."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Group(Protocol):
    """`size` processes, each with one part of a network; this one has part `rank`, from 0 on.

    All of them call the same methods with tensors of the same shapes, in the same order. Every process gets the same
    bits. A process that ended, or that is late for longer than the group waits, makes the call raise RuntimeError.
    """

    @property
    def rank(self) -> int:
        """The number of this process's part."""
        ...

    @property
    def size(self) -> int:
        """The number of parts."""
        ...

    def sum(self, part: Tensor) -> Tensor:
        """The sum of all processes' tensors. May overwrite `part`."""
        ...

    def logits(self, part: Tensor, vocabulary: int, *, out: Tensor | None = None) -> Tensor:
        """All logits [rows, vocabulary], in `out` if it is given, from each process's [rows, its part of them].

        Processes that draw no tokens may get `part` back.
        """
        ...


class Alone:
    """The group of a network that one process computes."""

    rank, size = 0, 1

    def __repr__(self) -> str:
        return "Alone()"

    def sum(self, part: Tensor) -> Tensor:
        """`part` itself."""
        return part

    def logits(self, part: Tensor, vocabulary: int, *, out: Tensor | None = None) -> Tensor:  # noqa: ARG002 - all here
        """`part` itself."""
        return part if out is None else out.copy_(part)


ALONE = Alone()

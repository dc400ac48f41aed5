"""What the runner asks of a network."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor

from shards.exec.batch import Batch
from shards.exec.drawing import Drawing
from shards.kv.copier import BlockMemory


class Network(Protocol):
    """A model's weights and the memory of its KV, bound together."""

    @property
    def vocabulary(self) -> int:
        """Size of the logits; token ids are below it."""
        ...

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together."""
        ...

    @property
    def block_bytes(self) -> int:
        """Memory of one KV block."""
        ...

    def allocate(self, blocks: int) -> None:
        """Make memory for the KV of `blocks` blocks; once, before the first step."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Write the batch's KV and give float32 logits [len(batch.logit_rows), vocabulary]."""
        ...


@runtime_checkable
class HostedNetwork(Protocol):
    """A network whose KV can be moved to host memory and back."""

    def host_memory(self, slots: int) -> BlockMemory:
        """Host memory for `slots` blocks, bound to what was allocated; once, after `allocate`."""
        ...


@runtime_checkable
class DrawingNetwork(Protocol):
    """A network on a device that draws tokens itself, and remembers them there.

    What is asked of it is done in order. So a batch may be submitted before the one before it was collected, and take
    from it tokens that the host does not know yet (`Batch.ahead`); whatever the host does with blocks meanwhile comes
    after what was submitted. A row's token depends on its own logits and `Drawing` only.
    """

    @property
    def most_rows(self) -> int:
        """How many tokens one batch may draw."""
        ...

    def prepare(self, rows: int) -> None:
        """Compile what decoding steps of up to `rows` sequences need; once, after `allocate`."""
        ...

    def submit(self, batch: Batch, drawings: Sequence[Drawing]) -> Hashable:
        """Begin to compute `batch` and to draw a token for each of its `logit_rows`. What to `collect` it by."""
        ...

    def collect(self, ticket: Hashable) -> list[int | None]:
        """The tokens, waited for; None where logits were not finite. Tickets are collected in their order."""
        ...

    def draw(self, logits: Tensor, drawings: Sequence[Drawing]) -> list[int | None]:
        """The tokens that `submit` would draw from `logits` [len(drawings), vocabulary], at once."""
        ...

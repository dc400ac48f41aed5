"""The network as the runner uses it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from shards.exec.batch import Batch
from shards.exec.drawing import Drawing, Sample
from shards.kv.copier import BlockMemory
from shards.kv.window_layout import KvWindow

if TYPE_CHECKING:
    from shards.lora.options import AdapterOptions
    from shards.lora.shelf import ReadsAdapters


class Network(Protocol):
    """A model's weights and the memory of its KV, bound together."""

    @property
    def vocabulary(self) -> int:
        """Size of the logits; token ids are below it."""
        ...

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer, together."""
        ...

    @property
    def block_bytes(self) -> int:
        """Memory of one KV block."""
        ...

    def allocate(self, blocks: int) -> None:
        """Allocate memory for the KV of `blocks` blocks; once, before the first step."""
        ...

    def forward(self, batch: Batch) -> Tensor:
        """Write the batch's KV and return float32 logits [len(batch.logit_rows), vocabulary]."""
        ...


class DeviceLost(Exception):
    """The device computes nothing any more, whatever is asked of it: only another process can use it again."""


@runtime_checkable
class FallibleNetwork(Protocol):
    """A network on a device that can fail for good, as a GPU does after an illegal access to its memory."""

    def device_answers(self) -> bool:
        """Whether the device still computes; asked after a step that failed. False stays False."""
        ...


@runtime_checkable
class CapturingNetwork(Protocol):
    """A network that captures its decoding steps once, and replays them."""

    @property
    def uncaptured_steps(self) -> int:
        """Steps that were computed without a captured one since a capture failed; 0 if none has failed."""
        ...


@runtime_checkable
class WatchedNetwork(Protocol):
    """A network that can be lost between two steps, as one of several processes can end."""

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call `on_lost` with the reason, from any thread, once no later step could succeed."""
        ...


@runtime_checkable
class WindowedNetwork(Protocol):
    """A network that can keep the KV of layers with a window in pages of its own (`Batch.window_pages`)."""

    @property
    def window(self) -> KvWindow | None:
        """The layers with a window; None if there are none."""
        ...

    def allocate_divided(self, blocks: int, pages: int) -> None:
        """As `allocate`, with `blocks` blocks of the layers without a window and `pages` pages of the others."""
        ...


@runtime_checkable
class HostedNetwork(Protocol):
    """A network with KV that can be moved to host memory and back."""

    def host_memory(self, slots: int) -> BlockMemory:
        """Host memory for `slots` blocks, bound to the allocated memory; once, after `allocate`."""
        ...


@runtime_checkable
class AdaptableNetwork(Protocol):
    """A network with matrices that LoRA adapters can change, row by row of a batch."""

    def adapt(self, options: AdapterOptions) -> tuple[AdapterOptions, ReadsAdapters]:
        """Let batches have adapters (`Row.adapter`), as many as `options` say or fewer.

        Returns `options` with as many as it has room for, and how adapters for it are read.
        """
        ...


@runtime_checkable
class DrawingNetwork(Protocol):
    """A network on a device that draws tokens itself, and keeps them there.

    It executes calls in order. So a batch may be submitted before the previous one is collected, and take from it
    tokens that the host does not know yet (`Batch.ahead`); copies of blocks that the host starts meanwhile run after
    the submitted batches. A row's token depends only on its own logits, its `Drawing` and the state of its slot.
    """

    @property
    def most_rows(self) -> int:
        """The most tokens that one batch may draw."""
        ...

    def reserve(self, rows: int) -> None:
        """Allocate the slots of `rows` sequences that adjust their logits; once, after `allocate`."""
        ...

    def prepare(self, rows: int, drawn: int = 0) -> None:
        """Compile the steps of up to `rows` sequences, and decoding steps with up to `drawn` rows if drafts make more;
        once, after `reserve`.
        """
        ...

    def submit(self, batch: Batch, drawings: Sequence[Drawing]) -> Hashable:
        """Start computing `batch` and drawing a token for each of its `logit_rows`. Returns a ticket to `collect`.

        If any drawing is masked, it is computed at once, and all of its draws wait for `mask`.
        """
        ...

    def mask(self, ticket: Hashable, masks: Sequence[bytes]) -> None:
        """Let the batch that was submitted last draw, with the allowed tokens of each masked drawing, in order.

        Bit t % 8 of byte t // 8 is 1 if token t is allowed.
        """
        ...

    def collect(self, ticket: Hashable) -> list[Sample | None]:
        """Wait for the tokens; None where logits were not finite or no token was allowed. Tickets are collected in
        their order.
        """
        ...

    def draw(self, logits: Tensor, drawings: Sequence[Drawing], masks: Sequence[bytes] = ()) -> list[Sample | None]:
        """The tokens that `submit` would draw from `logits` [len(drawings), vocabulary], at once."""
        ...

"""A network in parts, as the engine of the first process uses it: each call is made in all processes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from torch import Tensor

from shards.exec.batch import Batch
from shards.exec.drawing import Drawing, Sample
from shards.exec.moves import BlendingNetwork, KvMove
from shards.exec.network import DrawingNetwork, FallibleNetwork, HostedNetwork, Network
from shards.kv.copier import BlockCopy, BlockMemory, Copier, usual_copier
from shards.parallel.followers import Followers
from shards.parallel.orders import Allocate, AskRoom, BatchWriter, Copy, Host, Mask, Move, Prepare, Reserve


class PartNetwork(Network, HostedNetwork, BlendingNetwork, Protocol):
    """A process's part of a network."""


class DrawingPart(PartNetwork, DrawingNetwork, Protocol):
    """A process's part of a network that draws on a device."""

    def room_bytes(self, *, batch_tokens: int, rows: int, shards: int = 1) -> int:
        """Bytes of memory left for KV on its device."""
        ...


class LeadingNetwork:
    """`part` of the first process, and those of all others.

    A call that failed in one process leaves the others waiting for it, so no later call can succeed: the whole shard
    ends. `watch` says whom to tell once another process has ended between two calls.
    """

    def __init__(self, part: PartNetwork, followers: Followers, watch: Callable[[Callable[[str], None]], None]) -> None:
        self._part, self._followers, self.watch = part, followers, watch
        self._writer = BatchWriter()
        self._is_sound = True

    def __repr__(self) -> str:
        return f"LeadingNetwork({self._part!r}, {self._followers!r})"

    @property
    def vocabulary(self) -> int:
        """Size of the logits."""
        return self._part.vocabulary

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer, together."""
        return self._part.context_tokens

    @property
    def block_bytes(self) -> int:
        """Memory of one KV block in each process."""
        return self._part.block_bytes

    def allocate(self, blocks: int) -> None:
        """Allocate memory for the KV of `blocks` blocks in every process. Raises ValueError if one has too little."""
        self._followers.send(Allocate(blocks))
        self._part.allocate(blocks)
        self._followers.answers()

    def host_memory(self, slots: int) -> LeadingMemory:
        """Host memory for `slots` blocks in every process."""
        self._followers.send(Host(slots))
        memory = self._part.host_memory(slots)
        self._followers.answers()
        return LeadingMemory(memory, self._followers)

    def forward(self, batch: Batch) -> Tensor:
        """Logits, float32 [len(batch.logit_rows), vocabulary]."""
        with self._together():
            self._followers.send(self._writer.write(batch))
            return self._part.forward(batch)

    def blend(self, move: KvMove) -> None:
        """Copy the KV of `move`, keys rotated."""
        with self._together():
            self._followers.send(Move(move, measures=False))
            self._part.blend(move)

    def deviations(self, move: KvMove) -> Sequence[float]:
        """How far the target's KV is from that of `move`, token by token: the mean of all parts."""
        with self._together():
            self._followers.send(Move(move, measures=True))
            return self._part.deviations(move)

    def device_answers(self) -> bool:
        """Whether every call so far succeeded in all processes."""
        if isinstance(self._part, FallibleNetwork):
            self._is_sound = self._is_sound and self._part.device_answers()
        return self._is_sound

    @contextmanager
    def _together(self) -> Iterator[None]:
        try:
            with self._followers.limited():
                yield
        except BaseException:
            self._is_sound = False
            raise


class LeadingDevice(LeadingNetwork):
    """A `LeadingNetwork` of parts that draw tokens on their devices: all the same ones, from the same logits."""

    def __init__(self, part: DrawingPart, followers: Followers, watch: Callable[[Callable[[str], None]], None]) -> None:
        super().__init__(part, followers, watch)
        self._device = part

    @property
    def most_rows(self) -> int:
        """The most tokens that one batch may draw."""
        return self._device.most_rows

    def room_bytes(self, *, batch_tokens: int, rows: int, shards: int = 1) -> int:
        """Bytes of memory left for KV on each device: the least of all. Raises ValueError if one has none left."""
        self._followers.send(AskRoom(batch_tokens, rows, shards))
        own = self._device.room_bytes(batch_tokens=batch_tokens, rows=rows, shards=shards)
        return min(own, *self._followers.answers())

    def reserve(self, rows: int) -> None:
        """Allocate the slots of `rows` sequences in all processes."""
        self._followers.send(Reserve(rows))
        self._device.reserve(rows)
        self._followers.answers()

    def prepare(self, rows: int, drawn: int = 0) -> None:
        """Compile the steps of up to `rows` sequences, and decoding steps of up to `drawn` rows, in all processes."""
        self._followers.send(Prepare(rows, drawn))
        self._device.prepare(rows, drawn)
        self._followers.answers()

    def submit(self, batch: Batch, drawings: Sequence[Drawing]) -> Hashable:
        """Start computing `batch` and drawing a token for each of its `logit_rows`."""
        with self._together():
            self._followers.send(self._writer.write(batch, drawings))
            return self._device.submit(batch, drawings)

    def mask(self, ticket: Hashable, masks: Sequence[bytes]) -> None:
        """Let the batch that was submitted last draw, in all processes."""
        with self._together():
            self._followers.send(Mask(list(masks)))
            self._device.mask(ticket, masks)

    def collect(self, ticket: Hashable) -> list[Sample | None]:
        """Wait for the tokens; None where logits were not finite or no token was allowed."""
        with self._together():
            return self._device.collect(ticket)

    def draw(self, logits: Tensor, drawings: Sequence[Drawing], masks: Sequence[bytes] = ()) -> list[Sample | None]:
        """The tokens that `submit` would draw from `logits` [len(drawings), vocabulary]."""
        return self._device.draw(logits, drawings, masks)


class LeadingMemory:
    """Host memory of every process: `memory` is that of the first one."""

    def __init__(self, memory: BlockMemory, followers: Followers) -> None:
        self._memory, self._followers = memory, followers

    def __repr__(self) -> str:
        return f"LeadingMemory({self._memory!r})"

    @property
    def slots(self) -> int:
        """The number of blocks that each process's memory holds."""
        return self._memory.slots

    def save(self, block: int, slot: int) -> None:
        """Copy device block `block` into host slot `slot`."""
        self._followers.send(Copy([BlockCopy(block, slot, is_save=True)]))
        self._memory.save(block, slot)

    def load(self, slot: int, block: int) -> None:
        """Copy host slot `slot` into device block `block`."""
        self._followers.send(Copy([BlockCopy(block, slot, is_save=False)]))
        self._memory.load(slot, block)

    def copier(self) -> LeadingCopier:
        """A copier of these blocks."""
        return LeadingCopier(usual_copier(self._memory), self._followers)


class LeadingCopier:
    """Copies with `copier` here. Other processes copy between two steps: so their copies, too, come before all later
    steps and behind all earlier ones, and nothing needs to be awaited.
    """

    def __init__(self, copier: Copier, followers: Followers) -> None:
        self._copier, self._followers = copier, followers

    def __repr__(self) -> str:
        return f"LeadingCopier({self._copier!r})"

    @property
    def slots(self) -> int:
        """The number of blocks that the host memory holds."""
        return self._copier.slots

    def start(self, copies: Sequence[BlockCopy]) -> int:
        """Start `copies` in every process. Raises LinkBroken."""
        self._followers.send(Copy(list(copies)))
        return self._copier.start(copies)

    def done(self, ticket: int) -> bool:
        """Have the copies of `ticket` landed? Raises CopyFailed."""
        return self._copier.done(ticket)

    def wait(self, ticket: int) -> None:
        """Return when they have landed. Raises CopyFailed."""
        self._copier.wait(ticket)

    def close(self) -> None:
        """End this process's copier."""
        self._copier.close()

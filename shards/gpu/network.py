"""A network on a GPU, as the engine uses it."""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from shards.exec.batch import Batch
from shards.exec.drawing import Drawing, Sample
from shards.exec.moves import KvMove
from shards.gpu.adapters import AdapterMemory, PackedFormat
from shards.gpu.blending import Blending
from shards.gpu.cache import GpuCache, GpuMemory, bytes_per_block, room_bytes, working_bytes
from shards.gpu.decoder import GpuDecoder
from shards.gpu.dense import dense_attention
from shards.gpu.device import answers
from shards.gpu.draws import state_bytes
from shards.gpu.host import PinnedMemory
from shards.gpu.spans import Step, step_of_batch
from shards.gpu.step import StepOptions, Steps
from shards.gpu.transfers import Ticket
from shards.gpu.weights import GpuWeights
from shards.kv.window_layout import KvWindow
from shards.lora.checkpoint import AdapterFormat
from shards.lora.options import AdapterOptions
from shards.lora.sites import sites_of
from shards.network.config import NetworkConfig
from shards.network.families.table import family_of
from shards.network.group import ALONE, Group

log = logging.getLogger(__name__)


class GpuNetwork:
    """A decoder and the memory of its KV on one device: the engine's `Network`, and a `DrawingNetwork` too.

    `kv_dtype` may be int8, float8_e4m3fn, or the weights' own type.
    """

    def __init__(
        self, decoder: GpuDecoder, *, kv_dtype: torch.dtype | None = None, options: StepOptions | None = None
    ) -> None:
        self.decoder, self._options = decoder, options or StepOptions()
        self._kv_dtype = kv_dtype or decoder.weights.embedding.dtype
        self._steps: Steps | None = None

    def __repr__(self) -> str:
        return f"GpuNetwork({self.decoder!r}, {self._steps!r})"

    @classmethod
    def of(
        cls,
        config: NetworkConfig,
        weights: GpuWeights,
        *,
        kv_dtype: torch.dtype | None = None,
        options: StepOptions | None = None,
        group: Group = ALONE,
    ) -> GpuNetwork:
        """The network of `weights`, with the fastest attention that runs on their device."""
        embedding = weights.embedding
        dense = dense_attention(embedding.device, embedding.dtype, config.head_dim, config.heads // config.kv_heads)
        decoder = GpuDecoder(config, weights, dense=dense, group=group)
        return cls(decoder, kv_dtype=kv_dtype, options=options)

    @property
    def vocabulary(self) -> int:
        """Size of the logits."""
        return self.decoder.config.vocab_size

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer, together."""
        return self.decoder.config.max_positions

    @property
    def block_bytes(self) -> int:
        """Memory of one KV block."""
        return bytes_per_block(self.decoder.config, self._kv_dtype)

    @property
    def most_rows(self) -> int:
        """The most tokens that one batch may draw."""
        return self._options.rows

    @property
    def steps(self) -> Steps:
        """The object that runs its steps. Raises RuntimeError before `allocate`."""
        if self._steps is None:
            raise RuntimeError("no memory was allocated for KV")
        return self._steps

    def adapt(self, options: AdapterOptions) -> tuple[AdapterOptions, PackedFormat]:
        """Let batches have adapters, in slots that are allocated at once; before `allocate`.

        Returns `options` with as many adapters as there are slots, and how adapters are read; the same again if called
        again. Raises ValueError without room for a slot.
        """
        config, decoder = self.decoder.config, self.decoder
        dtype, device = decoder.weights.embedding.dtype, decoder.device
        if decoder.slots is None:
            decoder.bind(AdapterMemory.within(options, sites_of(config), dtype=dtype, device=device))
        slots = decoder.slots
        assert slots is not None, "the decoder was bound to slots"
        form = AdapterFormat(sites_of(config), dtype, family_of(config.architecture).prefixes)
        packed = PackedFormat(form, slots.layout, dtype, is_pinned=device.type == "cuda")
        return replace(options, most=slots.count), packed

    def room_bytes(self, *, batch_tokens: int, rows: int, shards: int = 1) -> int:
        """Bytes of GPU memory left for KV beside steps of `batch_tokens` tokens and `rows` rows.

        `shards` shards share the GPU. Computes the largest such step to measure it, so call it before `allocate`.
        Raises ValueError if nothing is left.
        """
        working = self._working_bytes(batch_tokens, rows) + state_bytes(self.vocabulary, rows)
        # memory that torch keeps after trying out attention and the largest step is free too
        torch.cuda.empty_cache()
        device = self.decoder.device
        memory = GpuMemory(*torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device))
        return room_bytes(memory, working, shards=shards)

    def _working_bytes(self, batch_tokens: int, rows: int) -> int:
        """The most memory that torch held during the largest step, beside weights; never less than its graphs need."""
        config, dtype = self.decoder.config, self.decoder.weights.embedding.dtype
        expected = working_bytes(config, batch_tokens=batch_tokens, rows=rows, dtype=dtype)
        device = self.decoder.device
        # buffers at fixed addresses count too
        before = torch.cuda.memory_allocated(device)
        self.allocate(0)
        torch.cuda.reset_peak_memory_stats(device)
        try:
            self.steps.warm_up_largest(tokens=batch_tokens, rows=rows)
            torch.cuda.synchronize(device)
        except torch.OutOfMemoryError as error:
            raise ValueError(f"a step of {batch_tokens} tokens does not fit beside the weights: {error}") from error
        finally:
            self._steps = None
        measured = torch.cuda.max_memory_allocated(device) - before
        log.info("the largest step took %.2f GiB, of %.2f expected", measured / 2**30, expected / 2**30)
        return measured

    def allocate(self, blocks: int) -> None:
        """Allocate memory for the KV of `blocks` blocks. Raises ValueError if there is not enough."""
        self._allocate(blocks, None)

    @property
    def window(self) -> KvWindow | None:
        """The layers with a window; None if there are none."""
        config = self.decoder.config
        if config.window is None:
            return None
        return KvWindow(config.window, bytes_per_block(config.of_layers(windowed=True), self._kv_dtype))

    def allocate_divided(self, blocks: int, pages: int) -> None:
        """Allocate memory for `blocks` blocks, and for `pages` pages of the layers with a window. Raises ValueError if
        there is not enough.
        """
        self._allocate(blocks, pages)

    def _allocate(self, blocks: int, pages: int | None) -> None:
        # earlier memory is released first: there is no room for both
        self._steps = None
        try:
            cache = GpuCache(self.decoder.config, blocks, dtype=self._kv_dtype, device=self.decoder.device, pages=pages)
            self._steps = Steps(self.decoder, cache, self._options)
        except torch.OutOfMemoryError as error:
            apart = 0 if pages is None or self.window is None else self.window.page_bytes
            size = blocks * (self.block_bytes - apart) + (pages or 0) * apart
            raise ValueError(f"{size / 2**30:.1f} GiB for KV are not free on the GPU; ask for less: {error}") from error

    def device_answers(self) -> bool:
        """Whether the GPU still computes."""
        return answers(self.decoder.device)

    @property
    def uncaptured_steps(self) -> int:
        """Decoding steps that were computed without a CUDA graph since a capture failed."""
        return 0 if self._steps is None else self._steps.uncaptured_steps

    def host_memory(self, slots: int) -> PinnedMemory:
        """Host memory for `slots` blocks, with a copier that runs beside the computation."""
        return PinnedMemory(self.steps.cache, slots, device=self.decoder.device)

    def reserve(self, rows: int) -> None:
        """Allocate the slots and masks of `rows` sequences."""
        self.steps.reserve(rows)

    def prepare(self, rows: int, drawn: int = 0) -> None:
        """Compile and capture steps of up to `rows` sequences, decoding steps of up to `drawn` rows if these are more,
        and compile the kernels for long chunks.
        """
        decoding = range(1, max(rows, drawn) + 1)
        # the largest first, so that all share their memory
        self.steps.warm_up_mixed(rows)
        self.steps.warm_up(decoding)
        if self.decoder.slots is not None:
            self.steps.warm_up_adapted(decoding)
        self.steps.warm_up_long()

    def blend(self, move: KvMove) -> None:
        """Start copying the KV of `move`, keys rotated; what is submitted later finds it."""
        self._blending.blend(move)

    def deviations(self, move: KvMove) -> list[float]:
        """How far the target's KV is from that of `move`, token by token; waits for the device."""
        found, group = self._blending.deviations(move), self.decoder.group
        if group.size == 1:
            return found
        summed = group.sum(torch.tensor(found, device=self.decoder.device)) / group.size
        return [float(value) for value in summed.cpu()]

    @property
    def _blending(self) -> Blending:
        return Blending(self.steps.cache, self.decoder.config)

    def submit(self, batch: Batch, drawings: Sequence[Drawing]) -> Ticket:
        """Start computing `batch` and drawing one token per row of logits; the logits stay on the device.

        Raises ValueError for another number of drawings, and for a batch that exceeds the allocated memory.
        """
        step = self._step(batch)
        if len(drawings) != len(step.drawings):
            raise ValueError(f"{len(drawings)} drawings for {len(step.drawings)} rows of logits")
        # the next batch finds the tokens in this order
        return self.steps.submit(replace(step, drawings=tuple(drawings), targets=np.arange(len(drawings))))

    def mask(self, ticket: Hashable, masks: Sequence[bytes]) -> None:
        """Let the batch that was submitted last draw, with these allowed tokens of its masked drawings, in order.

        Raises ValueError if it does not wait for as many.
        """
        self.steps.mask(_a_ticket(ticket), masks)

    def collect(self, ticket: Hashable) -> list[Sample | None]:
        """Wait for the tokens; None where logits were not finite or no token was allowed. Raises ValueError out of
        turn.
        """
        return self.steps.collect(_a_ticket(ticket))

    def draw(self, logits: Tensor, drawings: Sequence[Drawing], masks: Sequence[bytes] = ()) -> list[Sample | None]:
        """The tokens that `submit` would draw from `logits` [len(drawings), vocabulary]."""
        return self.steps.draw(logits, drawings, masks)

    def forward(self, batch: Batch) -> Tensor:
        """Logits, float32 [len(batch.logit_rows), vocabulary], on the device, valid until the next step.

        Those of an exact batch always come from one path: no graph, no padding, splits of one size. Raises ValueError
        for a batch that exceeds the allocated memory.
        """
        return self.steps.logits(self._step(batch)).float()

    def _step(self, batch: Batch) -> Step:
        return step_of_batch(batch, unread=self.steps.unread)


def _a_ticket(ticket: Hashable) -> Ticket:
    if not isinstance(ticket, Ticket):
        raise ValueError(f"{ticket!r} is no ticket of a step")
    return ticket

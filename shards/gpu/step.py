"""Steps on the GPU: submitted one ahead of the host, collected when they are done.

A step's tokens stay on the device in a pool with a row for each running sequence, and the next step reads them there:
it can be submitted before the host knows the drawn tokens. The host sends one buffer per step. A step is computed first
and draws then: the draws of a step with a grammar wait for its masks, while the device computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor

from shards.exec.batch import Row
from shards.exec.drawing import GREEDY, Drawing, Sample
from shards.gpu.adapted_rows import MOST_FEW, AdaptedFields, shapes_of, tile_rows
from shards.gpu.cache import GpuCache
from shards.gpu.decoder import Decodes, GpuDecoder, Inputs, Long, Prefills
from shards.gpu.draws import Draws
from shards.gpu.fill import (
    Arrays,
    fill_chunks,
    fill_contexts,
    fill_decodes,
    fill_drawings,
    fill_pages,
    fill_tables,
    fill_tokens,
    fill_wanted,
    for_every_row,
    most_pages,
)
from shards.gpu.graphs import Capture, Graphs, cuda_capture
from shards.gpu.guard import require_step
from shards.gpu.layout import (
    Layout,
    Size,
    bucket_for,
    decode_buckets,
    decode_layout,
    drawing_fields,
    mixed_layout,
    mixed_sizes,
)
from shards.gpu.sharing import fill_sharing, sharing_of
from shards.gpu.spans import Span, Step, step_of_spans
from shards.gpu.static import StaticBuffers, a_plan
from shards.gpu.transfers import Inbound, Outbound, Ticket, samples_of
from shards.kernels.cache import BLOCK_TOKENS
from shards.kernels.launch import gpu_of
from shards.kernels.low_rank import FEW_ROWS
from shards.kernels.paged_decode import SPLIT_TOKENS, DecodePlan, SharedSplits, plan_decode, splits_of
from shards.kernels.paged_prefill import PrefillPlan, Tile, TilePart, cut_of, most_cut, tiles_at_once, tiles_of
from shards.kernels.sampling import DrawnRows

Tensors = Mapping[str, Tensor]

Plans = Mapping[int | None, DecodePlan]
"""By window, the splits of a step's decoding rows."""


@dataclass(frozen=True, slots=True)
class StepOptions:
    """At most `rows` sequences run at the same time. Decoding steps of up to `graph_rows` use graphs, if `graphs`, and
    steps with chunks of up to `graph_tokens` tokens.

    `dense_from_pairs`: a chunk with at least this many pairs of a new and a seen position uses dense attention.
    `shares`: blocks that several decoding rows have are read once for all of them, which changes no bit.
    """

    rows: int = 1024
    graph_rows: int = 512
    graph_tokens: int = 512
    graphs: bool = True
    dense_from_pairs: int = 2048 * 2048
    shares: bool = True


@dataclass(frozen=True, slots=True)
class _Computed:
    """The logits of a step, and the `fields` by which they are drawn from; one row for each `drawings` of the step.

    In a `bucket` they have as many rows, at fixed addresses; of these the `wanted` ones are the step's, or the first.
    """

    logits: Tensor
    fields: Tensors
    drawings: Sequence[Drawing]
    bucket: int | None = None
    wanted: Tensor | None = None

    def of_step(self, values: Tensor, dim: int = 0) -> Tensor:
        """The step's own rows of `values`, which have the rows of the logits in dimension `dim`."""
        if self.wanted is not None:
            return values.index_select(dim, self.wanted)
        return values.narrow(dim, 0, len(self.drawings))


class Steps:
    """Runs steps of `decoder` on `cache`. At most three may be submitted and uncollected."""

    def __init__(
        self,
        decoder: GpuDecoder,
        cache: GpuCache,
        options: StepOptions | None = None,
        *,
        capture: Capture | None = None,
    ) -> None:
        self._decoder, self.cache, self.options = decoder, cache, options or StepOptions()
        device, rows = decoder.device, self.options.rows
        self._pool = torch.zeros(rows, dtype=torch.int32, device=device)
        self._outbound, self._inbound = Outbound(device), Inbound(device, rows)
        config, dtype = decoder.config, decoder.weights.embedding.dtype
        group = config.heads // config.kv_heads
        self._tile = Tile.of(gpu_of(device), group=group, dim=config.head_dim, dtype=dtype)
        self._at_once = tiles_at_once(gpu_of(device), kv_heads=config.kv_heads)
        self._buckets = decode_buckets(min(rows, self.options.graph_rows))
        adapted = shapes_of(self._adapted(self._buckets[-1], adapts=decoder.slots is not None))
        self._dense_from = None if decoder.dense is None else self.options.dense_from_pairs
        if capture is None and self.options.graphs and device.type == "cuda":
            capture = cuda_capture()
        # padding pays off in graphs alone
        self._most_tokens = 0 if capture is None else self.options.graph_tokens
        self._static = StaticBuffers(
            config,
            cache,
            self._buckets[-1],
            sizes=self._sizes_up_to(self._buckets[-1]),
            device=device,
            dtype=dtype,
            adapted=adapted,
        )
        self._decoding = Graphs(partial(self._compute_decode, adapts=False), capture)
        # apart, so that steps without adapters have no launch for them
        self._decoding_adapted = Graphs(partial(self._compute_decode, adapts=True), capture)
        self._mixed = Graphs(self._compute_padded, capture)
        self._sizes: tuple[Size, ...] = ()
        self._drawing = Graphs(partial(self._draw_rows, truncated=False), capture)
        # apart, so that steps without top-k, top-p and min-p have no launch for them
        self._drawing_truncated = Graphs(partial(self._draw_rows, truncated=True), capture)
        self._draws = Draws(self._pool, config.vocab_size)
        self._held: tuple[Ticket, _Computed] | None = None

    def __repr__(self) -> str:
        return f"Steps({self._decoder!r}, {self.cache!r}, {self._decoding!r}, {self._inbound!r})"

    @property
    def unread(self) -> int:
        """The place past the pool's last row: a token for it is not stored."""
        return self.options.rows

    @property
    def uncaptured_steps(self) -> int:
        """Steps that were computed without a graph since a capture failed."""
        computing = (self._decoding, self._decoding_adapted, self._mixed)
        drawing = (self._drawing, self._drawing_truncated)
        return max(sum(graphs.uncaptured_steps for graphs in parts) for parts in (computing, drawing))

    def reserve(self, rows: int) -> None:
        """Allocate the slots and masks of `rows` sequences; before the first step."""
        self._draws.reserve(rows)

    def submit(self, step: Step) -> Ticket:
        """Start a step behind the submitted ones, of which at most two are uncollected; it draws once it has its masks.

        Raises ValueError for a step that draws more tokens than there are rows, or exceeds the memory otherwise, and
        RuntimeError if the step before it still waits for masks.
        """
        if len(step.wanted) > self.options.rows:
            raise ValueError(f"a step draws {len(step.wanted)} tokens, and there is room for {self.options.rows}")
        if self._held is not None:
            raise RuntimeError(f"step {self._held[0].number} still waits for its masks")
        ticket = self._inbound.next(step.drawings)
        self._draws.begin(step.drawings)
        computed = self._run(step)
        if any(drawing.is_masked for drawing in step.drawings):
            self._held = (ticket, computed)
        else:
            self._inbound.put(ticket, self._draw(computed))
        return ticket

    def mask(self, ticket: Ticket, masks: Sequence[bytes]) -> None:
        """Let the last step draw with these masks. Raises ValueError if it does not wait for as many."""
        expected = sum(drawing.is_masked for drawing in ticket.drawings)
        if self._held is None or self._held[0] != ticket or len(masks) != expected:
            raise ValueError(f"step {ticket.number} does not wait for {len(masks)} masks")
        (_, computed), self._held = self._held, None
        self._draws.send_masks(masks)
        self._inbound.put(ticket, self._draw(computed))

    def collect(self, ticket: Ticket) -> list[Sample | None]:
        """Wait for the step's tokens: one for each span with a drawing, in order; None for rows that are not sound.

        Tickets are collected in the order of their steps.
        """
        return self._inbound.take(ticket)

    def logits(self, step: Step) -> Tensor:
        """Logits [wanted, vocabulary] of a step, in the weights' type, valid until the next step."""
        computed = self._run(step)
        return computed.of_step(computed.logits)

    @torch.inference_mode()
    def draw(self, logits: Tensor, drawings: Sequence[Drawing], masks: Sequence[bytes] = ()) -> list[Sample | None]:
        """Wait for the tokens that `submit` would draw from `logits` [len(drawings), vocabulary]."""
        self._draws.begin(drawings)
        layout = Layout.of(drawing_fields(len(drawings)))
        host = self._outbound.next(layout.words)
        fill_drawings(layout.arrays(host.numpy()), drawings, [self.unread] * len(drawings))
        fields = layout.tensors(self._outbound.send(host))
        self._draws.send_masks(masks)
        drawn = self._draws.run(logits, fields, truncated=_truncates(drawings))
        return samples_of(DrawnRows(drawn.tokens.cpu(), drawn.logprobs.cpu()), drawings)

    def warm_up(self, rows: Iterable[int], *, adapts: bool = False) -> None:
        """Compile and capture decoding steps of each number of `rows`, largest first: so they share their memory.

        With `adapts` those of rows with adapters.
        """
        # in the padding block, so no cached block changes
        span = Span(self.unread, [0], 0, [self.cache.blocks], GREEDY)
        buckets = {bucket for count in rows if (bucket := bucket_for(count, self._buckets)) is not None}
        for bucket in sorted(buckets, reverse=True):
            self._draw_both(self._run(step_of_spans([span] * bucket), adapts=adapts))

    def warm_up_adapted(self, rows: Iterable[int]) -> None:
        """Compile and capture decoding steps of rows with adapters, and compile a step of many tokens with some."""
        self.warm_up(rows, adapts=True)
        tokens = min(BLOCK_TOKENS, self._decoder.config.max_positions)
        # equal rows, so that all write the same numbers to the padding block
        first = Span(self.unread, [0] * tokens, 0, [self.cache.blocks], GREEDY)
        spans = [first, *[replace(first, drawing=None)] * (MOST_FEW // tokens)]
        self._draw_both(self._run(step_of_spans(spans), adapts=True))

    def warm_up_mixed(self, rows: int) -> None:
        """Capture steps with chunks of all sizes for up to `rows` sequences, largest first. No other size has a graph,
        so none is captured while requests wait.
        """
        self._sizes = self._sizes_up_to(bucket_for(rows, self._buckets) or self._buckets[-1])
        # in the padding block, so no cached block changes, and behind the place where padding writes
        step = step_of_spans([Span(self.unread, [0], 1, [self.cache.blocks], GREEDY)])
        for size in reversed(self._sizes):
            self._draw_both(self._run_padded(step, 1, (), size))

    def check(self) -> None:
        """Assert that no buffer in use can be overwritten."""
        self._inbound.check()

    def warm_up_long(self) -> None:
        """Compile the kernels for a chunk that is long enough for dense attention, if there is one."""
        most = self._decoder.config.max_positions
        tokens = min(math.isqrt(self.options.dense_from_pairs) + 1, most)
        if self._decoder.dense is None or tokens * min(2 * tokens, most) < self.options.dense_from_pairs:
            return
        # once at the start of a prompt, once behind an old context: all of it in the padding block
        for computed in (0, min(tokens, most - tokens)):
            blocks = [self.cache.blocks] * -(-(computed + tokens) // BLOCK_TOKENS)
            self._draw_both(self._run(step_of_spans([Span(self.unread, [0] * tokens, computed, blocks, GREEDY)])))

    def warm_up_largest(self, *, tokens: int, rows: int) -> None:
        """Compute a step of `tokens` tokens and `rows` drawn ones that takes as much memory as any of this size.

        Chunks lie behind the longest contexts, of which dense attention gathers all pages. All is in the padding block.
        """
        most, rows = self._decoder.config.max_positions, min(rows, tokens)
        blocks = [self.cache.blocks] * -(-most // BLOCK_TOKENS)
        spans: list[Span] = []
        left = tokens
        for behind in reversed(range(rows)):
            # each row draws after one token at least
            chunk = min(most, left - behind)
            spans.append(Span(self.unread, [0] * chunk, most - chunk if chunk > 1 else 0, blocks, GREEDY))
            left -= chunk
        self._draw_both(self._run(step_of_spans(spans), adapts=self._decoder.slots is not None))

    @torch.inference_mode()
    def _run(self, step: Step, *, adapts: bool = False) -> _Computed:
        """Compute `step`, up to its logits.

        A step `adapts` if a row has an adapter; a warm-up asks for it without one.
        """
        cache, rows = self.cache, self.options.rows
        require_step(step, self._decoder.config, blocks=cache.blocks, rows=rows, pages=cache.pages)
        if self._decoder.slots is not None and not adapts:
            adapts = any(row.adapter is not None for row in step.rows)
        contexts = [row.context_tokens for row in step.rows]
        # padding would change shapes, and with them the bits of the result
        may_pad = step.is_decode and not step.is_exact
        bucket = bucket_for(len(step.rows), self._buckets) if may_pad else None
        if bucket is not None and self._static.has_room(contexts):
            return self._run_decode(step, bucket, adapts=adapts)
        return self._run_mixed(step, adapts=adapts)

    @torch.inference_mode()
    def _draw(self, computed: _Computed, *, truncated: bool | None = None) -> DrawnRows:
        """Draw a token for each row of a step, `truncated` if one of its drawings is, or as asked."""
        truncated = _truncates(computed.drawings) if truncated is None else truncated
        if computed.bucket is None:
            return self._draws.run(computed.logits, computed.fields, truncated=truncated)
        drawn = (self._drawing_truncated if truncated else self._drawing).run(computed.bucket)
        return DrawnRows(computed.of_step(drawn.tokens, 1), computed.of_step(drawn.logprobs))

    def _draw_both(self, computed: _Computed) -> None:
        """Draw in both ways that a step can draw."""
        for truncated in (True, False):
            self._draw(computed, truncated=truncated)

    def _run_decode(self, step: Step, bucket: int, *, adapts: bool) -> _Computed:
        rows = len(step.rows)
        adapted = self._adapted(bucket, adapts=adapts)
        layout = decode_layout(bucket, most_pages(step.rows), self.cache.mapped, shapes_of(adapted))
        host = self._outbound.next(layout.words)
        arrays = layout.arrays(host.numpy())
        fill_drawings(arrays, *for_every_row(step, bucket, unread=self.unread))
        fill_tokens(arrays, step, pool_rows=len(self._pool), padding_slot=self.cache.padding_slot)
        fill_decodes(arrays, step.rows)
        self._fill_shared(arrays, step.rows, step)
        fill_pages(arrays, step, padding=self.cache.pages or 0)
        self._fill_adapted(arrays, step, adapted)
        fields = self._send(host, layout)
        logits = (self._decoding_adapted if adapts else self._decoding).run(bucket)
        if np.array_equal(step.wanted, np.arange(rows)):
            return _Computed(logits, fields, step.drawings, bucket)
        # page-locked like all transfers to the device: any other copy would wait for the device
        wanted = self._outbound.next(len(step.wanted))
        wanted.numpy()[:] = step.wanted
        return _Computed(logits, fields, step.drawings, bucket, self._outbound.send(wanted))

    def _send(self, host: Tensor, layout: Layout) -> Tensors:
        """Send a step's numbers to where graphs read them; returns their fields there."""
        fields = layout.tensors(self._outbound.send(host, self._static.input(layout.words)))
        tables = fields["tables"]
        self._static.tables[: len(tables), : tables.shape[1]].copy_(tables)
        return fields

    @torch.inference_mode()
    def _draw_rows(self, bucket: int, *, truncated: bool) -> DrawnRows:
        # they come first in the layout of every step
        layout = Layout.of(drawing_fields(bucket))
        return self._draws.run(
            self._static.logits[:bucket], layout.tensors(self._static.input(layout.words)), truncated=truncated
        )

    @torch.inference_mode()
    def _compute_decode(self, bucket: int, *, adapts: bool) -> Tensor:
        adapted = self._adapted(bucket, adapts=adapts)
        layout = decode_layout(bucket, 0, self.cache.mapped, shapes_of(adapted))
        fields = layout.tensors(self._static.input(layout.words))
        plans = self._planned(self._static.plans(bucket), fields, fields["context"])
        tables = self._static.tables[:bucket]
        decodes = Decodes(tables, self._of_windows(fields, tables), fields["context"], plans)
        return self._compute(fields, decodes, None, None, adapted=adapted, out=self._static.logits[:bucket])

    def _run_mixed(self, step: Step, *, adapts: bool) -> _Computed:
        step, kinds = step.sorted(dense_from_pairs=self._dense_from)
        decoding, _, long = kinds
        tiles = self._tiles_of(step.rows, kinds, at_once=None if step.is_exact else self._at_once)
        # rows with adapters would need graphs of their own
        size = None if adapts or long else self._size_for(step, decoding, len(tiles))
        if size is not None:
            return self._run_padded(step, decoding, tiles, size)
        size = Size(len(step.known), len(step.rows), decoding, len(step.wanted), len(tiles), cut_of(tiles))
        adapted = self._adapted(size.tokens, size.drawn, adapts=adapts)
        layout = mixed_layout(size, most_pages(step.rows), self.cache.mapped, shapes_of(adapted))
        host = self._filled(step, decoding, tiles, layout)
        self._fill_adapted(layout.arrays(host.numpy()), step, adapted)
        fields = layout.tensors(self._outbound.send(host))
        plans = self._plan_decodes(fields, step.rows[:decoding])
        dense = Long.of(step.rows[-long:], tile_tokens=self._tile.tokens) if long else None
        logits = self._compute_mixed(size, fields, fields["tables"], plans, long=dense, adapted=adapted)
        return _Computed(logits, fields, step.drawings)

    def _run_padded(self, step: Step, decoding: int, tiles: Sequence[TilePart], size: Size) -> _Computed:
        layout = mixed_layout(size, most_pages(step.rows), self.cache.mapped)
        fields = self._send(self._filled(step, decoding, tiles, layout), layout)
        return _Computed(self._mixed.run(size), fields, step.drawings, size.drawn)

    def _filled(self, step: Step, decoding: int, tiles: Sequence[TilePart], layout: Layout) -> Tensor:
        """A buffer of the host with all fields of the step."""
        host = self._outbound.next(layout.words)
        arrays = layout.arrays(host.numpy())
        fill_wanted(arrays, step, unread=self.unread)
        fill_tokens(arrays, step, pool_rows=len(self._pool), padding_slot=self.cache.padding_slot)
        fill_contexts(arrays["context"], step.rows[:decoding])
        fill_chunks(arrays, step.rows, tiles, tokens=len(step.known), tile_tokens=self._tile.tokens)
        fill_pages(arrays, step, padding=self.cache.pages or 0)
        fill_tables(arrays["tables"], step.rows)
        self._fill_shared(arrays, step.rows[:decoding], step)
        return host

    @torch.inference_mode()
    def _compute_padded(self, size: Size) -> Tensor:
        layout = mixed_layout(size, 0, self.cache.mapped)
        fields = layout.tensors(self._static.input(layout.words))
        plans = self._planned(self._static.plans(size.decoding), fields, fields["context"][: size.decoding])
        tables, out = self._static.tables[: size.rows], self._static.logits[: size.drawn]
        return self._compute_mixed(size, fields, tables, plans, out=out)

    def _compute_mixed(
        self,
        size: Size,
        fields: Tensors,
        tables: Tensor,
        plans: Plans,
        *,
        long: Long | None = None,
        adapted: Sequence[AdaptedFields] = (),
        out: Tensor | None = None,
    ) -> Tensor:
        windowed, rows = self._of_windows(fields, tables), size.decoding
        decodes = Decodes(tables[:rows], windowed[:rows], fields["context"][:rows], plans) if rows else None
        plan = PrefillPlan(fields["first_queries"], fields["seen"], fields["tiles"], self._tile, size.cut)
        prefills = Prefills(tables, windowed, plan, long) if size.tiles else None
        return self._compute(fields, decodes, prefills, fields["wanted"], adapted=adapted, out=out)

    def _compute(
        self,
        fields: Tensors,
        decodes: Decodes | None,
        prefills: Prefills | None,
        wanted: Tensor | None,
        *,
        adapted: Sequence[AdaptedFields],
        out: Tensor | None = None,
    ) -> Tensor:
        token_ids = torch.cat((self._pool, fields["known"])).index_select(0, fields["source"])
        slots = window_slots = fields["slot"]
        if self.cache.pages is not None:
            blocks = torch.div(slots, BLOCK_TOKENS, rounding_mode="floor")
            window_slots = self._of_windows(fields, blocks) * BLOCK_TOKENS + slots % BLOCK_TOKENS
        rows = [each.read(fields) for each in adapted]
        inputs = Inputs(
            *(token_ids, fields["position"], slots, window_slots, decodes, prefills, wanted),
            adapted=(rows[0], rows[-1]) if rows else None,
        )
        return self._decoder.forward(inputs, self.cache, out=out)

    def _adapted(self, tokens: int, wanted: int | None = None, *, adapts: bool) -> tuple[AdaptedFields, ...]:
        """The fields of the adapters of all tokens, and of the `wanted` ones if they are others."""
        slots = self._decoder.slots
        if slots is None or not adapts:
            return ()
        of_all = AdaptedFields(tokens, slots.count, tile_rows(tokens))
        return (of_all,) if wanted is None else (of_all, AdaptedFields(wanted, slots.count, FEW_ROWS, " wanted"))

    def _fill_adapted(self, arrays: Arrays, step: Step, adapted: Sequence[AdaptedFields]) -> None:
        if self._decoder.slots is not None and adapted:
            slots = self._decoder.slots.of_tokens(step.rows, len(step.known))
            for each, own in zip(adapted, (slots, slots[step.wanted]), strict=False):
                each.fill(arrays, own)

    def _tiles_of(self, rows: Sequence[Row], kinds: tuple[int, int, int], *, at_once: int | None) -> list[TilePart]:
        """The tiles of short chunks, cut as in `tiles_of`, and behind them those of long ones, which are not cut."""
        found: list[TilePart] = []
        for (start, stop), cuts in zip(pairwise(accumulate(kinds)), (at_once, None), strict=True):
            chunks = rows[start:stop]
            new, contexts = [row.tokens for row in chunks], [row.context_tokens for row in chunks]
            tiles = tiles_of(new, contexts, tile=self._tile, at_once=cuts)
            found += [(start + row, token, part, of) for row, token, part, of in tiles]
        return found

    def _sizes_up_to(self, rows: int) -> tuple[Size, ...]:
        return mixed_sizes(self._most_tokens, rows, tile_tokens=self._tile.tokens, cut=most_cut(self._at_once))

    def _size_for(self, step: Step, decoding: int, tiles: int) -> Size | None:
        """The smallest size of the warm-up with room for this step; None if there is none."""
        # padding would change shapes, and with them the bits of the result
        if step.is_exact or not self._static.has_room([row.context_tokens for row in step.rows[:decoding]]):
            return None
        need = {"tokens": len(step.known), "rows": len(step.rows), "drawn": len(step.wanted), "tiles": tiles}
        return next((size for size in self._sizes if size.holds(**need, tile_tokens=self._tile.tokens)), None)

    def _plan_decodes(self, fields: Tensors, rows: Sequence[Row]) -> Plans:
        """By window, a plan for exactly these rows, in memory of its own."""
        if not rows:
            return {}
        config, device = self._decoder.config, self._decoder.device
        known = [row.context_tokens for row in rows]
        rooms = {window: splits_of(known, window=window) for window in set(config.windows)}
        plans = {window: a_plan(config, len(rows), room, window, device) for window, room in rooms.items()}
        return self._planned(plans, fields, fields["context"][: len(rows)])

    def _planned(self, plans: Plans, fields: Tensors, contexts: Tensor) -> Plans:
        """`plans`, filled from a step's fields. Only layers without a window share what rows have in common."""
        shared = SharedSplits(fields["spans"], fields["readers"], fields["own"])
        for window, plan in plans.items():
            plan_decode(plan, contexts, shared=shared if window is None else None)
        return plans

    def _fill_shared(self, arrays: Arrays, rows: Sequence[Row], step: Step) -> None:
        """Behind `fill_tables`: what the decoding `rows` have in common. An exact step never asks which blocks."""
        shares = self.options.shares and not step.is_exact
        pages = SPLIT_TOKENS // BLOCK_TOKENS
        fill_sharing(arrays, sharing_of(rows if shares else (), arrays["tables"], split_pages=pages))

    def _of_windows(self, fields: Tensors, blocks: Tensor) -> Tensor:
        """The pages of `blocks` in layers with a window; the blocks themselves if there are no pages."""
        if self.cache.pages is None:
            return blocks
        # behind the end of a sequence a table has any number
        known = blocks.flatten().clamp(0, self.cache.blocks)
        return fields["page_of"].index_select(0, known).view(blocks.shape)


def _truncates(drawings: Sequence[Drawing]) -> bool:
    return any(drawing.truncates for drawing in drawings)

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
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from shards.exec.batch import Row
from shards.exec.drawing import GREEDY, Drawing, Sample
from shards.gpu.adapted_rows import MOST_FEW, AdaptedFields, shapes_of, tile_rows
from shards.gpu.cache import GpuCache
from shards.gpu.decoder import Decodes, GpuDecoder, Inputs, Prefills
from shards.gpu.draws import Draws
from shards.gpu.fill import (
    Arrays,
    fill_decodes,
    fill_drawings,
    fill_pages,
    fill_tables,
    fill_tokens,
    for_every_row,
    most_pages,
)
from shards.gpu.graphs import Graphs, cuda_capture
from shards.gpu.guard import require_step
from shards.gpu.layout import Layout, bucket_for, decode_buckets, decode_layout, drawing_fields, mixed_fields
from shards.gpu.spans import Span, Step, step_of_spans
from shards.gpu.static import StaticBuffers
from shards.gpu.transfers import Inbound, Outbound, Ticket, samples_of
from shards.kernels.cache import BLOCK_TOKENS
from shards.kernels.launch import gpu_of
from shards.kernels.low_rank import FEW_ROWS
from shards.kernels.paged_decode import DecodePlan, plan_decode, splits_of
from shards.kernels.paged_prefill import PrefillPlan, Tile, plan_prefill
from shards.kernels.sampling import DrawnRows

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class StepOptions:
    """At most `rows` sequences run at the same time; decoding steps of up to `graph_rows` use graphs, if `graphs`.

    `dense_from_pairs`: a chunk with at least this many pairs of a new and a seen position uses dense attention.
    """

    rows: int = 1024
    graph_rows: int = 256
    graphs: bool = True
    dense_from_pairs: int = 2048 * 2048


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

    def __init__(self, decoder: GpuDecoder, cache: GpuCache, options: StepOptions | None = None) -> None:
        self._decoder, self.cache, self.options = decoder, cache, options or StepOptions()
        device, rows = decoder.device, self.options.rows
        self._pool = torch.zeros(rows, dtype=torch.int32, device=device)
        self._outbound, self._inbound = Outbound(device), Inbound(device, rows)
        config, dtype = decoder.config, decoder.weights.embedding.dtype
        group = config.heads // config.kv_heads
        self._tile = Tile.of(gpu_of(device), group=group, dim=config.head_dim, dtype=dtype)
        self._buckets = decode_buckets(min(rows, self.options.graph_rows))
        adapted = shapes_of(self._adapted(self._buckets[-1], adapts=decoder.slots is not None))
        self._static = StaticBuffers(config, cache, self._buckets[-1], device=device, dtype=dtype, adapted=adapted)
        capture = cuda_capture() if self.options.graphs and device.type == "cuda" else None
        self._decoding = Graphs(partial(self._compute_decode, adapts=False), capture)
        # apart, so that steps without adapters have no launch for them
        self._decoding_adapted = Graphs(partial(self._compute_decode, adapts=True), capture)
        self._drawing = Graphs(self._draw_decode, capture)
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
        computed = self._decoding.uncaptured_steps + self._decoding_adapted.uncaptured_steps
        return max(computed, self._drawing.uncaptured_steps)

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
        drawn = self._draws.run(logits, fields)
        return samples_of(DrawnRows(drawn.tokens.cpu(), drawn.logprobs.cpu()), drawings)

    def warm_up(self, rows: Iterable[int], *, adapts: bool = False) -> None:
        """Compile and capture decoding steps of each number of `rows`, largest first: so they share their memory.

        With `adapts` those of rows with adapters.
        """
        # in the padding block, so no cached block changes
        span = Span(self.unread, [0], 0, [self.cache.blocks], GREEDY)
        buckets = {bucket for count in rows if (bucket := bucket_for(count, self._buckets)) is not None}
        for bucket in sorted(buckets, reverse=True):
            self._draw(self._run(step_of_spans([span] * bucket), adapts=adapts))

    def warm_up_adapted(self, rows: Iterable[int]) -> None:
        """Compile and capture decoding steps of rows with adapters, and compile a step of many tokens with some."""
        self.warm_up(rows, adapts=True)
        tokens = min(BLOCK_TOKENS, self._decoder.config.max_positions)
        # equal rows, so that all write the same numbers to the padding block
        first = Span(self.unread, [0] * tokens, 0, [self.cache.blocks], GREEDY)
        spans = [first, *[replace(first, drawing=None)] * (MOST_FEW // tokens)]
        self._draw(self._run(step_of_spans(spans), adapts=True))

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
            self._draw(self._run(step_of_spans([Span(self.unread, [0] * tokens, computed, blocks, GREEDY)])))

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
        self._draw(self._run(step_of_spans(spans), adapts=self._decoder.slots is not None))

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
    def _draw(self, computed: _Computed) -> DrawnRows:
        """Draw a token for each row of a step."""
        if computed.bucket is None:
            return self._draws.run(computed.logits, computed.fields)
        drawn = self._drawing.run(computed.bucket)
        return DrawnRows(computed.of_step(drawn.tokens, 1), computed.of_step(drawn.logprobs))

    def _run_decode(self, step: Step, bucket: int, *, adapts: bool) -> _Computed:
        rows, pages = len(step.rows), most_pages(step.rows)
        adapted = self._adapted(bucket, adapts=adapts)
        layout = decode_layout(bucket, pages, self.cache.mapped, shapes_of(adapted))
        host = self._outbound.next(layout.words)
        arrays = layout.arrays(host.numpy())
        fill_drawings(arrays, *for_every_row(step, bucket, unread=self.unread))
        fill_tokens(arrays, step, pool_rows=len(self._pool), padding_slot=self.cache.padding_slot)
        fill_decodes(arrays, step.rows)
        fill_pages(arrays, step, padding=self.cache.pages or 0)
        self._fill_adapted(arrays, step, adapted)
        fields = layout.tensors(self._outbound.send(host, self._static.input(layout.words)))
        self._static.tables[:bucket, :pages].copy_(fields["tables"])
        logits = (self._decoding_adapted if adapts else self._decoding).run(bucket)
        if np.array_equal(step.wanted, np.arange(rows)):
            return _Computed(logits, fields, step.drawings, bucket)
        # page-locked like all transfers to the device: any other copy would wait for the device
        wanted = self._outbound.next(len(step.wanted))
        wanted.numpy()[:] = step.wanted
        return _Computed(logits, fields, step.drawings, bucket, self._outbound.send(wanted))

    @torch.inference_mode()
    def _draw_decode(self, bucket: int) -> DrawnRows:
        # they come first in the layout of every step
        layout = Layout.of(drawing_fields(bucket))
        return self._draws.run(self._static.logits[:bucket], layout.tensors(self._static.input(layout.words)))

    @torch.inference_mode()
    def _compute_decode(self, bucket: int, *, adapts: bool) -> Tensor:
        adapted = self._adapted(bucket, adapts=adapts)
        layout = decode_layout(bucket, 0, self.cache.mapped, shapes_of(adapted))
        fields = layout.tensors(self._static.input(layout.words))
        plans = self._static.plans(bucket)
        for plan in plans.values():
            plan_decode(plan, fields["context"])
        tables = self._static.tables[:bucket]
        decodes = Decodes(tables, self._of_windows(fields, tables), fields["context"], plans)
        return self._compute(fields, decodes, (), None, adapted=adapted, out=self._static.logits[:bucket])

    def _run_mixed(self, step: Step, *, adapts: bool) -> _Computed:
        step, counts = step.sorted(dense_from_pairs=self.options.dense_from_pairs)
        bounds = np.cumsum((0, *counts)).tolist()
        decoding, short, long = (step.rows[start:stop] for start, stop in pairwise(bounds))
        chunks = [(rows, self._plan_prefill(rows)) for rows in (short, long) if rows]
        adapted = self._adapted(len(step.known), len(step.wanted), adapts=adapts)
        layout = Layout.of(
            mixed_fields(
                len(step.known),
                len(step.wanted),
                decodes=(len(decoding), most_pages(decoding)),
                prefills=[(len(rows), most_pages(rows), len(plan.tiles)) for rows, plan in chunks],
                mapped=self.cache.mapped,
                adapted=shapes_of(adapted),
            )
        )
        host = self._outbound.next(layout.words)
        arrays = layout.arrays(host.numpy())
        fill_drawings(arrays, step.drawings, step.targets.tolist())
        fill_tokens(arrays, step, pool_rows=len(self._pool), padding_slot=self.cache.padding_slot)
        fill_decodes(arrays, decoding)
        fill_pages(arrays, step, padding=self.cache.pages or 0)
        self._fill_adapted(arrays, step, adapted)
        arrays["wanted"][:] = step.wanted
        for index, (rows, plan) in enumerate(chunks):
            arrays[f"first_queries {index}"][:] = plan.first_queries.numpy()
            arrays[f"context {index}"][:] = plan.context_tokens.numpy()
            arrays[f"tiles {index}"][:] = plan.tiles.numpy()
            fill_tables(arrays[f"tables {index}"], rows)
        fields = layout.tensors(self._outbound.send(host))
        prefills = tuple(
            self._prefills(fields, index, rows, plan, is_dense=rows is long)
            for index, (rows, plan) in enumerate(chunks)
        )
        decodes = self._plan_decodes(fields, [row.context_tokens for row in decoding]) if decoding else None
        logits = self._compute(fields, decodes, prefills, fields["wanted"], adapted=adapted)
        return _Computed(logits, fields, step.drawings)

    def _compute(
        self,
        fields: Tensors,
        decodes: Decodes | None,
        prefills: tuple[Prefills, ...],
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

    def _plan_prefill(self, rows: Sequence[Row]) -> PrefillPlan:
        """The plan on the host; it is sent with the other metadata."""
        return plan_prefill(
            [row.tokens for row in rows],
            [row.context_tokens for row in rows],
            tile=self._tile,
            device=torch.device("cpu"),
        )

    def _plan_decodes(self, fields: Tensors, contexts: list[int]) -> Decodes:
        config, device = self._decoder.config, self._decoder.device
        plans: dict[int | None, DecodePlan] = {}
        for window in set(config.windows):
            splits = splits_of(contexts, window=window)
            plans[window] = DecodePlan.with_room(
                len(contexts), splits, heads=config.heads, dim=config.head_dim, device=device, window=window
            )
            plan_decode(plans[window], fields["context"], contexts=contexts)
        return Decodes(fields["tables"], self._of_windows(fields, fields["tables"]), fields["context"], plans)

    def _prefills(
        self, fields: Tensors, index: int, rows: Sequence[Row], plan: PrefillPlan, *, is_dense: bool
    ) -> Prefills:
        on_device = PrefillPlan(
            fields[f"first_queries {index}"], fields[f"context {index}"], fields[f"tiles {index}"], plan.tile
        )
        tables = fields[f"tables {index}"]
        return Prefills(
            tables=tables,
            window_tables=self._of_windows(fields, tables),
            plan=on_device,
            new_tokens=[row.tokens for row in rows],
            context_tokens=[row.context_tokens for row in rows],
            is_dense=is_dense,
        )

    def _of_windows(self, fields: Tensors, blocks: Tensor) -> Tensor:
        """The pages of `blocks` in layers with a window; the blocks themselves if there are no pages."""
        if self.cache.pages is None:
            return blocks
        # behind the end of a sequence a table has any number
        known = blocks.flatten().clamp(0, self.cache.blocks)
        return fields["page_of"].index_select(0, known).view(blocks.shape)

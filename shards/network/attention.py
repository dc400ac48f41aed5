"""Attention of one step's sequences over the cache, on the CPU: first the reference, then the fast implementation.

Seven ways to compute the same, depending on a sequence's new tokens (one thread, float32, head_dim 64, measured):

- one token, float32: two small matrix products per extent and a softmax between. 20 us at 60 positions, where one
  call of scaled_dot_product_attention takes 30 us, and gathering pages into one batch costs 4 times as much at 500.
- one token, bfloat16: a compiled loop over all rows (`shards.compiled.attention`), a third of the next one's time.
- one token otherwise: scaled_dot_product_attention per extent, the query heads of a group as rows of one matrix. In
  bfloat16 without hardware for it, at 256 positions: 0.2 ms, where every query head alone takes 3.4 ms, and two
  products 0.9 ms.
- one token each of several sequences that begin with the same blocks: these once for all of them, then the rest of
  each, joined by their log-sum-exps. Not if the batch must be exact, because bits would then depend on neighbours.
- several tokens, bfloat16, with AVX512-BF16: compiled tiles (`shards.compiled.chunks`), two to three times as fast as
  the next two, without a mask, and with bits that do not depend on how a prompt was cut.
- a few tokens, or a window: scaled_dot_product_attention with a mask, in tiles under a window.
- many tokens over a long past: the past without a mask and the new tokens causally, joined by their log-sum-exps.
  15 to 25 % faster than a mask over everything, and no mask of tokens x context, which is 400 MB at 512 x 200k.

With sinks (gpt-oss) every token also sees a position without a value; its score is a weight of the head. Its share is
taken from the result by the log-sum-exp of the other scores.

If a sequence has more than one new token, query heads that share a key head are a dimension of their own against keys
of stride 0. `enable_gqa` is not used: on the CPU it takes 2 to 8 times as long.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from shards.compiled import LEAST_KV_WIDTH
from shards.exec.batch import Batch, Row
from shards.kv.cache import Extent, KvCache, LayeredViews, extents_of
from shards.kv.keys import BLOCK_TOKENS
from shards.network.sharing import Shared, shared_prefixes

if TYPE_CHECKING:
    from shards.network.compiled_chunks import CompiledChunks
    from shards.network.compiled_rows import CompiledRows

_LARGEST_MASK = 1 << 17
"""Elements of a mask from which on a chunk is computed in two parts instead."""

_TILE_TOKENS = 256
"""Queries that share a mask under a window: few enough to waste little, many enough to keep the cores busy."""

_LEAST_SPARED = 1 << 21
"""Numbers of a layer's KV saved from repeated reads, from which on one pass for several rows is faster: 1.2 times as
fast at 8 rows and 256 positions of 8 kv heads, 4 to 7 times at 8 to 32 rows and 2048; below, up to 2 times slower."""


def attention_reference(
    queries: Tensor,
    batch: Batch,
    *,
    cache: KvCache,
    layer: int,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """For each token, the mix of the values of its own sequence, up to itself. The reference for `PagedAttention`.

    Shapes: `queries` and the result [tokens, heads, head_dim]; the cache holds the new tokens' keys and values already.
    A token at position p sees positions max(0, p - window + 1) to p. Scores are multiplied by `scale`, or else by 1 /
    sqrt(head_dim). `sinks` [heads] are scores of one more position, without a value.
    """
    scale = queries.shape[-1] ** -0.5 if scale is None else scale
    out = torch.empty(queries.shape, dtype=queries.dtype)
    group = queries.shape[1] // cache.data.shape[2]
    for row in batch.rows:
        tokens = slice(row.start, row.start + row.tokens)
        seen = torch.arange(row.context_tokens)
        slots = torch.tensor(row.blocks)[seen // BLOCK_TOKENS] * BLOCK_TOKENS + seen % BLOCK_TOKENS
        both = cache.data[layer][:, :, slots].float().repeat_interleave(group, 1)
        keys, values = both[0], both[-1]
        scores = torch.einsum("thd,hcd->htc", queries[tokens].float(), keys) * scale
        age = batch.positions[tokens, None] - seen
        hidden = (age < 0) if window is None else (age < 0) | (age >= window)
        scores = scores.masked_fill(hidden, -math.inf)
        if sinks is not None:
            sunk = sinks.float()[:, None, None].expand(*scores.shape[:2], 1)
            scores = torch.cat((scores, sunk), -1)
        weights = scores.softmax(-1)[..., : row.context_tokens]
        out[tokens] = torch.einsum("htc,hcd->thd", weights, values).to(queries.dtype)
    return out


class PagedAttention:
    """Attention for one step, for all layers that share `window`: work that no layer changes is done once.

    Scores are multiplied by `scale`; None is 1 / sqrt(head_dim).
    """

    def __init__(self, batch: Batch, cache: KvCache, window: int | None, *, scale: float | None = None) -> None:
        self._cache, self._window, self._is_exact = cache, window, batch.is_exact
        self._scale = cache.data.shape[-1] ** -0.5 if scale is None else scale
        self._tokens: list[_Token] = []
        self._groups: list[_Group] = []
        self._tiles: list[_Tile] = []
        self._chunks: list[_Chunk] = []
        self._masks: dict[tuple[int, int], Tensor] = {}
        self._cascades: list[_Cascade] = []
        self._single: list[Row] = []
        self._several: list[Row] = []
        alone = {row.start: row for row in batch.rows}
        for shared in [] if window is not None or batch.is_exact else shared_prefixes(batch.rows):
            if self._is_worthwhile(shared):
                self._cascades.append(_cascade(shared))
                for row in shared.rows:
                    del alone[row.start]
        for row in alone.values():
            self._place(row)
        self._compiled: list[CompiledRows | CompiledChunks] = []
        if self._single:
            self._compiled.append(self._compiled_rows())
        if self._several:
            self._compiled.append(self._compiled_chunks())

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor, *, sinks: Tensor | None = None) -> Tensor:
        """The result of `attention_reference`, [tokens, heads, head_dim].

        `queries` [tokens, heads, head_dim]; `keys_values` [tokens, k|v * kv_heads, head_dim] are the new tokens' own,
        which the cache must hold already.
        """
        tokens, heads, head_dim = queries.shape
        grouped = queries.view(tokens, self._cache.data.shape[2], -1, head_dim)
        sunk = None if sinks is None else sinks.float().view(*grouped.shape[1:3], 1)
        out = queries.new_empty(grouped.shape)
        for compiled in self._compiled:
            compiled.attend(layer, grouped, out, sunk)
        if self._tokens:
            self._attend_tokens(layer, grouped, out, sunk)
        for cascade in self._cascades:
            out[cascade.tokens] = self._attend_cascade(layer, cascade, grouped[cascade.tokens], sunk)
        for group in self._groups:
            self._attend_group(layer, group, grouped, out, sunk)
        for tile in self._tiles:
            keys, values = self._cache.read(layer, tile.extents)
            mask = self._mask(tile.tokens, tile.past, queries.dtype)
            _by_head(out, tile).copy_(self._mix(_by_head(grouped, tile), keys, values, sunk, mask=mask))
        for chunk in self._chunks:
            _by_head(out, chunk).copy_(self._attend_chunk(layer, chunk, _by_head(grouped, chunk), keys_values, sunk))
        return out.view(tokens, heads, head_dim)

    def _is_worthwhile(self, shared: Shared) -> bool:
        _, planes, kv_heads, _, head_dim = self._cache.data.shape
        spared_tokens = (len(shared.rows) - 1) * shared.blocks * BLOCK_TOKENS
        return spared_tokens * planes * kv_heads * head_dim >= _LEAST_SPARED

    @property
    def _is_compiled(self) -> bool:
        kv_heads, head_dim = self._cache.data.shape[2], self._cache.data.shape[4]
        return self._cache.data.dtype == torch.bfloat16 and kv_heads * head_dim >= LEAST_KV_WIDTH

    @property
    def _is_tiled(self) -> bool:
        if not self._is_compiled:
            return False
        from shards.compiled.tiles import LANES, has_tiles

        return self._cache.data.shape[4] % LANES == 0 and has_tiles()

    def _compiled_rows(self) -> CompiledRows:
        from shards.network.compiled_rows import CompiledRows

        first_seen = [self._first_seen(row.context_tokens - 1) for row in self._single]
        return CompiledRows(self._cache, self._single, first_seen, self._scale)

    def _compiled_chunks(self) -> CompiledChunks:
        from shards.network.compiled_chunks import CompiledChunks

        return CompiledChunks(self._cache, self._several, self._window, self._scale)

    def _place(self, row: Row) -> None:
        past = row.context_tokens - row.tokens
        if row.tokens == 1 and self._is_compiled:
            self._single.append(row)
        elif row.tokens > 1 and self._is_tiled:
            self._several.append(row)
        elif row.tokens == 1:
            self._place_token(row, extents_of(row.blocks, self._first_seen(past), row.context_tokens))
        elif self._window is not None and row.context_tokens > self._window:
            for offset in range(0, row.tokens, _TILE_TOKENS):
                self._place_tile(row, offset, min(_TILE_TOKENS, row.tokens - offset))
        elif past and row.tokens * row.context_tokens < _LARGEST_MASK:
            self._place_tile(row, 0, row.tokens)
        else:
            self._chunks.append(_Chunk(row.start, row.tokens, extents_of(row.blocks, 0, past)))

    def _place_token(self, row: Row, extents: tuple[Extent, ...]) -> None:
        if self._cache.data.dtype == torch.float32 and not self._is_exact:
            self._tokens.append(_Token(row.start, tuple(self._cache.views(extent) for extent in extents)))
        else:
            # sums split at the ends of extents would be visible in an exact batch
            pieces = (extents,) if self._is_exact else tuple((extent,) for extent in extents)
            self._groups.append(_Group(row.start, pieces))

    def _place_tile(self, row: Row, offset: int, tokens: int) -> None:
        first = row.context_tokens - row.tokens + offset
        first_seen = self._first_seen(first)
        extents = extents_of(row.blocks, first_seen, first + tokens)
        self._tiles.append(_Tile(row.start + offset, tokens, first - first_seen, extents))

    def _first_seen(self, position: int) -> int:
        return 0 if self._window is None else max(0, position - self._window + 1)

    def _attend_tokens(self, layer: int, grouped: Tensor, out: Tensor, sunk: Tensor | None) -> None:
        query_of, out_of = (grouped * self._scale).unbind(0), out.unbind(0)
        for token, views in self._tokens:
            query = query_of[token]
            if len(views) == 1 and sunk is None:
                keys, values = views[0]
                torch.bmm(torch.bmm(query, keys[layer]).softmax(-1), values[layer], out=out_of[token])
                continue
            scores = [torch.bmm(query, keys[layer]) for keys, _ in views]
            weights = torch.cat(scores if sunk is None else [*scores, sunk], -1).softmax(-1)
            mixed, begin = out_of[token].zero_(), 0
            for score, (_, values) in zip(scores, views, strict=True):
                mixed.baddbmm_(weights.narrow(-1, begin, score.shape[-1]), values[layer])
                begin += score.shape[-1]

    def _attend_group(self, layer: int, group: _Group, grouped: Tensor, out: Tensor, sunk: Tensor | None) -> None:
        queries = grouped[group.token].unsqueeze(1)
        mixes = [
            self._mix_with_weight(queries, *self._cache.read(layer, extents), causal=False) for extents in group.pieces
        ]
        if len(mixes) == 1 and sunk is None:
            out[group.token] = mixes[0][0].squeeze(1)
            return
        weights = [weight for _, weight in mixes]
        if sunk is not None:
            weights.append(sunk.transpose(1, 2))
        shares = torch.stack(weights).softmax(0)[: len(mixes)].unsqueeze(-1)
        mixed = torch.stack([mix for mix, _ in mixes]).float().mul_(shares).sum(0)
        out[group.token] = mixed.squeeze(1)

    def _attend_cascade(self, layer: int, cascade: _Cascade, queries: Tensor, sunk: Tensor | None) -> Tensor:
        """Queries [rows, kv_heads, group, head_dim]; the result has the same shape."""
        rows, kv_heads, group, head_dim = queries.shape
        stacked = queries.transpose(0, 1).reshape(kv_heads, 1, rows * group, head_dim)
        past, past_weight = self._mix_with_weight(stacked, *self._cache.read(layer, cascade.shared), causal=False)
        past = past.view(kv_heads, rows, group, head_dim).transpose(0, 1)
        past_weight = past_weight.view(kv_heads, rows, group).transpose(0, 1)
        tails = [
            self._mix_with_weight(query.unsqueeze(1), *self._cache.read(layer, extents), causal=False)
            for query, extents in zip(queries.unbind(0), cascade.tails, strict=True)
        ]
        own, own_weight = (torch.stack(column).squeeze(2) for column in zip(*tails, strict=True))
        return _joined((past, past_weight), (own, own_weight), None if sunk is None else sunk.squeeze(-1))

    def _attend_chunk(
        self, layer: int, chunk: _Chunk, queries: Tensor, keys_values: Tensor, sunk: Tensor | None
    ) -> Tensor:
        own_keys, own_values = self._cache.split(keys_values[chunk.start : chunk.start + chunk.tokens])
        if not chunk.past:
            return self._mix(queries, own_keys, own_values, sunk, causal=True)
        past = self._mix_with_weight(queries, *self._cache.read(layer, chunk.past), causal=False)
        own = self._mix_with_weight(queries, own_keys, own_values, causal=True)
        return _joined(past, own, sunk)

    def _mix(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        sunk: Tensor | None,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Queries [kv_heads, group, tokens, head_dim], keys and values [kv_heads, context, head_dim] -> as the queries.

        `sunk` [kv_heads, group, 1] are the scores of the position without a value.
        """
        if sunk is not None:
            mixed, weight = self._mix_with_weight(queries, keys, values, causal=causal, mask=mask)
            return mixed.mul_(torch.sigmoid(weight - sunk).unsqueeze(-1).to(mixed.dtype))
        shape = (*queries.shape[:2], *keys.shape[1:])
        keys, values = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
        return functional.scaled_dot_product_attention(queries, keys, values, mask, is_causal=causal, scale=self._scale)

    def _mix_with_weight(
        self, queries: Tensor, keys: Tensor, values: Tensor, *, causal: bool, mask: Tensor | None = None
    ) -> _Mixed:
        """Like `_mix`, with the log-sum-exp of the scores [kv_heads, group, tokens]: the public function omits it."""
        shape = (*queries.shape[:2], *keys.shape[1:])
        keys, values = keys.unsqueeze(1).expand(shape), values.unsqueeze(1).expand(shape)
        mixed, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, causal, attn_mask=mask, scale=self._scale
        )
        return mixed, weight

    def _mask(self, tokens: int, past: int, dtype: torch.dtype) -> Tensor | None:
        """The mask to add to the scores [tokens, past + tokens]; layers and tiles of the same shape share it."""
        if tokens == 1:
            return None
        mask = self._masks.get((tokens, past))
        if mask is None:
            age = torch.arange(past, past + tokens)[:, None] - torch.arange(past + tokens)
            hidden = (age < 0) if self._window is None else (age < 0) | (age >= self._window)
            mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)
            self._masks[tokens, past] = mask
        return mask


_Mixed = tuple[Tensor, Tensor]
"""A mix of values [kv_heads, group, tokens, head_dim], and the log-sum-exps of its scores [kv_heads, group, tokens]."""


class _Token(NamedTuple):
    """A sequence with one new token, number `token` of the batch, and the views of the positions that it sees."""

    token: int
    views: tuple[LayeredViews, ...]


class _Group(NamedTuple):
    """Like `_Token`, for query heads as rows: `pieces` are computed one by one and joined, each from some extents."""

    token: int
    pieces: tuple[tuple[Extent, ...], ...]


class _Cascade(NamedTuple):
    """Tokens (an index) of sequences that begin with the same extents; `tails` are the rests of each."""

    tokens: Tensor
    shared: tuple[Extent, ...]
    tails: tuple[tuple[Extent, ...], ...]


class _Tile(NamedTuple):
    """Some new tokens of a sequence that see `past` positions before the first of them; `extents` hold both."""

    start: int
    tokens: int
    past: int
    extents: tuple[Extent, ...]


class _Chunk(NamedTuple):
    """All new tokens of a sequence, which see everything before them; `past` are the extents of that."""

    start: int
    tokens: int
    past: tuple[Extent, ...]


def _cascade(shared: Shared) -> _Cascade:
    tokens = shared.blocks * BLOCK_TOKENS
    return _Cascade(
        torch.tensor([row.start for row in shared.rows]),
        extents_of(shared.rows[0].blocks, 0, tokens),
        tuple(extents_of(row.blocks, tokens, row.context_tokens) for row in shared.rows),
    )


def _by_head(tokens: Tensor, part: _Tile | _Chunk) -> Tensor:
    """A view of a part of [tokens, kv_heads, group, head_dim] as [kv_heads, group, tokens, head_dim]."""
    return tokens.narrow(0, part.start, part.tokens).permute(1, 2, 0, 3)


def _joined(past: _Mixed, own: _Mixed, sunk: Tensor | None) -> Tensor:
    """One mix from those of two disjoint sets of positions, and from a position without a value."""
    share = torch.sigmoid(own[1] - past[1]).unsqueeze(-1)
    mixed = torch.lerp(past[0], own[0], share.to(past[0].dtype))
    if sunk is None:
        return mixed
    return mixed * torch.sigmoid(torch.logaddexp(own[1], past[1]) - sunk).unsqueeze(-1).to(mixed.dtype)

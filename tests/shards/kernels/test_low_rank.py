from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from shards.gpu.adapted_rows import most_tiles, sorted_rows, tile_rows
from shards.kernels.low_rank import AdaptedRows, LowRankSlots, add_low_rank, add_low_rank_reference

Close = Callable[[torch.Tensor, torch.Tensor], None]


def some_slots(
    device: torch.device, dtype: torch.dtype, ranks: Sequence[Sequence[int]], widths: Sequence[int], inputs: int
) -> LowRankSlots:
    """Slots with these `ranks` of each part, NaN in all numbers that no product may use."""
    most = 16 * -(-max(map(max, ranks)) // 16)
    bounds = np.cumsum([0, *widths])
    downs = torch.full((len(ranks), len(widths), most, inputs), torch.nan)
    ups = torch.full((len(ranks), int(bounds[-1]), most), torch.nan)
    for slot, of_parts in enumerate(ranks):
        for part, rank in enumerate(of_parts):
            own = slice(int(bounds[part]), int(bounds[part + 1]))
            downs[slot, part, :rank] = torch.randn(rank, inputs) / inputs**0.5
            ups[slot, own, :rank] = torch.randn(widths[part], rank) / max(1, rank) ** 0.5
    return LowRankSlots(
        downs.to(device, dtype),
        ups.to(device, dtype),
        torch.tensor(ranks, dtype=torch.int32, device=device),
        torch.tensor(bounds, dtype=torch.int32, device=device),
        max(widths),
    )


def rows_of(slots: Sequence[int], of: LowRankSlots, *, tile: int | None = None) -> AdaptedRows:
    """The rows of a product, of which each has the adapter in its slot, or none for -1."""
    most = tile or tile_rows(len(slots))
    sources, tiles = sorted_rows(np.array(slots), most=most)
    room = np.full((most_tiles(len(slots), len(of.downs), most), 3), -1, dtype=np.int32)
    room[: len(tiles)] = tiles
    padded = np.full(len(slots), 2**30, dtype=np.int32)
    padded[: len(sources)] = sources
    device = of.downs.device
    return AdaptedRows(torch.from_numpy(padded).to(device), torch.from_numpy(room).to(device), most)


@pytest.mark.parametrize(
    ("ranks", "widths", "inputs", "slots"),
    [
        ([[4]], [40], 24, [0]),
        # queries, keys and values; the second adapter has no keys, the third one changes nothing
        ([[4, 4, 4], [9, 0, 20], [0, 0, 0], [16, 16, 16]], [40, 24, 8], 80, [1, -1, 3, 0, 1, 2, -1, 1]),
        # more rows of one adapter than a tile has, more inputs than a split, and several tiles of columns
        ([[40, 33], [64, 1]], [150, 150], 600, [1] * 20 + [0, -1] * 5),
        # more ranks than a program computes
        ([[100], [5]], [33], 40, [0, 1, 0]),
    ],
)
def test_each_row_gets_the_change_of_its_own_adapter(
    device: torch.device,
    dtype: torch.dtype,
    close: Close,
    ranks: list[list[int]],
    widths: list[int],
    inputs: int,
    slots: list[int],
) -> None:
    of = some_slots(device, dtype, ranks, widths, inputs)
    hidden = torch.randn(len(slots), inputs + 5, device=device).to(dtype)[:, :inputs]
    wide = torch.randn(len(slots), sum(widths) + 7, device=device).to(dtype)
    before = wide.clone()
    outputs = wide[:, : sum(widths)]
    for tile in (16, 64):
        wide.copy_(before)
        rows = rows_of(slots, of, tile=tile)
        expected = add_low_rank_reference(outputs, hidden, of, rows)
        add_low_rank(outputs, hidden, of, rows)
        close(outputs, expected)
        # rows without an adapter, and what stands beside the outputs, keep their bits
        alone = [row for row, slot in enumerate(slots) if slot < 0 or not any(ranks[slot])]
        assert torch.equal(wide[alone], before[alone])
        assert torch.equal(wide[:, sum(widths) :], before[:, sum(widths) :])


def test_a_step_without_adapted_rows_changes_nothing(device: torch.device, dtype: torch.dtype) -> None:
    of = some_slots(device, dtype, [[4], [8]], [40], 24)
    outputs = torch.randn(5, 40, device=device).to(dtype)
    before = outputs.clone()
    add_low_rank(outputs, torch.randn(5, 24, device=device).to(dtype), of, rows_of([-1] * 5, of))
    assert torch.equal(outputs, before)


def test_a_row_has_the_same_bits_beside_any_others(device: torch.device, dtype: torch.dtype) -> None:
    of = some_slots(device, dtype, [[4], [8], [12]], [40], 24)
    hidden, outputs = (torch.randn(6, width, device=device).to(dtype) for width in (24, 40))
    results = []
    for slots in ([0, 1, 2, 1, 0, -1], [-1, 1, 1, 1, 2, 2]):
        changed = outputs.clone()
        add_low_rank(changed, hidden, of, rows_of(slots, of))
        results.append(changed)
    assert torch.equal(results[0][[1, 3]], results[1][[1, 3]])


def test_other_shapes_are_refused(device: torch.device) -> None:
    of = some_slots(device, torch.float32, [[4], [8]], [40], 24)
    rows, hidden, outputs = rows_of([0, 1], of), torch.ones(2, 24, device=device), torch.ones(2, 40, device=device)
    with pytest.raises(ValueError, match=r"hidden is \[2, 23\], not \[2, 24\]"):
        add_low_rank(outputs, hidden[:, :23], of, rows)
    with pytest.raises(ValueError, match=r"outputs is \[1, 40\], not \[2, 40\]"):
        add_low_rank(outputs[:1], hidden, of, rows)
    with pytest.raises(ValueError, match=r"sources is \[1\]"):
        add_low_rank(outputs, hidden, of, replace(rows, sources=rows.sources[:1]))
    with pytest.raises(ValueError, match="tiles have 32 rows"):
        add_low_rank(outputs, hidden, of, replace(rows, most=32))
    with pytest.raises(ValueError, match="types differ"):
        add_low_rank(outputs.half(), hidden, of, rows)
    with pytest.raises(ValueError, match="no multiple of 16"):
        add_low_rank(outputs, hidden, replace(of, downs=of.downs[:, :, :8], ups=of.ups[..., :8]), rows)
    with pytest.raises(ValueError, match="a slot is not in one piece"):
        add_low_rank(outputs, hidden[:, :23], replace(of, downs=of.downs[..., :23]), rows)

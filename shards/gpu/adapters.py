"""LoRA adapters in a GPU's memory: slots of one size, which captured graphs read at fixed addresses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shards.exec.batch import Row
from shards.gpu.mlp import AnyMatrix, GpuMixture, GpuMlp
from shards.gpu.weights import GpuWeights
from shards.kernels.low_rank import RANK_STEP, AdaptedRows, LowRankSlots, add_low_rank
from shards.lora.checkpoint import AdapterFormat
from shards.lora.options import AdapterOptions
from shards.lora.sites import Site, site_name
from shards.network.errors import UnsupportedCheckpoint

_ALIGNED, _ALIGNED_RANKS = 64, 4
"""Matrices and ranks begin at multiples of so many numbers: Triton compiles anew for pointers that are not aligned."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedAdapter:
    """An adapter in host memory, as a slot holds it: see `SlotLayout`. Page-locked if the slots are on a GPU."""

    name: str
    digest: str
    numbers: Tensor
    ranks: Tensor

    def __repr__(self) -> str:
        return f"PackedAdapter({self.name}: {self.numbers.nbytes} bytes)"


@dataclass(frozen=True, slots=True)
class _Place:
    """The two matrices of a site in a slot, and the first of its parts among all ranks."""

    site: Site
    downs: int
    ups: int
    part: int


class SlotLayout:
    """The places of all matrices in a slot: `numbers` numbers, and the ranks of `parts` parts.

    Each matrix of `sites` has room for `most_rank` ranks in every part, a multiple of 16.
    """

    def __init__(self, sites: Sequence[Site], most_rank: int) -> None:
        self.most_rank = _aligned(most_rank, RANK_STEP)
        self.numbers = self.parts = 0
        self.places: dict[str, _Place] = {}
        for site in sites:
            downs = self._take(len(site.parts) * self.most_rank * site.inputs)
            self.places[site.name] = _Place(site, downs, self._take(_width(site) * self.most_rank), self.parts)
            self.parts += _aligned(len(site.parts), _ALIGNED_RANKS)

    def __repr__(self) -> str:
        return f"SlotLayout({len(self.places)} matrices, ranks up to {self.most_rank}, {self.numbers} numbers)"

    def bytes_as(self, dtype: torch.dtype) -> int:
        """Memory of one slot."""
        return self.numbers * dtype.itemsize + self.parts * torch.int32.itemsize

    def matrices(self, numbers: Tensor, place: _Place) -> tuple[Tensor, Tensor]:
        """Of slots [slots, numbers], views of a site's downs [slots, parts, ranks, in] and ups [slots, out, ranks]."""
        site, most = place.site, self.most_rank
        downs = numbers[:, place.downs : place.downs + len(site.parts) * most * site.inputs]
        ups = numbers[:, place.ups : place.ups + _width(site) * most]
        slots = len(numbers)
        return downs.view(slots, len(site.parts), most, site.inputs), ups.view(slots, _width(site), most)

    def _take(self, numbers: int) -> int:
        start = self.numbers
        self.numbers += _aligned(numbers, _ALIGNED)
        return start


def _aligned(numbers: int, to: int) -> int:
    return -(-numbers // to) * to


def _width(site: Site) -> int:
    return site.parts[-1].stop


class PackedFormat:
    """Reads adapters with `form` and packs them for slots of this `layout`."""

    def __init__(self, form: AdapterFormat, layout: SlotLayout, dtype: torch.dtype, *, is_pinned: bool) -> None:
        self._form, self._layout, self._dtype, self._is_pinned = form, layout, dtype, is_pinned

    def __repr__(self) -> str:
        return f"PackedFormat({self._layout!r}, {self._dtype})"

    def size(self, folder: Path) -> int:
        """The bytes of a slot. Raises CheckpointError for the adapter in `folder` if it can be seen not to fit."""
        self._require(folder, self._form.rank(folder))
        return self._layout.bytes_as(self._dtype)

    def read(self, folder: Path, name: str) -> PackedAdapter:
        """The adapter in `folder`. Raises CheckpointError."""
        adapter = self._form.read(folder, name)
        numbers = torch.empty(self._layout.numbers, dtype=self._dtype, pin_memory=self._is_pinned).zero_()
        ranks = torch.empty(self._layout.parts, dtype=torch.int32, pin_memory=self._is_pinned).zero_()
        for site, change in adapter.changes.items():
            place = self._layout.places[site]
            (downs,), (ups,) = self._layout.matrices(numbers[None], place)
            parts = {part.start: index for index, part in enumerate(place.site.parts)}
            for start, stop, own, up in change.updates:
                part, rank = parts[start], up.shape[1]
                self._require(folder, rank)
                downs[part, :rank] = change.down[own]
                ups[start:stop, :rank] = up
                ranks[place.part + part] = rank
        return PackedAdapter(adapter.name, adapter.digest, numbers, ranks)

    def _require(self, folder: Path, rank: int) -> None:
        if rank > self._layout.most_rank:
            raise UnsupportedCheckpoint(
                f"{folder} has rank {rank}, and adapters on this GPU have at most {self._layout.most_rank}",
                hint=f"raise --max-lora-rank to {rank}",
            )


class AdapterMemory:
    """Memory on a device for `count` adapters, and which of them is where. The least recently used one makes room.

    A slot is overwritten behind all steps that were submitted before, on the current stream.
    """

    def __init__(self, layout: SlotLayout, count: int, *, dtype: torch.dtype, device: torch.device) -> None:
        self.layout, self.count = layout, count
        self._numbers = torch.zeros(count, layout.numbers, dtype=dtype, device=device)
        self._ranks = torch.zeros(count, layout.parts, dtype=torch.int32, device=device)
        self._matrices = {name: self._of_site(place) for name, place in layout.places.items()}
        # by the weights' digest, the least recently used first
        self._held: dict[str, int] = {}
        self._rows: AdaptedRows | None = None

    def __repr__(self) -> str:
        return f"AdapterMemory({len(self._held)} of {self.count} used, {self.nbytes} bytes)"

    @classmethod
    def within(
        cls, options: AdapterOptions, sites: Sequence[Site], *, dtype: torch.dtype, device: torch.device
    ) -> AdapterMemory:
        """As many slots as `options` permit. Raises ValueError if that is none, or if the device has no room."""
        layout = SlotLayout(sites, options.most_rank)
        each = layout.bytes_as(dtype)
        count = min(options.most, options.most_bytes // each)
        if not count:
            raise ValueError(
                f"an adapter with ranks up to {layout.most_rank} takes {each / 2**20:.0f} MiB, and all together have "
                f"{options.most_bytes / 2**20:.0f}; raise --lora-memory, or lower --max-lora-rank"
            )
        try:
            return cls(layout, count, dtype=dtype, device=device)
        except torch.OutOfMemoryError as error:
            size = f"{count * each / 2**30:.1f} GiB"
            raise ValueError(f"{size} for adapters are not free on the GPU; lower --max-loras: {error}") from error

    @property
    def nbytes(self) -> int:
        """Memory of all slots in bytes."""
        return self._numbers.nbytes + self._ranks.nbytes

    @property
    def names_of_matrices(self) -> frozenset[str]:
        """The sites that adapters may change."""
        return frozenset(self._matrices)

    def of_tokens(self, rows: Sequence[Row], tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """The slot of each of `tokens` tokens, -1 without an adapter. Adapters without a slot get one.

        Raises ValueError if the rows have more adapters than there are slots.
        """
        slots = np.full(tokens, -1)
        adapters = {row.adapter.digest: row.adapter for row in rows if row.adapter is not None}
        if len(adapters) > self.count:
            raise ValueError(f"a step has {len(adapters)} adapters, and there are slots for {self.count}")
        for digest in adapters.keys() & self._held.keys():
            self._held[digest] = self._held.pop(digest)
        for digest, adapter in adapters.items():
            if digest not in self._held:
                assert isinstance(adapter, PackedAdapter), "an adapter for a CPU"
                self._load(adapter)
        for row in rows:
            if row.adapter is not None:
                slots[row.start : row.start + row.tokens] = self._held[row.adapter.digest]
        return slots

    def computing(self, rows: AdaptedRows | None) -> None:
        """The products that follow have these rows; None: none of their rows has an adapter."""
        self._rows = rows

    def add(self, site: str, outputs: Tensor, hidden: Tensor) -> None:
        """Add the adapters' changes of the matrix `site` for `hidden` [rows, in] to `outputs` [rows, out], in place."""
        matrices = self._matrices.get(site)
        if self._rows is not None and matrices is not None:
            add_low_rank(outputs, hidden, matrices, self._rows)

    def _load(self, adapter: PackedAdapter) -> None:
        is_full = len(self._held) == self.count
        slot = self._held.pop(next(iter(self._held))) if is_full else len(self._held)
        self._numbers[slot].copy_(adapter.numbers, non_blocking=True)
        self._ranks[slot].copy_(adapter.ranks, non_blocking=True)
        self._held[adapter.digest] = slot

    def _of_site(self, place: _Place) -> LowRankSlots:
        parts, device = place.site.parts, self._numbers.device
        bounds = torch.tensor([*(part.start for part in parts), parts[-1].stop], dtype=torch.int32, device=device)
        ranks = self._ranks[:, place.part : place.part + len(parts)]
        widest = max(part.stop - part.start for part in parts)
        return LowRankSlots(*self.layout.matrices(self._numbers, place), ranks, bounds, widest)


@dataclass(frozen=True, slots=True)
class AdaptedMatrix:
    """The matrix `base`, changed at `site` for each row with an adapter in `slots`."""

    base: AnyMatrix
    site: str
    slots: AdapterMemory

    def __call__(self, hidden: Tensor) -> Tensor:
        """The product for [rows, in], plus each row's own change: [rows, out]."""
        outputs = self.base(hidden)
        self.slots.add(self.site, outputs, hidden)
        return outputs

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that a product without adapters reads."""
        return self.base.tensors()


def adapted(weights: GpuWeights, slots: AdapterMemory) -> GpuWeights:
    """`weights` with every matrix that adapters may change bound to `slots`; the decoder adapts the head."""

    def bound(matrix: AnyMatrix, layer: int, name: str) -> AnyMatrix:
        site = site_name(layer, name)
        return AdaptedMatrix(matrix, site, slots) if site in slots.names_of_matrices else matrix

    def bound_mlp(mlp: GpuMlp, layer: int, prefix: str) -> GpuMlp:
        gate_up, down = bound(mlp.gate_up, layer, f"{prefix}gate_up"), bound(mlp.down, layer, f"{prefix}down")
        return replace(mlp, gate_up=gate_up, down=down)

    def bound_any(mlp: GpuMlp | GpuMixture, layer: int) -> GpuMlp | GpuMixture:
        if isinstance(mlp, GpuMlp):
            return bound_mlp(mlp, layer, "")
        return mlp if mlp.shared is None else replace(mlp, shared=bound_mlp(mlp.shared, layer, "shared_"))

    layers = tuple(
        replace(
            layer,
            query_key_value=bound(layer.query_key_value, index, "query_key_value"),
            output=bound(layer.output, index, "output"),
            mlp=bound_any(layer.mlp, index),
        )
        for index, layer in enumerate(weights.layers)
    )
    return replace(weights, layers=layers)

"""Reads the adapters that PEFT saves: adapter_config.json and adapter_model.safetensors.

Source: PEFT's documentation of its checkpoint format, and LoRA (arXiv 2106.09685), rsLoRA (arXiv 2312.03732).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shards.lora.adapter import Adapter, LowRank, Update
from shards.lora.sites import Part, Site
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint
from shards.weight_files import WeightFiles

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_COPIED = ".base_layer.weight"
"""PEFT saves the model's own head beside an adapter of it."""

_STORED = {"F32": 4, "F16": 2, "BF16": 2}
_MOST_HEADER_BYTES = 64 << 20
_DIGEST_DIGITS = 32

_REFUSED = (
    "use_dora",
    "modules_to_save",
    "fan_in_fan_out",
    "lora_bias",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
"""Fields of LoraConfig that change what an adapter computes."""


class _Config(msgspec.Struct, kw_only=True):
    """The fields of adapter_config.json that scale an adapter."""

    peft_type: str
    r: int
    lora_alpha: float
    use_rslora: bool = False
    bias: str = "none"
    alpha_pattern: dict[str, float] = {}

    def scale(self, module: str, rank: int) -> float:
        """The factor of the module's change. A pattern names the end of a module's path, as a regular expression."""
        matches = (alpha for pattern, alpha in self.alpha_pattern.items() if re.match(rf"(.*\.)?({pattern})$", module))
        alpha = next(matches, self.lora_alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


class AdapterFormat:
    """Reads adapters of a network with these `sites`, as `dtype`; `prefixes` rename tensors as those of its family."""

    def __init__(self, sites: Sequence[Site], dtype: torch.dtype, prefixes: Sequence[tuple[str, str]] = ()) -> None:
        self._sites, self._dtype, self._prefixes = sites, dtype, prefixes

    def __repr__(self) -> str:
        return f"AdapterFormat({len(self._sites)} matrices, {self._dtype})"

    def size(self, folder: Path) -> int:
        """The bytes that the adapter in `folder` takes in memory, by the header of its file. Raises CheckpointError."""
        header = _header(folder / TENSORS)
        numbers = (
            math.prod(map(int, tensor["shape"])) for name, tensor in header.items() if not name.endswith(_COPIED)
        )
        return sum(numbers) * self._dtype.itemsize

    def rank(self, folder: Path) -> int:
        """The largest rank of the adapter in `folder`, by the header of its file. Raises CheckpointError."""
        header = _header(folder / TENSORS)
        return max((int(tensor["shape"][0]) for name, tensor in header.items() if name.endswith(_DOWN)), default=0)

    def read(self, folder: Path, name: str) -> Adapter:
        """The adapter in `folder`. Raises CheckpointError with the name of the field or tensor."""
        with closing(WeightFiles([folder / CONFIG, folder / TENSORS])) as files:
            config = _config(folder / CONFIG)
            digest = files.digest()[:_DIGEST_DIGITS]
            changes = self._changes(folder, config)
            # its KV is that of the digest, so the tensors must be too
            files.require_same()
        if not changes:
            raise BrokenCheckpoint(f"{folder / TENSORS} has no tensors of an adapter")
        return Adapter(name, digest, changes)

    def _changes(self, folder: Path, config: _Config) -> dict[str, LowRank]:
        """What the adapter in `folder` changes, by site."""
        with _opened(folder / TENSORS) as file:
            stored = (name for name in file.keys() if not name.endswith(_COPIED))  # noqa: SIM118 - no mapping
            left = {self._module(name): name for name in stored}
            changes: dict[str, LowRank] = {}
            for site in self._sites:
                pairs = [(part, self._pair(file, left, site, part, config)) for part in site.parts]
                if any(pair is not None for _, pair in pairs):
                    changes[site.name] = _joined(pairs)
            if left:
                raise _misplaced(sorted(left), folder)
        return changes

    def _module(self, stored: str) -> str:
        """The name of a tensor, as the network's own files have it."""
        name = stored.removeprefix(_PREFIX)
        for prefix, replacement in self._prefixes:
            if name.startswith(prefix):
                return replacement + name.removeprefix(prefix)
        return name

    def _pair(
        self, file: Any, left: dict[str, str], site: Site, part: Part, config: _Config
    ) -> tuple[Tensor, Tensor] | None:
        """The two matrices of a module, the second one scaled; None if the adapter does not change it."""
        stored = left.pop(part.module + _DOWN, None), left.pop(part.module + _UP, None)
        if stored == (None, None):
            return None
        if None in stored:
            raise BrokenCheckpoint(f"the adapter has one matrix of {part.module} instead of two")
        down, up = (_taken(file, str(name)) for name in stored)
        rank, rows = len(down), part.stop - part.start
        for tensor, shape, name in ((down, (rank, site.inputs), stored[0]), (up, (rows, rank), stored[1])):
            if tensor.shape != shape:
                raise BrokenCheckpoint(
                    f"tensor {name} has shape {tuple(tensor.shape)}, and this model needs {shape}",
                    hint="was the adapter trained on another model?",
                )
        up = up.float() * config.scale(part.module, rank)
        return down.to(self._dtype), _turned(up, part, site).to(self._dtype)


def _joined(pairs: Sequence[tuple[Part, tuple[Tensor, Tensor] | None]]) -> LowRank:
    """The change of a matrix from those of its parts."""
    downs: list[Tensor] = []
    updates: list[Update] = []
    at = 0
    for part, pair in pairs:
        if pair is not None:
            down, up = pair
            downs.append(down)
            updates.append(Update(part.start, part.stop, slice(at, at + len(down)), up.contiguous()))
            at += len(down)
    return LowRank(torch.cat(downs).contiguous(), tuple(updates))


def _turned(rows: Tensor, part: Part, site: Site) -> Tensor:
    """`rows` with the heads that rope turns in the network's own order."""
    if site.order is None or not part.turned:
        return rows
    heads = rows[: part.turned].view(-1, site.head_dim, rows.shape[1])
    return torch.cat((heads[:, list(site.order)].reshape(part.turned, -1), rows[part.turned :]))


def _config(path: Path) -> _Config:
    try:
        fields = json.loads(path.read_bytes())
        config = msgspec.convert(fields, _Config)
    except (OSError, ValueError, RecursionError) as error:
        # msgspec's ValidationError is a ValueError
        raise BrokenCheckpoint(f"{path} is not the configuration of an adapter: {error}") from error
    if config.peft_type != "LORA":
        raise UnsupportedCheckpoint(f"{path}: peft_type is {config.peft_type}", hint="only LORA is served")
    if config.bias != "none":
        raise UnsupportedCheckpoint(f"{path}: bias is {config.bias}", hint="train the adapter with bias none")
    for field in _REFUSED:
        if fields.get(field):
            raise UnsupportedCheckpoint(
                f"{path}: {field} is {fields[field]!r}", hint="merge the adapter into the model, and serve that"
            )
    return config


def _header(path: Path) -> Mapping[str, Any]:
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MOST_HEADER_BYTES:
                raise ValueError(f"its header has {length} bytes")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        for name, tensor in header.items():
            if tensor["dtype"] not in _STORED:
                raise UnsupportedCheckpoint(f"tensor {name} of {path} is stored as {tensor['dtype']}")
    except FileNotFoundError as error:
        raise BrokenCheckpoint(f"{path} is missing", hint="save the adapter as safetensors") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, UnsupportedCheckpoint):
            raise
        raise BrokenCheckpoint(f"{path} cannot be read: {error}", hint="is the download complete?") from error
    return header  # type: ignore[no-any-return]


def _opened(path: Path) -> Any:
    _header(path)
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise BrokenCheckpoint(f"{path} cannot be read: {error}", hint="is the download complete?") from error


def _taken(file: Any, stored: str) -> Tensor:
    tensor: Tensor = file.get_tensor(stored)
    if tensor.dim() != 2:
        raise BrokenCheckpoint(f"tensor {stored} has shape {tuple(tensor.shape)}; a matrix is needed")
    return tensor


def _misplaced(left: Sequence[str], folder: Path) -> UnsupportedCheckpoint:
    more = f" and {len(left) - 1} more" if len(left) > 1 else ""
    return UnsupportedCheckpoint(
        f"{folder}: tensor {left[0]}{more} changes what no adapter can change here",
        hint="adapters change projections of attention, MLPs and an untied head, not embeddings or experts",
    )

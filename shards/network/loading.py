"""Weights of a network: from the safetensors files of a Hugging Face checkpoint, or random."""

from __future__ import annotations

import json
import math
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shards.gguf.folder import WEIGHTS
from shards.gguf.tensors import GgufTensors
from shards.network.config import NetworkConfig
from shards.network.config_file import quantisation_of, read_config
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint
from shards.network.families.table import family_of
from shards.network.family import Family
from shards.network.layers import Weights
from shards.network.tensors import Builder, Form
from shards.quant.formats.base import WeightFormat
from shards.quant.formats.table import format_of
from shards.quant.linear import cpu_linear, int8_linear, stored_linear
from shards.quant.matrix import StoredMatrix

DtypeChoice = Literal["auto", "float32", "bfloat16", "float16", "int8"]
OnProgress = Callable[[int, int], None]

_FEWER_BITS = ("F8_E4M3", "I8", "I32")

_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_MEMORY_LIMIT, _MOST_SHARE = Path("/sys/fs/cgroup/memory.max"), 0.6
_EMBEDDING = "model.embed_tokens.weight"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


def load_weights(
    folder: Path,
    config: NetworkConfig,
    *,
    dtype: DtypeChoice = "auto",
    is_for_gpu: bool = False,
    is_packed: bool = False,
    on_progress: OnProgress | None = None,
    builder_of: Callable[[Builder], Builder] = lambda builder: builder,
) -> Weights:
    """The weights of the checkpoint in `folder`.

    `auto` is the checkpoint's own dtype, except float32 for float16, which CPUs compute slowly. `int8` quantises all
    matrices as they are read, including the head; the embedding stays as with `auto`, activations are float32.
    Matrices of a quantised checkpoint stay as they are stored if they are for a GPU, and become what a CPU multiplies
    fastest otherwise (`cpu_linear`); float16 becomes bfloat16 there, in which torch multiplies four bits.
    If `is_packed`, large matrices in bfloat16 or int8 are kept packed and plain, for a CPU with room (`has_room`).
    `on_progress` gets the bytes of the files read so far and the total. `builder_of` may replace the builder by one of
    a part. Raises BrokenCheckpoint or UnsupportedCheckpoint with the tensor's name.
    """
    with ExitStack() as stack:
        family = family_of(config.architecture)
        if (folder / WEIGHTS).exists():
            tensors = GgufTensors(folder, config, on_progress)
            tensors.dtype = _dtype_of(dtype, tensors.stored_dtype, is_quantised=False)
            form = _form_of(dtype, tensors.dtype, is_for_gpu=is_for_gpu, is_packed=is_packed)
            weights = builder_of(Builder(config, family, tensors, form)).weights()
            tensors.refuse_leftovers()
            return weights
        files = _Files(safetensors_of(folder), stack, on_progress, family, _format_in(folder, family))
        files.dtype = _dtype_of(dtype, files.stored_dtype(_EMBEDDING), is_quantised=files.format is not None)
        form = _form_of(dtype, files.dtype, is_for_gpu=is_for_gpu, is_packed=is_packed)
        weights = builder_of(Builder(config, family, files, form)).weights()
        files.refuse_leftovers(config)
        return weights


def gpu_dtype(folder: Path, choice: str) -> str:
    """The type of `choice` on a GPU: with `auto` the checkpoint's own, except bfloat16 for float32, which is slow.

    Raises BrokenCheckpoint or UnsupportedCheckpoint.
    """
    if choice != "auto":
        return choice
    if (folder / WEIGHTS).exists():
        stored = GgufTensors(folder, read_config(folder)).stored_dtype
        return "float16" if stored == torch.float16 else "bfloat16"
    with ExitStack() as stack:
        files = _Files(safetensors_of(folder), stack, None, family_of(read_config(folder).architecture), None)
        return "float16" if files.stored_dtype(_EMBEDDING) == torch.float16 else "bfloat16"


def has_room(folder: Path, *, memory_bytes: int | None = None) -> bool:
    """Whether twice the size of the files in `folder` is at most 60 % of this machine's, or its container's, memory.

    Raises BrokenCheckpoint.
    """
    if memory_bytes is None:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        with suppress(OSError, ValueError):
            # there is no cgroup, or its limit is "max"
            memory_bytes = min(memory_bytes, int(_MEMORY_LIMIT.read_text()))
    try:
        sizes = [path.stat().st_size for path in safetensors_of(folder)]
    except OSError as error:
        raise BrokenCheckpoint(f"{error.filename} cannot be read: {error}", hint="is the download complete?") from error
    return 2 * sum(sizes) <= _MOST_SHARE * memory_bytes


def random_weights(
    config: NetworkConfig, seed: int, *, dtype: torch.dtype = torch.float32, is_int8: bool = False
) -> Weights:
    """Weights drawn with `seed`, scaled so that activations stay near 1; for tests and benchmarks of speed.

    `is_int8` quantises the same weights as `load_weights` does.
    """
    source = _Random(torch.Generator().manual_seed(seed), dtype)
    form = _form_of("int8" if is_int8 else "auto", dtype, is_for_gpu=False)
    return Builder(config, family_of(config.architecture), source, form).weights()


def _form_of(choice: DtypeChoice, activations: torch.dtype, *, is_for_gpu: bool, is_packed: bool = False) -> Form:
    if choice == "int8":
        return Form(partial(int8_linear, dtype=activations, keeps_plain=is_packed), is_wide=True)
    if is_packed:
        from shards.network.packed import packed_linear

        return Form(partial(packed_linear, dtype=activations))
    return Form(partial(stored_linear if is_for_gpu else cpu_linear, dtype=activations))


def _format_in(folder: Path, family: Family) -> WeightFormat | None:
    given = quantisation_of(folder, family)
    return None if given is None or given.get("quant_method") in family.quantised else format_of(given)


class _Random:
    def __init__(self, generator: torch.Generator, dtype: torch.dtype) -> None:
        self._generator, self.dtype = generator, dtype

    def has(self, name: str) -> bool:
        return not name.endswith("_blocks")

    def leave(self, prefix: str) -> None:
        """Nothing is left of what is drawn when it is taken."""

    def take_bytes(self, name: str, *shape: int, own: range | None = None) -> Tensor:  # noqa: ARG002 - any name
        return torch.randint(0, 255, shape, generator=self._generator, dtype=torch.uint8)[_part(own)]

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, own: range | None = None) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=dtype or self.dtype)[_part(own)]
        scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.1
        return (torch.randn(shape, generator=self._generator) * scale).to(dtype or self.dtype)[_part(own)]

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        return self.take(f"{name}.weight", outputs, inputs)


class _Files:
    """The tensors of some safetensors files, each taken once, by the names that `family` gives them."""

    def __init__(
        self,
        paths: Iterable[Path],
        stack: ExitStack,
        on_progress: OnProgress | None,
        family: Family,
        stored_format: WeightFormat | None,
    ) -> None:
        self.dtype, self.format = torch.float32, stored_format
        self._family = family
        self._stored_names: dict[str, str] = {}
        self._on_progress = on_progress
        self._holders: dict[str, Any] = {}
        self._total_bytes = self._done_bytes = 0
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                self._total_bytes += path.stat().st_size
            except (OSError, SafetensorError) as error:
                raise BrokenCheckpoint(f"{path} cannot be read: {error}", hint="is the download complete?") from error
            for stored in file.keys():  # noqa: SIM118 - a safetensors file is no mapping
                name = family.renamed(stored)
                self._holders[name], self._stored_names[name] = file, stored
        self._left, self._names = set(self._holders), sorted(self._holders)

    def has(self, name: str) -> bool:
        return name in self._holders

    def leave(self, prefix: str) -> None:
        for name in islice(self._names, bisect_left(self._names, prefix), None):
            if not name.startswith(prefix):
                return
            self._left.discard(name)
            self._done_bytes += self._stored_bytes(name)

    def take_bytes(self, name: str, *shape: int, own: range | None = None) -> Tensor:
        return self.take_stored(name, *shape, kinds=("U8",), own=own)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def take_stored(self, name: str, *shape: int, kinds: tuple[str, ...], own: range | None = None) -> Tensor:
        stored = self._slice(name).get_dtype()
        if stored not in kinds:
            raise UnsupportedCheckpoint(
                f"tensor {name} is stored as {stored}, not {' or '.join(kinds)}", hint="use the checkpoint as published"
            )
        return self._taken(name, shape, own)

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        if self.format is not None and self.format.holds(name, self):
            return self.format.take(name, outputs, inputs, self)
        return self.take(f"{name}.weight", outputs, inputs)

    def stored_dtype(self, name: str) -> torch.dtype:
        stored = self._slice(name).get_dtype()
        if stored not in _STORED:
            known = " and config.json does not say how it is quantised" if stored in _FEWER_BITS else ""
            raise UnsupportedCheckpoint(
                f"tensor {name} is stored as {stored}{known}", hint="use the checkpoint as published"
            )
        return _STORED[stored]

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, own: range | None = None) -> Tensor:
        matrix = name.removesuffix(".weight")
        if self.format is not None and matrix != name and self.format.holds(matrix, self):
            outputs, inputs = shape
            return self.format.take(matrix, outputs, inputs, self).dequantised(dtype or self.dtype)[_part(own)]
        self.stored_dtype(name)
        return self._taken(name, shape, own).to(dtype or self.dtype)

    def _taken(self, name: str, shape: tuple[int, ...], own: range | None) -> Tensor:
        found = tuple(self._slice(name).get_shape())
        if found != shape:
            raise BrokenCheckpoint(f"tensor {name} has shape {found}, config.json says {shape}")
        stored = self._stored_names[name]
        # a scalar has no slices
        tensor: Tensor = self._holder(name).get_tensor(stored) if own is None else self._slice(name)[_part(own)]
        self._left.remove(name)
        self._done_bytes += self._stored_bytes(name)
        self._report(self._done_bytes)
        return tensor

    def refuse_leftovers(self, config: NetworkConfig) -> None:
        # old checkpoints contain rope's frequencies, and some a copy of a head that config.json declares tied
        known = {"lm_head.weight"} if config.tied_head else set()
        left = sorted(name for name in self._left - known if not self._is_ignored(name, config))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise BrokenCheckpoint(
                f"tensor {left[0]}{more} has no place in this network", hint="is config.json its own?"
            )
        self._report(self._total_bytes)

    def _report(self, done_bytes: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done_bytes, self._total_bytes)

    def _is_ignored(self, name: str, config: NetworkConfig) -> bool:
        # layers behind the last one guess further tokens (multi-token prediction)
        layer = name.removeprefix("model.layers.").partition(".")[0]
        is_behind = name.startswith("model.layers.") and layer.isdigit() and int(layer) >= config.layers
        is_ignored = self.format is not None and self.format.ignores(name)
        return is_behind or is_ignored or name.endswith("rotary_emb.inv_freq") or name.startswith(self._family.ignored)

    def _stored_bytes(self, name: str) -> int:
        stored = self._slice(name)
        # each name of a type has its bits, such as BF16
        bits = int("0" + "".join(filter(str.isdigit, stored.get_dtype().partition("_")[0])))
        numbers: int = math.prod(stored.get_shape())
        return numbers * bits // 8

    def _slice(self, name: str) -> Any:
        return self._holder(name).get_slice(self._stored_names[name])

    def _holder(self, name: str) -> Any:
        try:
            return self._holders[name]
        except KeyError:
            raise BrokenCheckpoint(
                f"tensor {name} is missing", hint="is config.json its own, and all files here?"
            ) from None


def _part(own: range | None) -> slice:
    return slice(None) if own is None else slice(own.start, own.stop)


def safetensors_of(folder: Path) -> list[Path]:
    """The files with the tensors of the checkpoint in `folder`, one in GGUF or others. Raises BrokenCheckpoint."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / _INDEX
    if not index.exists():
        if (folder / _SINGLE).exists():
            return [folder / _SINGLE]
        raise BrokenCheckpoint(f"{folder} holds neither {_SINGLE} nor {_INDEX}", hint="other formats are not read")
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BrokenCheckpoint(f"{index} is not an index of safetensors files") from error


def _dtype_of(choice: DtypeChoice, stored: torch.dtype, *, is_quantised: bool) -> torch.dtype:
    if choice in ("auto", "int8"):
        wide = torch.bfloat16 if is_quantised and choice == "auto" else torch.float32
        return wide if stored == torch.float16 else stored
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[choice]

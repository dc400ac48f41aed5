"""The tensors of a GGUF file, by the names that transformers uses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from shards.gguf.folder import INDEX, WEIGHTS
from shards.network.config import NetworkConfig
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint
from shards.quant.matrix import QuantisedMatrix, StoredMatrix, pack_four_bits

_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_GROUP, _ROWS = 32, 2048
_SCALE_BYTES = 2
"""A scale in float16 stands before each group of Q4_0 and Q8_0."""

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class _Stored(NamedTuple):
    kind: str
    shape: tuple[int, ...]
    place: int
    size: int


class _Index(msgspec.Struct):
    architecture: str
    tensors: dict[str, _Stored]


class GgufTensors:
    """The tensors of the GGUF file in `folder`, each taken once. Q4_0 and Q8_0 stay as they are, other forms are
    dequantised. `on_progress` gets the bytes taken so far and the total.
    """

    def __init__(
        self, folder: Path, config: NetworkConfig, on_progress: Callable[[int, int], None] | None = None
    ) -> None:
        self.dtype = torch.float32
        self._config, self._on_progress, self._done = config, on_progress, 0
        try:
            index = msgspec.json.decode((folder / INDEX).read_bytes(), type=_Index)
            self._bytes = np.memmap(folder / WEIGHTS, mode="r")
        except (OSError, ValueError, msgspec.MsgspecError) as error:
            raise BrokenCheckpoint(f"{folder / WEIGHTS} cannot be read: {error}", hint="was it moved?") from error
        self._stored, self._architecture = index.tensors, index.architecture
        self._left = set(self._stored) - {"rope_freqs.weight"}
        self._total = sum(each.size for each in self._stored.values())

    def __repr__(self) -> str:
        return f"<GgufTensors, {len(self._left)} of {len(self._stored)} left>"

    @property
    def stored_dtype(self) -> torch.dtype:
        """The type to compute in: that of the embedding, bfloat16 if it is quantised."""
        return _FLOATS.get(self._found("model.embed_tokens.weight").kind, torch.bfloat16)

    def has(self, name: str) -> bool:
        return self._name(name) in self._stored

    def leave(self, prefix: str) -> None:
        """Families with experts are not read from GGUF."""
        raise UnsupportedCheckpoint(f"{prefix} has no form in GGUF", hint="serve it from safetensors")

    def take_bytes(self, name: str, *shape: int, own: range | None = None) -> Tensor:  # noqa: ARG002 - any tensor
        """No family that is read from GGUF has packed bytes."""
        raise UnsupportedCheckpoint(f"tensor {name} has no form in GGUF", hint="serve it from safetensors")

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None, own: range | None = None) -> Tensor:
        tensor = self._whole(name, shape, dtype or self.dtype)
        return tensor if own is None else tensor[own.start : own.stop]

    def matrix(self, name: str, outputs: int, inputs: int) -> StoredMatrix:
        name = f"{name}.weight"
        found = self._found(name)
        if found.kind not in ("Q4_0", "Q8_0"):
            return self.take(name, outputs, inputs)
        self._check(name, found, (outputs, inputs))
        blocks = torch.from_numpy(np.array(self._data(found))).view(outputs, inputs // _GROUP, -1)
        scales = blocks[..., :_SCALE_BYTES].contiguous().view(torch.float16)[..., 0].float()
        numbers = blocks[..., _SCALE_BYTES:]
        if found.kind == "Q8_0":
            stored = numbers.contiguous().view(torch.int8).view(outputs, inputs)
        else:
            # the low four bits of a group's bytes are its first half
            stored = pack_four_bits(torch.cat((numbers & 15, numbers >> 4), -1).view(outputs, inputs))
        self._note(name, found)
        rows, matrix = self._rows(name), QuantisedMatrix(stored, scales, _GROUP)
        return matrix if rows is None else matrix.rows(rows)

    def refuse_leftovers(self) -> None:
        """Raise BrokenCheckpoint if a tensor was not taken."""
        if left := sorted(self._left):
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise BrokenCheckpoint(f"tensor {left[0]}{more} has no place in this network")

    def _whole(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = self._found(name)
        self._check(name, found, shape)
        data, tensor = self._data(found), torch.empty(shape, dtype=dtype)
        if len(shape) == 1:
            tensor[:] = self._wide(name, found.kind, data)
        else:
            # some rows at a time, so that little is in memory as float32
            for start in range(0, len(data), _ROWS):
                tensor[start : start + _ROWS] = self._wide(name, found.kind, data[start : start + _ROWS])
        self._note(name, found)
        order = self._rows(name)
        return tensor if order is None else tensor[order]

    def _wide(self, name: str, kind: str, data: np.ndarray[Any, Any]) -> Tensor:
        """The numbers of `data`, bytes [rows, bytes] or [bytes]."""
        import gguf

        if kind in _FLOATS:
            return torch.from_numpy(np.array(data)).view(_FLOATS[kind])
        try:
            return torch.from_numpy(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))
        except (NotImplementedError, KeyError) as error:
            hint = "choose a file in Q4_0 to Q8_0, K-quants, F16 or BF16"
            raise UnsupportedCheckpoint(f"tensor {name} is stored as {kind}", hint=hint) from error

    def _data(self, found: _Stored) -> np.ndarray[Any, Any]:
        flat = self._bytes[found.place : found.place + found.size]
        return flat if len(found.shape) == 1 else flat.reshape(found.shape[0], -1)

    def _rows(self, name: str) -> Tensor | None:
        """The order of the rows of queries and keys: llama.cpp's pairs stand side by side, ours half a head apart."""
        if self._architecture != "llama" or not name.endswith(
            ("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")
        ):
            return None
        heads = self._config.heads if ".q_proj." in name else self._config.kv_heads
        numbers = torch.arange(heads * self._config.head_dim).view(heads, self._config.head_dim // 2, 2)
        return numbers.transpose(1, 2).flatten()

    def _name(self, name: str) -> str:
        stem, _, end = name.rpartition(".")
        if stem in _WHOLE:
            return f"{_WHOLE[stem]}.{end}"
        _, _, layer, *part = [*stem.split(".", 3), ""]
        return f"blk.{layer}.{_LAYER.get(part[0], '?')}.{end}"

    def _found(self, name: str) -> _Stored:
        found = self._stored.get(self._name(name))
        if found is None:
            raise BrokenCheckpoint(f"tensor {self._name(name)} ({name}) is missing", hint="is the download complete?")
        return found

    def _check(self, name: str, found: _Stored, shape: tuple[int, ...]) -> None:
        if found.shape != shape:
            raise BrokenCheckpoint(f"tensor {name} has shape {found.shape}, the header says {shape}")
        if found.place + found.size > len(self._bytes):
            raise BrokenCheckpoint(f"tensor {name} goes beyond the end of the file", hint="is the download complete?")

    def _note(self, name: str, found: _Stored) -> None:
        self._left.discard(self._name(name))
        self._done += found.size
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)

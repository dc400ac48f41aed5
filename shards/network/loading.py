"""Weights of a network: from the safetensors files of a Hugging Face checkpoint, or random."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shards.network.config import NetworkConfig
from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint
from shards.network.layers import DenseLinear, LayerWeights, Linear, Weights
from shards.quant.int8 import Int8Linear

DtypeChoice = Literal["auto", "float32", "bfloat16", "int8"]
OnProgress = Callable[[int, int], None]
MakeLinear = Callable[[Iterable[Tensor], Tensor | None], Linear]
"""Makes one matrix from parts, stacked by rows, and a bias."""

_STORED = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class _Source(Protocol):
    """A source of tensors, by the names that transformers uses."""

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor called `name`, of this shape."""
        ...


def load_weights(
    folder: Path, config: NetworkConfig, *, dtype: DtypeChoice = "auto", on_progress: OnProgress | None = None
) -> Weights:
    """The weights of the checkpoint in `folder`.

    `auto` is the checkpoint's own dtype, except float32 for float16, which CPUs compute slowly. `int8` quantises all
    matrices as they are read, including the head; the embedding stays as with `auto`, activations are float32.
    `on_progress` gets the bytes of the files read so far and the total. Raises BrokenCheckpoint or
    UnsupportedCheckpoint with the tensor's name.
    """
    with ExitStack() as stack:
        files = _Files(_safetensors_of(folder), stack, on_progress)
        files.dtype = _dtype_of(dtype, files.stored_dtype("model.embed_tokens.weight"))
        weights = _weights(config, files, _form_of(dtype))
        files.refuse_leftovers(config)
        return weights


def random_weights(
    config: NetworkConfig, seed: int, *, dtype: torch.dtype = torch.float32, is_int8: bool = False
) -> Weights:
    """Weights drawn with `seed`, scaled so that activations stay near 1; for tests and benchmarks of speed.

    `is_int8` quantises the same weights as `load_weights` does.
    """
    source = _Random(torch.Generator().manual_seed(seed), dtype)
    return _weights(config, source, _form_of("int8" if is_int8 else "auto"))


class _Form(NamedTuple):
    """The storage of weights: `linear` makes a matrix from its parts, and `norm` converts the norms."""

    linear: MakeLinear
    norm: Callable[[Tensor], Tensor]


def _form_of(choice: DtypeChoice) -> _Form:
    return _Form(Int8Linear.quantise, Tensor.float) if choice == "int8" else _Form(DenseLinear.of, lambda norm: norm)


def _weights(config: NetworkConfig, source: _Source, form: _Form) -> Weights:
    vocabulary = (config.vocab_size, config.hidden_size)
    embedding = source.take("model.embed_tokens.weight", *vocabulary)
    return Weights(
        embedding=embedding,
        layers=tuple(_layer(config, source, f"model.layers.{index}.", form) for index in range(config.layers)),
        norm=form.norm(source.take("model.norm.weight", config.hidden_size)),
        head=form.linear([embedding if config.tied_head else source.take("lm_head.weight", *vocabulary)], None),
    )


def _layer(config: NetworkConfig, source: _Source, layer: str, form: _Form) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key_value = config.heads * config.head_dim, config.kv_heads * config.head_dim
    attention, mlp = layer + "self_attn.", layer + "mlp."

    def linear(inputs: int, has_bias: bool, *names_outputs: tuple[str, int]) -> Linear:
        parts = (source.take(f"{name}_proj.weight", outputs, inputs) for name, outputs in names_outputs)
        biases = [source.take(f"{name}_proj.bias", outputs) for name, outputs in names_outputs if has_bias]
        return form.linear(parts, torch.cat(biases) if has_bias else None)

    def norm(name: str) -> Tensor:
        return form.norm(source.take(f"{layer}{name}_layernorm.weight", hidden))

    triple = ((attention + "q", query), (attention + "k", key_value), (attention + "v", key_value))
    return LayerWeights(
        attention_norm=norm("input"),
        query_key_value=linear(hidden, config.qkv_bias, *triple),
        query_key_norm=form.norm(_query_key_norm(config, source, attention)) if config.query_key_norm else None,
        output=linear(query, config.output_bias, (attention + "o", hidden)),
        mlp_norm=norm("post_attention"),
        gate_up=linear(hidden, config.mlp_bias, (mlp + "gate", inner), (mlp + "up", inner)),
        down=linear(inner, config.mlp_bias, (mlp + "down", hidden)),
    )


def _query_key_norm(config: NetworkConfig, source: _Source, attention: str) -> Tensor:
    query = source.take(attention + "q_norm.weight", config.head_dim).expand(config.heads, -1)
    key = source.take(attention + "k_norm.weight", config.head_dim).expand(config.kv_heads, -1)
    return torch.cat((query, key))


class _Random:
    def __init__(self, generator: torch.Generator, dtype: torch.dtype) -> None:
        self._generator, self._dtype = generator, dtype

    def take(self, name: str, *shape: int) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype)
        scale = shape[-1] ** -0.5 if len(shape) == 2 else 0.1
        return (torch.randn(shape, generator=self._generator) * scale).to(self._dtype)


class _Files:
    """The tensors of some safetensors files, each taken once."""

    def __init__(self, paths: Iterable[Path], stack: ExitStack, on_progress: OnProgress | None) -> None:
        self.dtype = torch.float32
        self._on_progress = on_progress
        self._holders: dict[str, Any] = {}
        self._total_bytes = self._done_bytes = 0
        for path in paths:
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
                self._total_bytes += path.stat().st_size
            except (OSError, SafetensorError) as error:
                raise BrokenCheckpoint(f"{path} cannot be read: {error}", hint="is the download complete?") from error
            self._holders |= dict.fromkeys(file.keys(), file)
        self._left = set(self._holders)

    def stored_dtype(self, name: str) -> torch.dtype:
        stored = self._holder(name).get_slice(name).get_dtype()
        if stored not in _STORED:
            raise UnsupportedCheckpoint(
                f"tensor {name} is stored as {stored}", hint="use the float32, float16 or bfloat16 checkpoint"
            )
        return _STORED[stored]

    def take(self, name: str, *shape: int) -> Tensor:
        found = tuple(self._holder(name).get_slice(name).get_shape())
        if found != shape:
            raise BrokenCheckpoint(f"tensor {name} has shape {found}, config.json says {shape}")
        self.stored_dtype(name)
        tensor: Tensor = self._holder(name).get_tensor(name)
        self._left.remove(name)
        self._done_bytes += tensor.nbytes
        self._report(self._done_bytes)
        return tensor.to(self.dtype)

    def refuse_leftovers(self, config: NetworkConfig) -> None:
        # old checkpoints contain rope's frequencies, and some a copy of a head that config.json declares tied
        known = {"lm_head.weight"} if config.tied_head else set()
        left = sorted(name for name in self._left - known if not name.endswith("rotary_emb.inv_freq"))
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise BrokenCheckpoint(
                f"tensor {left[0]}{more} has no place in this network", hint="is config.json its own?"
            )
        self._report(self._total_bytes)

    def _report(self, done_bytes: int) -> None:
        if self._on_progress is not None:
            self._on_progress(done_bytes, self._total_bytes)

    def _holder(self, name: str) -> Any:
        try:
            return self._holders[name]
        except KeyError:
            raise BrokenCheckpoint(
                f"tensor {name} is missing", hint="is config.json its own, and all files here?"
            ) from None


def _safetensors_of(folder: Path) -> list[Path]:
    index = folder / _INDEX
    if not index.exists():
        if (folder / _SINGLE).exists():
            return [folder / _SINGLE]
        raise BrokenCheckpoint(f"{folder} holds neither {_SINGLE} nor {_INDEX}", hint="other formats are not read")
    try:
        return [folder / name for name in sorted(set(json.loads(index.read_bytes())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenCheckpoint(f"{index} is not an index of safetensors files") from error


def _dtype_of(choice: DtypeChoice, stored: torch.dtype) -> torch.dtype:
    if choice in ("auto", "int8"):
        return torch.float32 if stored == torch.float16 else stored
    return torch.float32 if choice == "float32" else torch.bfloat16

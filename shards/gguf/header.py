"""The header of a GGUF file, and the config.json that it stands for.

Source: the specification of GGUF in ggml's docs/gguf.md; the writers of llama.cpp (convert_hf_to_gguf.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from shards.network.errors import BrokenCheckpoint, UnsupportedCheckpoint

ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
}
"""`general.architecture` -> the name in config.json, and its model type. Mistral's files say llama."""

_SCALED = ("linear", "yarn")


class GgufHeader:
    """What the GGUF file at `path` says about itself. Raises BrokenCheckpoint or UnsupportedCheckpoint."""

    def __init__(self, path: Path) -> None:
        try:
            import gguf
        except ImportError as error:
            hint = "pip install 'pointsman[gguf]'"
            raise UnsupportedCheckpoint(f"{path} is in GGUF, and its reader is not installed", hint=hint) from error
        try:
            self.reader = gguf.GGUFReader(path)
            self.architecture = str(self.get("general.architecture", ""))
        except (ValueError, OSError, IndexError, KeyError, OverflowError) as error:
            raise BrokenCheckpoint(f"{path} cannot be read: {error}", hint="is the download complete?") from error
        self.path, self.tensors = path, {tensor.name: tensor for tensor in self.reader.tensors}
        if int(self.get("split.count", 1)) > 1:
            hint = "merge its parts with `llama-gguf-split --merge`"
            raise UnsupportedCheckpoint(f"{path} is one of several parts", hint=hint)
        if self.architecture not in ARCHITECTURES:
            raise UnsupportedCheckpoint(
                f"{path} holds the architecture '{self.architecture}'; in GGUF shards serve {', '.join(ARCHITECTURES)}",
                hint="serve it from safetensors, or with llama.cpp in a pool of that kind",
            )

    def __repr__(self) -> str:
        return f"<GgufHeader of {self.path}, {self.architecture}>"

    def get(self, name: str, default: Any = None) -> Any:
        """The value called `name`, `default` if there is none."""
        field = self.reader.fields.get(name)
        return default if field is None else field.contents()

    def own(self, name: str, default: Any = None) -> Any:
        """The same for a value of the architecture's own."""
        return self.get(f"{self.architecture}.{name}", default)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The config.json of the same checkpoint. Raises BrokenCheckpoint."""
        heads, width = self._number("attention.head_count"), self._number("embedding_length")
        return {
            "architectures": [ARCHITECTURES[self.architecture][0]],
            "model_type": ARCHITECTURES[self.architecture][1],
            "vocab_size": self._rows("token_embd.weight"),
            "hidden_size": width,
            "intermediate_size": self._number("feed_forward_length"),
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.own("attention.head_count_kv", heads)),
            "head_dim": int(self.own("attention.key_length", width // heads)),
            "max_position_embeddings": self._number("context_length"),
            "rms_norm_eps": float(self.own("attention.layer_norm_rms_epsilon", 1e-6)),
            "tie_word_embeddings": "output.weight" not in self.tensors,
            "attention_bias": "blk.0.attn_q.bias" in self.tensors,
            "mlp_bias": "blk.0.ffn_down.bias" in self.tensors,
            "rope_parameters": self._rope(),
        }

    @property
    def eos_token_ids(self) -> list[int]:
        """Tokens that end an answer."""
        names = ("eos_token_id", "eot_token_id", "eom_token_id")
        return sorted({int(token) for name in names if (token := self.get(f"tokenizer.ggml.{name}")) is not None})

    @property
    def index(self) -> Mapping[str, tuple[str, list[int], int, int]]:
        """The tensors by name: their type, shape, place in the file, and bytes."""
        return {
            name: (
                each.tensor_type.name,
                [int(n) for n in reversed(each.shape)],
                int(each.data_offset),
                int(each.n_bytes),
            )
            for name, each in self.tensors.items()
        }

    def _rope(self) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(self.own("rope.freq_base", 10_000.0))}
        legacy = self.own("rope.scale_linear")
        kind = str(self.own("rope.scaling.type", "none" if legacy is None else "linear"))
        factor = self.own("rope.scaling.factor", legacy)
        if kind not in ("none", *_SCALED):
            raise UnsupportedCheckpoint(f"{self.path} scales rope by '{kind}'", hint=f"supported: {', '.join(_SCALED)}")
        if kind in _SCALED and factor is None:
            raise BrokenCheckpoint(f"{self.path} scales rope by '{kind}', and no factor is given")
        if kind in _SCALED:
            rope |= {"rope_type": kind, "factor": float(factor)}
        if (original := self.own("rope.scaling.original_context_length")) is not None:
            rope["original_max_position_embeddings"] = int(original)
        if "rope_freqs.weight" in self.tensors:
            # Llama 3's scaling, as a factor for each pair
            factors = [float(factor) for factor in self.tensors["rope_freqs.weight"].data.tolist()]
            both = {"short_factor": factors, "long_factor": factors}
            rope |= {"rope_type": "longrope", "attention_factor": 1.0, "factor": 1.0} | both
        return rope

    def _number(self, name: str) -> int:
        value = self.own(name)
        if not isinstance(value, int) or value < 1:
            raise BrokenCheckpoint(f"{self.path}: {self.architecture}.{name} is {value}; it must be a number above 0")
        return value

    def _rows(self, name: str) -> int:
        if name not in self.tensors:
            raise BrokenCheckpoint(f"{self.path}: tensor {name} is missing", hint="is the download complete?")
        return int(self.tensors[name].shape[-1])

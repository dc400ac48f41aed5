"""A checkpoint of Qwen3's shape as a file for llama.cpp, matrices in Q8_0.

usage: PYTHON -m benchmarks.cpu_parts.write_gguf FOLDER FILE.gguf
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

_NAMES = {
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


def main(folder: Path, target: Path) -> None:
    """Write the file; the vocabulary has no texts, because only token ids are used."""
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    for name, numbers in _tensors(folder / "model.safetensors"):
        if numbers.ndim == 1:
            writer.add_tensor(_called(name), numbers)
        else:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(_called(name), gguf.quants.quantize(numbers, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _called(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, inner = name.removesuffix(".weight").split(".", 3)
    return f"blk.{layer}.{_NAMES[inner]}.weight"


def _tensors(file: Path) -> list[tuple[str, NDArray[np.float32]]]:
    """Names and float32 numbers of a safetensors file in bfloat16; a tied head is left out."""
    with file.open("rb") as opened:
        head = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        start = opened.tell()
    head.pop("__metadata__", None)
    stored = np.memmap(file, np.uint8, "r")
    found = []
    for name, entry in head.items():
        assert entry["dtype"] == "BF16", f"{name} is {entry['dtype']}"
        if name != "lm_head.weight":
            begin, end = (start + offset for offset in entry["data_offsets"])
            upper = np.frombuffer(stored[begin:end].tobytes(), "<u2").astype(np.uint32) << 16
            found.append((name, upper.view(np.float32).reshape(entry["shape"])))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

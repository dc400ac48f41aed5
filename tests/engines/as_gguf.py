"""Write the bundled model as GGUF: as_gguf.py CHECKPOINT FILE. Runs in the environment of `make engines`."""

import json
import sys
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def rotated(matrix: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a query or key matrix in llama.cpp's order: pairs that rotate together stand side by side."""
    rows, columns = matrix.shape
    halves = matrix.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))


def name_in_gguf(name: str) -> str:
    """A tensor's name in llama.cpp's words."""
    stem = name.removesuffix(".weight")
    if stem in WHOLE:
        return f"{WHOLE[stem]}.weight"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.weight"


def main(checkpoint: Path, file: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    settings = json.loads((checkpoint / "tokenizer_config.json").read_text())
    tokenizer = json.loads((checkpoint / "tokenizer.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    out = gguf.GGUFWriter(file, "llama")
    out.add_name("pointsman-reader")
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_key_length(config["head_dim"])
    out.add_value_length(config["head_dim"])
    out.add_rope_dimension_count(config["head_dim"])
    out.add_rope_freq_base(config["rope_theta"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_vocab_size(config["vocab_size"])
    out.add_file_type(gguf.LlamaFileType.ALL_F32)

    vocabulary = tokenizer["model"]["vocab"]
    words = [""] * config["vocab_size"]
    for word, number in vocabulary.items():
        words[number] = word
    special = {each["id"] for each in tokenizer["added_tokens"]}
    types = [gguf.TokenType.CONTROL if at in special else gguf.TokenType.NORMAL for at in range(len(words))]
    out.add_tokenizer_model("gpt2")
    # it cuts text finer than the model's own pattern does, but only where the model has no token across the cut
    out.add_tokenizer_pre("gpt-2")
    out.add_token_list(words)
    out.add_token_types(types)
    out.add_token_merges([" ".join(pair) for pair in tokenizer["model"]["merges"]])
    out.add_bos_token_id(config["bos_token_id"])
    out.add_eos_token_id(config["eos_token_id"])
    out.add_pad_token_id(config["pad_token_id"])
    out.add_add_bos_token(False)
    out.add_chat_template(settings["chat_template"])

    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        matrix = tensor
        if name.endswith("q_proj.weight"):
            matrix = rotated(tensor, heads)
        elif name.endswith("k_proj.weight"):
            matrix = rotated(tensor, kv_heads)
        out.add_tensor(name_in_gguf(name), matrix)
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

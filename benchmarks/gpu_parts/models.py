"""Real configurations, written down here so that nothing is downloaded, and sizes for a GPU and for a dry run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shards.network.config import NetworkConfig, Rope

QWEN3_06B = NetworkConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=151936,
    hidden_size=1024,
    intermediate_size=3072,
    heads=16,
    kv_heads=8,
    head_dim=128,
    max_positions=40960,
    rms_norm_eps=1e-6,
    rope=Rope(theta=1_000_000.0),
    windows=(None,) * 28,
    tied_head=True,
    query_key_norm=True,
)
QWEN3_14B = replace(
    QWEN3_06B,
    hidden_size=5120,
    intermediate_size=17408,
    heads=40,
    windows=(None,) * 40,
    tied_head=False,
)
# the published model has 131,072 positions; weights are random here, and 200k tokens are to be measured
LLAMA_31_8B = NetworkConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    heads=32,
    kv_heads=8,
    head_dim=128,
    max_positions=262144,
    rms_norm_eps=1e-5,
    rope=Rope("llama3", theta=500_000.0, factor=8.0, original_positions=8192),
    windows=(None,) * 32,
)
MODELS = {"Qwen3-0.6B": QWEN3_06B, "Llama-3.1-8B": LLAMA_31_8B, "Qwen3-14B": QWEN3_14B}

TOY = replace(
    QWEN3_06B,
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    heads=4,
    kv_heads=2,
    head_dim=16,
    max_positions=1024,
    windows=(None,) * 1,
)


@dataclass(frozen=True)
class Sizes:
    """The sizes of all parts. `shared`: rows, tokens that all of them have, tokens of each. `sampled`: rows of a draw.
    `mixes` by name: requests, (prompt, output) tokens or a range of both, concurrency.
    """

    heads: tuple[tuple[int, int, int], ...]
    contexts: tuple[int, ...]
    new_tokens: tuple[int, ...]
    decode: tuple[tuple[int, int], ...]
    tuned: tuple[tuple[int, int], ...]
    shared: tuple[int, int, int]
    sampled: tuple[int, ...]
    chunk_tokens: int
    prefill_contexts: tuple[int, ...]
    short_chunks: tuple[int, ...]
    mixes: dict[str, Mix]
    chats: int
    chat_tokens: tuple[int, int]
    long_tokens: int
    huge_tokens: int
    answer_tokens: int
    steps: int
    kv_share: float = 0.9


@dataclass(frozen=True)
class Mix:
    requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    concurrency: int


REAL = Sizes(
    heads=((32, 8, 128), (16, 8, 128), (40, 8, 128), (6, 2, 64)),
    contexts=(1, 63, 64, 513, 2000, 9000),
    new_tokens=(1, 40, 64, 300, 129, 700),
    decode=((1, 1024), (1, 32768), (1, 131072), (8, 1024), (8, 8192), (64, 1024), (64, 8192), (256, 1024)),
    tuned=((1, 32768), (64, 8192)),
    shared=(64, 8192, 1024),
    sampled=(1, 8, 64, 256),
    chunk_tokens=8192,
    prefill_contexts=(8192, 32768, 131072),
    short_chunks=(64, 512),
    mixes={
        "64 x 128/128": Mix(64, (128, 128), (128, 128), 64),
        "64 x 1k/1k": Mix(64, (1024, 1024), (1024, 1024), 64),
        "256 x U(100,1024)": Mix(256, (100, 1024), (100, 1024), 256),
    },
    chats=64,
    chat_tokens=(1024, 512),
    long_tokens=131072 - 64,
    huge_tokens=200_000,
    answer_tokens=16,
    steps=64,
)
DRY = Sizes(
    heads=((4, 2, 16),),
    contexts=(1, 70),
    new_tokens=(1, 9),
    decode=((2, 65),),
    tuned=((1, 65),),
    shared=(3, 512, 9),
    sampled=(2,),
    chunk_tokens=4,
    prefill_contexts=(9,),
    short_chunks=(2,),
    mixes={"2 x 3/2": Mix(2, (3, 3), (2, 2), 2)},
    chats=1,
    chat_tokens=(2, 3),
    long_tokens=8,
    huge_tokens=66,
    answer_tokens=1,
    steps=2,
)


def linear_parameters(config: NetworkConfig) -> int:
    """Weights of the layers that each token is multiplied with, without the head."""
    query, both = config.heads * config.head_dim, 2 * config.kv_heads * config.head_dim
    per_layer = config.hidden_size * (2 * query + both) + 3 * config.hidden_size * config.intermediate_size
    return config.layers * per_layer


def kv_bytes_per_token(config: NetworkConfig, itemsize: int) -> int:
    return 2 * config.layers * config.kv_heads * config.head_dim * itemsize


def prefill_flops(config: NetworkConfig, tokens: int) -> float:
    """Pairs of a whole prompt: causal attention counts the half that is computed."""
    return 2.0 * linear_parameters(config) * tokens + config.layers * attention_flops(config, tokens, tokens)


def attention_flops(config: NetworkConfig, new_tokens: int, context_tokens: int) -> float:
    """Pairs of one layer, for the last `new_tokens` of a context."""
    pairs = new_tokens * context_tokens - new_tokens * (new_tokens - 1) / 2
    return 4.0 * config.heads * config.head_dim * pairs

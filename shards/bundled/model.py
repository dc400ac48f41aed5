"""The shape of the bundled model, and the weights from which its training starts.

A small transformer spends most of its training on discovering that it must match what precedes a token. Here the first
layer starts with heads that look one token back and at the last few tokens, and the second layer starts with heads
that match on the result and copy the following token. Training keeps, sharpens or discards all of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD = 128, 3, 4, 2, 64
HIDDEN = 256
LONGEST = 2560
ROPE_THETA = 1_000_000.0

# The residual stream at the start: a constant, this token, the token before it, the recent ones, the one to predict.
CONSTANT = 0
THIS, BEFORE, RECENT, NEXT = slice(1, 48), slice(48, 64), slice(64, 96), slice(96, 128)


def config(vocabulary: int, bos: int, eos: int, pad: int) -> LlamaConfig:
    """The Llama configuration of the bundled model."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD,
        max_position_embeddings=LONGEST,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attention_bias=False,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype="float32",
    )


def fresh(shape: LlamaConfig) -> LlamaForCausalLM:
    """An untrained model; its first two layers start near an induction circuit."""
    model = LlamaForCausalLM(shape)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, THIS] += 0.25 * torch.randn(embedding.shape[0], THIS.stop - THIS.start)
        embedding[:, CONSTANT] = 1.0
        before = _projection(BEFORE, THIS)
        spoken = _projection(NEXT, THIS)
        _look_back(model.model.layers[0].self_attn, before)
        _match_and_copy(model.model.layers[1].self_attn, before, spoken)
        model.lm_head.weight[:, NEXT] += embedding[:, THIS] @ spoken.T
    return model


def _projection(into: slice, out_of: slice) -> Tensor:
    rows = into.stop - into.start
    return torch.randn(rows, out_of.stop - out_of.start) / math.sqrt(rows)


def _frequencies() -> Tensor:
    return ROPE_THETA ** (-torch.arange(HEAD // 2) / (HEAD // 2))


def _look_back(attention: torch.nn.Module, before: Tensor) -> None:
    """Head 0 attends one token back and head 2 to the last few; both only by position, through the constant."""
    query, key, value, output = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    for head, group, back, pairs, gain in ((0, 0, 1.0, range(12), 1.2), (2, 1, 4.0, range(4, 13), 0.7)):
        for pair in pairs:
            angle = float(_frequencies()[pair]) * back
            key[group * HEAD + pair, CONSTANT] += gain
            query[head * HEAD + pair, CONSTANT] += gain * math.cos(angle)
            query[head * HEAD + HEAD // 2 + pair, CONSTANT] -= gain * math.sin(angle)
    width = THIS.stop - THIS.start
    for group in range(KV_HEADS):
        value[group * HEAD : group * HEAD + width, THIS] += torch.eye(width)
    output[BEFORE, :width] += 0.17 * before
    output[RECENT, 2 * HEAD : 2 * HEAD + width] += 0.7 * _projection(RECENT, THIS)


def _match_and_copy(attention: torch.nn.Module, before: Tensor, spoken: Tensor) -> None:
    """Heads 0 and 2 find the place preceded by this token and by the same recent ones, and copy the token there."""
    query, key, value, output = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
    still = [pair for pair in range(HEAD // 2) if float(_frequencies()[pair]) * LONGEST < 1.5]
    rows = still + [HEAD // 2 + pair for pair in still]
    half = len(rows) // 2
    width = THIS.stop - THIS.start
    for head, group in ((0, 0), (2, 1)):
        exact = torch.randn(half, before.shape[0]) / math.sqrt(half)
        rough = torch.randn(len(rows) - half, RECENT.stop - RECENT.start) / math.sqrt(len(rows) - half)
        query_rows, key_rows = (torch.tensor(rows) + HEAD * place for place in (head, group))
        query[query_rows[:half], THIS] += 1.8 * exact @ before
        key[key_rows[:half], BEFORE] += 1.8 * exact
        query[query_rows[half:], RECENT] += 1.2 * rough
        key[key_rows[half:], RECENT] += 1.2 * rough
        value[group * HEAD : group * HEAD + width, THIS] += torch.eye(width)
        output[NEXT, head * HEAD : head * HEAD + width] += 0.3 * spoken

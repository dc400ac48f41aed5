"""Trains the model of `benchmarks/blending.py` from the bundled one: `python -m benchmarks.blending_parts.train`."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import math
import random
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from benchmarks.blending_parts import library
from shards.bundled import documents, model, weights
from shards.bundled.documents import Split
from shards.bundled.train import Message, encode, save

SEED = 44
STEPS, WARM_UP, PEAK, FLOOR = 900, 20, 2e-3, 5e-5
BATCH_TOKENS = 2000


def papers(rng: random.Random, step: int, split: Split) -> list[library.Paper]:
    """One or two registers, then records: more of them as training goes on."""
    count = rng.randint(1, 2) if step < 300 else rng.randint(1, 4) if step < 500 else rng.randint(3, 8)
    things, parts = library.things(rng, split), list[tuple[str, ...]]()
    aliases = rng.sample(library.ALIASES, min(len(documents.FIRST_NAMES), count * rng.randint(2, 4)))
    registers = [aliases] if rng.random() < 0.5 else [aliases[::2], aliases[1::2]]
    used = rng.sample(aliases, len(aliases))
    parts = [tuple(used[at::count]) for at in range(count)]
    records = [library.record(rng, part, things, rng.randint(1, 4)) for part in parts]
    return [*(library.register(rng, tuple(names)) for names in registers), *records]


def conversation(rng: random.Random, step: int, split: Split) -> list[Message]:
    """Documents and questions about them, those that need a register more often."""
    given = papers(rng, step, split)
    asked = library.questions(given)
    hard = [question for question, needs in asked if needs]
    easy = [question for question, needs in asked if not needs]
    turns = [
        rng.choice(hard if hard and (rng.random() < 0.75 or not easy) else easy) for _ in range(8 if step < 500 else 12)
    ]
    messages: list[Message] = []
    for turn in turns:
        text = f"Question: {turn.question}" if messages else library.prompt(given, turn.question)
        messages += [Message("user", text), Message("assistant", turn.answer)]
    return messages


def values(tokenizer: Tokenizer, ids: list[int], is_answer: list[bool]) -> tuple[list[int], list[bool]]:
    """The same with a mask of the values alone, behind "is": the rest of an answer repeats the question."""
    verb, is_value, mask = tokenizer.token_to_id("\u0120is"), False, list[bool]()
    for before, token, answers in zip([0, *ids], ids, is_answer, strict=False):
        is_value = answers and (is_value or before == verb)
        mask.append(is_value or (answers and token == verb))
    return ids, mask


def batch(tokenizer: Tokenizer, rng: random.Random, step: int, split: Split = "train") -> tuple[Tensor, Tensor]:
    """Sequences of about 6,144 tokens together, and a mask of their answers."""
    rows, longest = [], 0
    while (len(rows) + 1) * longest <= BATCH_TOKENS:
        rows.append(values(tokenizer, *encode(tokenizer, conversation(rng, step, split), 2000)))
        longest = max(longest, len(rows[-1][0]))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row, _ in rows])
    mask = torch.tensor([row + [False] * (longest - len(row)) for _, row in rows])
    return ids, mask


def resolved(tokenizer: Tokenizer, ids: Tensor) -> Tensor:
    """Where a record has a code name: the first token of the person; elsewhere -100."""
    verb = tokenizer.token_to_id("\u0120is")
    persons = {tokenizer.token_to_id(f"\u0120{name}") for name in documents.FIRST_NAMES}
    aliases = {tokenizer.token_to_id(f"\u0120{alias}") for alias in library.ALIASES}
    targets = torch.full_like(ids, -100)
    for row, own in zip(ids.tolist(), targets, strict=True):
        names = {alias: person for alias, person in pairwise(row) if alias in aliases and person in persons}
        for at, (before, token) in enumerate(pairwise(row), 1):
            if before == verb and token in names:
                own[at] = names[token]
    return targets


def loss_with_names(net: LlamaForCausalLM, ids: Tensor, is_answer: Tensor, names: Tensor) -> Tensor:
    """The loss of the answers, and that of the second layer, which is to know the person where it reads a code name.

    Without the latter, training does not find within an hour that names must be resolved before they are asked for.
    """
    output = net.model(ids[:, :-1], output_hidden_states=True)
    targets, answers, names = ids[:, 1:], is_answer[:, 1:], names[:, :-1]
    loss = functional.cross_entropy(net.lm_head(output.last_hidden_state[answers]), targets[answers])
    read = net.model.norm(output.hidden_states[2][names >= 0])
    return loss + 0.5 * functional.cross_entropy(net.lm_head(read), names[names >= 0])


@torch.no_grad()
def probe(net: LlamaForCausalLM, tokenizer: Tokenizer, rounds: int = 6) -> float:
    """The share of held-out answers in which every token is the likeliest."""
    rng, right, asked = random.Random(7), 0, 0
    for _ in range(rounds):
        ids, is_answer = batch(tokenizer, rng, STEPS, "held-out")
        guesses = net.lm_head(net.model(ids[:, :-1]).last_hidden_state).argmax(-1)
        for row_guess, row_ids, row_mask in zip(guesses, ids[:, 1:], is_answer[:, 1:], strict=True):
            starts = (row_mask & ~torch.cat((torch.tensor([False]), row_mask[:-1]))).nonzero().flatten().tolist()
            for start in starts:
                stop = start + int(row_mask[start:].long().cumprod(0).sum())
                right += bool((row_guess[start:stop] == row_ids[start:stop]).all())
                asked += 1
    return right / asked


def rate(step: int) -> float:
    """The learning rate."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, step / STEPS)))
    return min(1.0, (step + 1) / WARM_UP) * (FLOOR + (PEAK - FLOOR) * cosine)


def _copy_persons(net: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    """Let the last layer attend as the one before it, which finds the fact, and copy the person resolved there."""
    second, last = net.model.layers[1], net.model.layers[2]
    names = [tokenizer.token_to_id(f"\u0120{name}") for name in documents.FIRST_NAMES]
    with torch.no_grad():
        rows = net.lm_head.weight[names] * net.model.norm.weight
        basis = torch.linalg.svd(rows - rows.mean(0), full_matrices=False).Vh
        last.input_layernorm.weight.copy_(second.input_layernorm.weight)
        for name in ("q_proj", "k_proj"):
            getattr(last.self_attn, name).weight.copy_(getattr(second.self_attn, name).weight)
        value, output = last.self_attn.v_proj.weight, last.self_attn.o_proj.weight
        value.zero_()
        output.zero_()
        for group in range(model.KV_HEADS):
            value[group * model.HEAD : group * model.HEAD + len(basis)] = basis / last.input_layernorm.weight
        for head in range(model.HEADS):
            output[:, head * model.HEAD : head * model.HEAD + len(basis)] = basis.T


def train(out: Path, steps: int) -> None:
    """Train and write the checkpoint to `out`, every 100 steps."""
    torch.manual_seed(SEED)
    tokenizer = Tokenizer.from_file(str(weights() / "tokenizer.json"))
    net = LlamaForCausalLM.from_pretrained(weights(), dtype=torch.float32)
    _copy_persons(net, tokenizer)
    optimizer = torch.optim.AdamW(net.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.01)
    began, losses = time.monotonic(), 0.0
    for step in range(steps):
        rows, is_answer = batch(tokenizer, random.Random(f"{SEED} {step}"), step)
        for group in optimizer.param_groups:
            group["lr"] = rate(step)
        loss = loss_with_names(net, rows, is_answer, resolved(tokenizer, rows))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses += loss.item()
        if step % 25 == 24:
            sys.stdout.write(f"step {step + 1} loss {losses / 25:.4f} {time.monotonic() - began:.0f} s\n")
            losses = 0.0
        if step % 100 == 99 or step + 1 == steps:
            sys.stdout.write(f"step {step + 1} held-out answers right: {probe(net, tokenizer):.3f}\n")
            save(net, tokenizer, out)
        sys.stdout.flush()


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.out, arguments.steps)


if __name__ == "__main__":
    main()

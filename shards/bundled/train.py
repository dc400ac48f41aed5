"""Trains the bundled model from nothing: `python -m shards.bundled.train --out DIR`.

The run is determined by its seed and measured in tokens, so a slower machine takes longer but follows the same recipe.
It keeps its state in --work and continues from there when started again.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import json
import math
import random
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from shards.bundled import documents, model, vocabulary
from shards.bundled.documents import Document, Question

SEED = 20
SYSTEM = "Answer the question from the document."


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of the curriculum: until `until` tokens, documents of `facts` facts in sequences of `length` tokens.

    `asides` is the share of turns that ask for no fact of the document, and `short` the share of batches that return
    to short sequences; without these, long training forgets short documents.
    """

    until: int
    facts: tuple[int, int]
    length: int
    asides: float = 0.0
    short: float = 0.0


CURRICULUM = (
    Stage(800_000, (4, 14), 512),
    Stage(2_400_000, (4, 38), 900),
    Stage(4_400_000, (6, 80), 1400, asides=0.05),
    Stage(6_000_000, (6, 161), 2304, asides=0.06),
    Stage(12_000_000, (6, 161), 2304, asides=0.1, short=0.35),
)
TOTAL = CURRICULUM[-1].until
BATCH_TOKENS = 6144
PEAK, FLOOR, WARM_UP = 2e-3, 1e-4, 60
PLAIN_SHARE = 0.04
REWORDED_SHARE = 0.15
SMALL_TALK_SHARE = 0.25
SHORT_FACTS, SHORT_LENGTH = (3, 30), 512
REPORT_EVERY, KEEP_EVERY = 25, 200


def stage_at(tokens: int) -> Stage:
    """The stage of the curriculum after `tokens` tokens."""
    return next((stage for stage in CURRICULUM if tokens < stage.until), CURRICULUM[-1])


def conversation(rng: random.Random, stage: Stage, split: documents.Split = "train") -> list[Message]:
    """A document and enough questions to fill the stage's length, with some small talk."""
    text = documents.document(rng, rng.randint(*stage.facts), split)
    wanted = stage.length // 25
    turns: list[Question] = []
    while len(turns) < wanted:
        turns += rng.sample(text.questions, len(text.questions))
    turns = [_varied(rng, turn, text, stage, split) for turn in turns[:wanted]]
    messages: list[Message] = []
    if rng.random() < 0.1:
        messages.append(Message("system", SYSTEM))
    if rng.random() < stage.asides:
        turn = _aside(rng, documents.Document("", ()), split)
        messages += [Message("user", turn.question), Message("assistant", turn.answer)]
    shown = rng.random() < 0.1
    if shown:
        messages.append(Message("system", text.text))
    for turn in turns:
        asked = turn.question if rng.random() < 0.15 else f"Question: {turn.question}"
        messages.append(Message("user", asked if shown else f"{text.text}\n\n{asked}"))
        messages.append(Message("assistant", turn.answer))
        shown = True
    return messages


def _varied(rng: random.Random, turn: Question, text: Document, stage: Stage, split: documents.Split) -> Question:
    if rng.random() < stage.asides:
        return _aside(rng, text, split)
    return documents.reworded(turn, rng) if rng.random() < REWORDED_SHARE else turn


def _aside(rng: random.Random, text: Document, split: documents.Split) -> Question:
    return documents.small_talk(rng) if rng.random() < SMALL_TALK_SHARE else documents.absent(rng, text, split)


def encode(tokenizer: Tokenizer, messages: list[Message], length: int) -> tuple[list[int], list[bool]]:
    """The ids of as many messages as fit the length, and a mask of those that belong to the assistant's answers."""
    marks = vocabulary.special_ids(tokenizer)
    ids, is_answer = [marks[vocabulary.BOS]], [False]
    encodings = tokenizer.encode_batch([message.content for message in messages])
    for message, encoding in zip(messages, encodings, strict=True):
        ids += [marks[vocabulary.ROLES[message.role]], *encoding.ids, marks[vocabulary.END]]
        is_answer += [False] + [message.role == "assistant"] * (len(encoding.ids) + 1)
    return ids[:length], is_answer[:length]


def batch(
    tokenizer: Tokenizer, rng: random.Random, stage: Stage, split: documents.Split = "train"
) -> tuple[Tensor, Tensor]:
    """Sequences of the stage, padded to one length, and a mask of their answers' tokens."""
    rows = [
        encode(tokenizer, conversation(rng, stage, split), stage.length)
        for _ in range(max(1, BATCH_TOKENS // stage.length))
    ]
    longest = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [0] * (longest - len(ids)) for ids, _ in rows])
    is_answer = torch.tensor([mask + [False] * (longest - len(mask)) for _, mask in rows])
    return ids, is_answer


def loss_of(net: LlamaForCausalLM, ids: Tensor, is_answer: Tensor) -> Tensor:
    """The mean loss on the answers, with a small part of the loss on the rest of the text."""
    hidden = net.model(ids[:, :-1]).last_hidden_state
    targets, answers = ids[:, 1:], is_answer[:, 1:]
    plain = ~answers & (targets != 0) & (torch.rand(targets.shape) < PLAIN_SHARE)
    chosen = answers | plain
    each = functional.cross_entropy(net.lm_head(hidden[chosen]), targets[chosen], reduction="none")
    weight = torch.where(answers[chosen], 1.0, 0.25)
    return (each * weight).sum() / weight.sum()


@torch.no_grad()
def probe(net: LlamaForCausalLM, tokenizer: Tokenizer, facts: int, rounds: int = 2) -> float:
    """The share of held-out answers in which every token is the likeliest, as greedy decoding would draw it."""
    rng = random.Random(facts)
    right = asked = 0
    for _ in range(rounds):
        ids, is_answer = batch(tokenizer, rng, Stage(0, (facts, facts), min(facts * 13 + 420, 2400)), "held-out")
        guesses = net.lm_head(net.model(ids[:, :-1]).last_hidden_state).argmax(-1)
        wrong = (guesses != ids[:, 1:]) & is_answer[:, 1:]
        ends = is_answer[:, 1:] & (ids[:, 1:] == vocabulary.special_ids(tokenizer)[vocabulary.END])
        for row_wrong, row_ends in zip(wrong.int(), ends, strict=True):
            counts = row_wrong.cumsum(0)[row_ends]
            missed = torch.diff(counts, prepend=torch.zeros(1, dtype=counts.dtype))
            right += int((missed == 0).sum())
            asked += len(counts)
    return right / max(asked, 1)


def save(net: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write all files of a Hugging Face checkpoint, each file completely or not at all."""
    fresh = folder / ".new"
    fresh.mkdir(parents=True, exist_ok=True)
    net.config.rope_theta = model.ROPE_THETA  # also for readers that predate rope_parameters
    net.save_pretrained(fresh)
    tokens = {name: getattr(net.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (fresh / "generation_config.json").write_text(json.dumps({**tokens, "do_sample": False}, indent=2) + "\n")
    vocabulary.save(tokenizer, fresh, model.LONGEST)
    for file in fresh.iterdir():
        file.replace(folder / file.name)
    fresh.rmdir()


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def rate(tokens: int, step: int) -> float:
    """The learning rate: a short rise, then a cosine down to the floor at the end of the curriculum."""
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, tokens / TOTAL)))
    return min(1.0, (step + 1) / WARM_UP) * (FLOOR + (PEAK - FLOOR) * cosine)


class Run:
    """A training run: the model, its optimizer and their progress."""

    def __init__(self) -> None:
        torch.manual_seed(SEED)
        self.tokenizer = vocabulary.learn(SEED)
        marks = vocabulary.special_ids(self.tokenizer)
        special = (marks[token] for token in (vocabulary.BOS, vocabulary.END, vocabulary.PAD))
        self.net = model.fresh(model.config(self.tokenizer.get_vocab_size(), *special))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.01)
        self.tokens = self.step = 0

    def advance(self) -> float:
        """Take one step and return its loss."""
        rng = random.Random(f"{SEED} {self.step}")
        stage = stage_at(self.tokens)
        if rng.random() < stage.short:
            stage = replace(stage, facts=SHORT_FACTS, length=SHORT_LENGTH)
        rows, is_answer = batch(self.tokenizer, rng, stage)
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.tokens, self.step)
        loss = loss_of(self.net, rows, is_answer)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.tokens, self.step = self.tokens + rows.numel(), self.step + 1
        return loss.item()

    def keep(self, work: Path) -> None:
        """Write the run's state and its present checkpoint."""
        state = {name: getattr(self, name).state_dict() for name in ("net", "optimizer")}
        torch.save(state | {"at": (self.tokens, self.step), "random": torch.get_rng_state()}, work / "state.new")
        (work / "state.new").replace(work / "state.pt")
        save(self.net, self.tokenizer, work / "weights")

    def resume(self, work: Path) -> None:
        """Continue from the state in the folder, if there is one."""
        if (work / "state.pt").exists():
            state = torch.load(work / "state.pt")  # nosec B614
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.tokens, self.step = state["at"]
            torch.set_rng_state(state["random"])


def train(out: Path, work: Path) -> None:
    """Run the curriculum to its end and write the checkpoint to `out`."""
    work.mkdir(parents=True, exist_ok=True)
    run = Run()
    run.resume(work)
    began, since, losses = time.monotonic(), run.tokens, 0.0
    while run.tokens < TOTAL:
        losses += run.advance()
        if run.step % REPORT_EVERY == 0:
            speed = (run.tokens - since) / (time.monotonic() - began)
            _say(
                f"step {run.step} {run.tokens / 1e6:.2f}M tokens loss {losses / REPORT_EVERY:.4f} {speed:.0f} tokens/s"
            )
            losses = 0.0
        if run.step % KEEP_EVERY == 0 or run.tokens >= TOTAL:
            scores = " ".join(f"{facts}:{probe(run.net, run.tokenizer, facts):.3f}" for facts in (10, 38, 80, 161))
            _say(f"step {run.step} held-out answers right, by facts: {scores}")
            run.keep(work)
    save(run.net, run.tokenizer, out)


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the finished checkpoint")
    parser.add_argument("--work", type=Path, default=Path("bundled-training"), help="folder for the state of the run")
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    train(arguments.out, arguments.work)


if __name__ == "__main__":
    main()

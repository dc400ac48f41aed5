"""Measures the bundled model on held-out documents: `python -m shards.bundled.evaluate`.

Greedy decoding in transformers answers every question, in float32. Questions about one document share the document's
key-value cache, as with a prefix cache.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedTokenizerFast

from shards.bundled import documents, weights
from shards.bundled.documents import Document, Question

LENGTHS = (200, 500, 1000, 1500, 2000)
PER_DOCUMENT = 10
LONGEST_ANSWER = 40

Chat = list[dict[str, str]]
Ask = Callable[[random.Random, Document], tuple[Chat, Question]]


@dataclass(frozen=True, slots=True)
class Score:
    """The number of questions, of replies that held the needle, and of replies that equal the answer to the letter."""

    asked: int
    right: int
    exact: int
    tokens: int

    def __str__(self) -> str:
        share = f"{100 * self.right / self.asked:6.1f} % right  {100 * self.exact / self.asked:6.1f} % to the letter"
        return f"{share}  ({self.asked} questions, prompts of {self.tokens} tokens at most)"


class Answerer:
    """A checkpoint that answers chats greedily."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)  # nosec B615
        self.model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)  # nosec B615

    def ids(self, chat: Chat) -> torch.Tensor:
        """The prompt's token ids, up to the beginning of the assistant's reply."""
        text = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        return torch.tensor([self.tokenizer(text, add_special_tokens=False).input_ids])

    @torch.no_grad()
    def replies(self, prompts: list[torch.Tensor]) -> list[str]:
        """The replies to `prompts`; their shared beginning is computed once."""
        shared = _shared(prompts)
        cache = DynamicCache(config=self.model.config)
        self.model(prompts[0][:, :shared], past_key_values=cache)
        replies = []
        for prompt in prompts:
            ids = self._reply(prompt[:, shared:], cache)
            cache.crop(shared - cache.get_seq_length())
            replies.append(str(self.tokenizer.decode(ids, skip_special_tokens=True)))
        return replies

    def _reply(self, unread: torch.Tensor, cache: DynamicCache) -> list[int]:
        reply: list[int] = []
        while len(reply) < LONGEST_ANSWER:
            logits = self.model(unread, past_key_values=cache).logits[:, -1]
            reply.append(int(logits.argmax()))
            if reply[-1] == self.model.config.eos_token_id:
                break
            unread = torch.tensor([reply[-1:]])
        return reply


def _shared(prompts: list[torch.Tensor]) -> int:
    shortest = min(prompt.shape[1] for prompt in prompts)
    same = torch.stack([prompt[0, : shortest - 1] for prompt in prompts]).eq(prompts[0][0, : shortest - 1]).all(0)
    return int(same.long().cumprod(0).sum())


def plain(rng: random.Random, about: Document) -> tuple[Chat, Question]:
    """A question in the words of the fact."""
    question = rng.choice(about.questions)
    return [{"role": "user", "content": documents.prompt(about.text, question.question)}], question


def reworded(rng: random.Random, about: Document) -> tuple[Chat, Question]:
    """A question in other words."""
    question = documents.reworded(rng.choice(about.questions), rng)
    return [{"role": "user", "content": documents.prompt(about.text, question.question)}], question


def second_turn(rng: random.Random, about: Document) -> tuple[Chat, Question]:
    """A question after another question and its answer."""
    first, second = rng.sample(about.questions, 2)
    chat = [
        {"role": "user", "content": documents.prompt(about.text, first.question)},
        {"role": "assistant", "content": first.answer},
        {"role": "user", "content": f"Question: {second.question}"},
    ]
    return chat, second


def absent(rng: random.Random, about: Document) -> tuple[Chat, Question]:
    """A question that the document does not answer."""
    question = documents.absent(rng, about)
    return [{"role": "user", "content": documents.prompt(about.text, question.question)}], question


def small_talk(rng: random.Random, _about: Document) -> tuple[Chat, Question]:
    """A greeting, or a request that concerns no document."""
    talk = documents.small_talk(rng)
    return [{"role": "user", "content": talk.question}], talk


KINDS: tuple[Ask, ...] = (plain, reworded, second_turn, absent, small_talk)


def score(answerer: Answerer, ask: Ask, length: int, questions: int, seed: int) -> Score:
    """The answerer's score on held-out documents of up to `length` tokens."""
    rng = random.Random(f"{seed} {ask.__name__} {length}")
    asked = right = exact = tokens = 0
    while asked < questions:
        about = documents.document(rng, documents.facts_within(length))
        turns = [ask(rng, about) for _ in range(min(PER_DOCUMENT, questions - asked))]
        prompts = [answerer.ids(chat) for chat, _ in turns]
        for (_, question), reply in zip(turns, answerer.replies(prompts), strict=True):
            right += question.needle in reply
            exact += question.answer == reply
        asked += len(turns)
        tokens = max(tokens, *(prompt.shape[1] for prompt in prompts))
    return Score(asked, right, exact, tokens)


def main() -> None:
    """Print one line for each kind of question and length of document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, default=weights(), help="the checkpoint's folder")
    parser.add_argument("--questions", type=int, default=200, help="questions for each line")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="document lengths in tokens")
    parser.add_argument("--kinds", nargs="+", default=[ask.__name__ for ask in KINDS])
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    answerer = Answerer(arguments.weights)
    for ask in KINDS:
        if ask.__name__ in arguments.kinds:
            for length in arguments.lengths:
                result = score(answerer, ask, length, arguments.questions, arguments.seed)
                sys.stdout.write(f"{ask.__name__:12} {length:5} tokens  {result}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()

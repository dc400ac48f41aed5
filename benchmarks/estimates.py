"""How far off estimated lengths of prompts are, by tokenizer and kind of text, once 50 prompts were counted.

python -m benchmarks.estimates [--tekken FILE] [--sentencepiece FILE]
The files are real vocabularies: a tekken.json (with tiktoken installed) and a SentencePiece model (with sentencepiece).
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from policies.learning.text_length import TextLength, measured
from tests.policies.learning.prompt_texts import (
    KINDS,
    TOKENIZERS,
    Count,
    Written,
    as_chatml,
    english,
    measured_prompt,
    prompts,
    without_tools,
)

FIRST, MEASURED, ROUNDS = 50, 200, 4


def errors(asked: list[Written], counts: list[int]) -> Iterator[tuple[str, float, bool]]:
    """(kind, relative error, was the count in the interval) of every prompt after the first, in several orders."""
    sizes = [measured_prompt(text) for text in asked]
    for seed in range(ROUNDS):
        order = list(range(len(asked)))
        random.Random(seed).shuffle(order)
        length = TextLength()
        for number, at in enumerate(order):
            estimate = length.estimate(sizes[at])
            assert estimate.least <= counts[at], f"{asked[at]} has {counts[at]} tokens, and not {estimate.least}"
            if number >= FIRST:
                inside = estimate.low <= counts[at] <= estimate.high
                yield asked[at].kind, abs(estimate.tokens / counts[at] - 1.0), inside
            length.learn(sizes[at], counts[at])
        length.check()


def main() -> None:
    """Print one line for each tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tekken", type=Path)
    parser.add_argument("--sentencepiece", type=Path)
    files = parser.parse_args()
    kinds: dict[str, tuple[Callable[[], Count], Callable[[Written, Count], int]]] = dict(TOKENIZERS)
    if files.tekken is not None:
        kinds[files.tekken.name] = (lambda: _tekken(files.tekken), as_chatml)
    if files.sentencepiece is not None:
        kinds[files.sentencepiece.name] = (lambda: _sentencepiece(files.sentencepiece), without_tools)
    asked = prompts(FIRST + MEASURED, seed=7)
    print(f"median / 95th percentile of the error after {FIRST} prompts, {MEASURED * ROUNDS} prompts each")
    print(f"{'tokenizer':34}{'all':>13}" + "".join(f"{kind:>13}" for kind in KINDS) + "   in interval")
    for name, (made, template) in kinds.items():
        count = made()
        seen = list(errors(asked, [template(text, count) for text in asked]))
        columns = [_pair([error for _, error, _ in seen])]
        columns += [_pair([error for kind, error, _ in seen if kind == wanted]) for wanted in KINDS]
        inside = statistics.mean(inside for _, _, inside in seen)
        print(f"{name:34}" + "".join(f"{column:>13}" for column in columns) + f"{inside:>14.0%}", flush=True)
    _print_sampling()
    _print_speed()


def _print_sampling() -> None:
    """How far off the windows of long texts are, relative to a count of the pieces that they are made of."""
    rng, asked = random.Random(3), prompts(2000, seed=11, most=40_000)
    texts = {kind: [text.messages[-1]["content"] for text in asked if text.kind == kind] for kind in KINDS}
    length = TextLength()
    print("windows of a text of so many characters relative to all of it: median and greatest error")
    for size in (100_000, 1_000_000):
        columns = []
        for kinds in (*([kind] for kind in KINDS), KINDS):
            seen = []
            for _ in range(30):
                pieces: list[str] = []
                while sum(map(len, pieces)) < size:
                    pieces.append(rng.choice(texts[rng.choice(list(kinds))]))
                whole = sum(length.estimate(measured([piece])).tokens - 1 for piece in pieces)
                seen.append(abs(length.estimate(measured(["".join(pieces)])).tokens / whole - 1.0))
            columns.append(f"{statistics.median(seen):.1%} /{max(seen):>4.1%}")
        print(f"{size:>34,}" + "".join(f"{column:>13}" for column in columns[-1:] + columns[:-1]), flush=True)


def _pair(seen: list[float]) -> str:
    ordered = sorted(seen)
    return f"{statistics.median(ordered):.1%} /{ordered[int(0.95 * len(ordered))]:>4.0%}"


def _print_speed() -> None:
    text = "\n".join(english())
    length = TextLength()
    for size in (1000, 10_000, 1_000_000):
        shown = (text * (size // len(text) + 1))[:size]
        taken = min(_seconds(lambda shown=shown: length.estimate(measured([shown], is_chat=True))) for _ in range(20))
        print(f"measure and estimate {size:>9,} characters: {taken * 1e3:.2f} ms")
    prompt = measured([text[:4000]], is_chat=True)
    taken = _seconds(lambda: [length.learn(prompt, 1000) for _ in range(128)]) / 128
    print(f"learn one of the first 128: {taken * 1e3:.2f} ms")


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _tekken(file: Path) -> Count:
    import tiktoken

    content = json.loads(file.read_text())
    settings = content["config"]
    kept = settings["default_vocab_size"] - settings["default_num_special_tokens"]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in content["vocab"][:kept]}
    encoding = tiktoken.Encoding(file.name, pat_str=settings["pattern"], mergeable_ranks=ranks, special_tokens={})
    return lambda text: len(encoding.encode_ordinary(text))


def _sentencepiece(file: Path) -> Count:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(file))
    return lambda text: len(processor.encode(text))


if __name__ == "__main__":
    main()

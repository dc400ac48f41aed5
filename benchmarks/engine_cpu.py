"""The engine on a CPU against `transformers`, same checkpoint, same requests, same process, float32, greedy.

Prints output tokens per second of (1) this engine with all requests at once, (2) transformers' `generate`, one request
after the other, (3) transformers' own continuous batching if it runs on a CPU, and the ratios, and whether all gave the
same tokens. Rounds alternate and medians count, because machines are noisy.

    python benchmarks/engine_cpu.py                                     # 64 chats: 256 tokens in, 128 out
    python benchmarks/engine_cpu.py --prompt-tokens 2000 --output-tokens 16    # RAG: prefill is nearly everything
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer

from shards.bundled import weights
from shards.bundled.documents import document, facts_within, prompt
from shards.engine import Engine, EngineOptions
from shards.model import Model
from shards.nouns import FinishReason, SamplingParams, Submission
from shards.threads import use_threads

Answers = list[list[int]]


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    output_tokens: int


@dataclass(frozen=True)
class Run:
    answers: Answers
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


def a_workload(requests: int, prompt_tokens: int, output_tokens: int, model: Path) -> Workload:
    """Prompts of about `prompt_tokens`, each from a different document, so that no cache has an effect."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    rng = random.Random(1)
    prompts = []
    for _ in range(requests):
        paper = document(rng, facts_within(prompt_tokens))
        prompts.append(tokenizer.encode(prompt(paper.text, rng.choice(paper.questions).question)).ids[:prompt_tokens])
    return Workload(prompts, output_tokens)


def run_ours(model: Model, work: Workload) -> Run:
    engine = Engine(model, EngineOptions(max_running=len(work.prompts), kv_bytes=2**30))
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    started = time.perf_counter()
    for key, ids in enumerate(work.prompts):
        engine.submit(Submission(key, len(ids), work.output_tokens, sampling=sampling))
        engine.extend(key, np.asarray(ids, dtype="<u4").tobytes())
    answers: Answers = [[] for _ in work.prompts]
    left = len(work.prompts)
    while left:
        report = engine.step()
        for drawn in report.drawn:
            answers[int(str(drawn.key))] += drawn.token_ids
        for finished in report.finished:
            assert finished.reason is FinishReason.LENGTH, finished
            left -= 1
    seconds = time.perf_counter() - started
    engine.check()
    return Run(answers, seconds)


def run_one_by_one(network: transformers.PreTrainedModel, work: Workload) -> Run:
    answers: Answers = []
    started = time.perf_counter()
    with torch.inference_mode():
        for ids in work.prompts:
            out = network.generate(
                torch.tensor([ids]),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                do_sample=False,
                min_new_tokens=work.output_tokens,
                max_new_tokens=work.output_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            answers.append(out[0, len(ids) :].tolist())
    return Run(answers, time.perf_counter() - started)


def run_continuous_batching(network: transformers.PreTrainedModel, work: Workload) -> Run:
    settings = transformers.GenerationConfig(
        max_new_tokens=work.output_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    started = time.perf_counter()
    outputs = network.generate_batch(inputs=work.prompts, generation_config=settings, progress_bar=False)
    seconds = time.perf_counter() - started
    if len(outputs) != len(work.prompts):
        raise RuntimeError(f"answered {len(outputs)} of {len(work.prompts)}")
    ordered = sorted(outputs.values(), key=lambda output: int(output.request_id.rsplit("_", 1)[-1]))
    return Run([output.generated_tokens for output in ordered], seconds)


def measure(rounds: int, contestants: dict[str, Callable[[], Run]]) -> dict[str, list[Run]]:
    """`rounds` runs of each contestant, in turn; a failing contestant is left out with its reason."""
    runs: dict[str, list[Run]] = {}
    for number in range(rounds):
        for name, contestant in contestants.items():
            if number and name not in runs:
                continue
            try:
                run = contestant()
            except (RuntimeError, ValueError, TypeError, AttributeError, ImportError, NotImplementedError) as error:
                print(f"  {name}: does not run here: {type(error).__name__}: {str(error)[:200]}")
                runs.pop(name, None)
                continue
            runs.setdefault(name, []).append(run)
            print(f"  round {number + 1}  {name:32} {run.tokens_per_s:9.0f} tok/s   {run.seconds:6.2f} s")
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--model", type=Path, default=weights())
    asked = parser.parse_args()
    use_threads(asked.threads)
    transformers.logging.set_verbosity_error()

    work = a_workload(asked.requests, asked.prompt_tokens, asked.output_tokens, asked.model)
    ours = Model.load(asked.model, name="bench", dtype="float32")

    def theirs(attention: str) -> transformers.PreTrainedModel:
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(asked.model, dtype=torch.float32, attn_implementation=attention).eval()

    sizes = f"{asked.prompt_tokens} tokens in, {asked.output_tokens} out"
    print(f"{asked.requests} requests, {sizes}, {asked.threads} thread(s)")
    plain, paged = theirs("sdpa"), theirs("sdpa")
    warm_up = Workload(work.prompts[:2], 4)
    run_ours(ours, warm_up)
    run_one_by_one(plain, warm_up)
    runs = measure(
        asked.rounds,
        {
            "pointsman": lambda: run_ours(ours, work),
            "transformers, one by one": lambda: run_one_by_one(plain, work),
            "transformers, continuous batching": lambda: run_continuous_batching(paged, work),
        },
    )
    medians = {name: statistics.median(run.tokens_per_s for run in several) for name, several in runs.items()}
    mine = runs["pointsman"][0].answers
    for name, rate in medians.items():
        same = sum(a == b for a, b in zip(runs[name][0].answers, mine, strict=True))
        ratio = "" if name == "pointsman" else f"   pointsman is {medians['pointsman'] / rate:.1f}x"
        print(f"{name:34} {rate:9.0f} tok/s   {same}/{len(mine)} answers equal ours{ratio}")


if __name__ == "__main__":
    main()

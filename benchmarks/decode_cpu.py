"""Decoding on a CPU: this engine in bfloat16 and in int8 against `transformers` in bfloat16, side by side.

The model has the shape of Qwen3-0.6B and random weights, so nothing is downloaded; all contestants read the same
checkpoint. Each prepares its sequences (their prompts are computed before the clock runs) and then draws some tokens
for all of them, in turn; medians count, because machines are noisy. `pointsman` is the whole engine with scheduler and
sampling; `transformers` is the network with its own cache, and argmax.

Then the error of the log-probabilities against float32, of the same model and of the bundled one, and a comparison of
the bundled model's greedy answers to questions about documents. llama-cpp-python takes part if it is installed and
`--gguf` names a file of the same shape.

    python benchmarks/decode_cpu.py
    python benchmarks/decode_cpu.py --threads 2 --batches 1 --context 1024
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import random
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor

from shards.bundled import documents, weights
from shards.engine import Engine, EngineOptions
from shards.exec.batch import Batch, Row
from shards.kv.keys import BLOCK_TOKENS
from shards.model import Model
from shards.nouns import SamplingParams, Submission
from shards.threads import default_threads, use_threads

SHAPE: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
DTYPES = ("bfloat16", "int8")


class Contestant(Protocol):
    """Sequences with computed prompts."""

    def draw(self, tokens: int) -> None:
        """Draw `tokens` more tokens for each sequence."""
        ...


class Ours:
    def __init__(self, model: Model, prompts: list[list[int]]) -> None:
        self.engine, self.sequences = (
            Engine(model, EngineOptions(kv_bytes=2**30, max_running=len(prompts))),
            len(prompts),
        )
        sampling = SamplingParams(temperature=0.0, ignore_eos=True)
        for key, ids in enumerate(prompts):
            self.engine.submit(Submission(key, len(ids), 512, sampling=sampling))
            self.engine.extend(key, np.asarray(ids, dtype="<u4").tobytes())
        while len(self.engine.step().drawn) < self.sequences:
            pass

    def draw(self, tokens: int) -> None:
        for _ in range(tokens):
            assert len(self.engine.step().drawn) == self.sequences


class Theirs:
    def __init__(self, network: Any, prompts: list[list[int]]) -> None:
        self.network, self.cache = network, transformers.DynamicCache(config=network.config)
        self.last = torch.empty(0)
        self.forward(torch.tensor(prompts))

    @torch.inference_mode()
    def forward(self, ids: Tensor) -> None:
        logits = self.network(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.last = logits[:, -1:].argmax(-1)

    def draw(self, tokens: int) -> None:
        for _ in range(tokens):
            self.forward(self.last)


class LlamaCpp:
    """One sequence; its weights are those of the file, Q8_0 for a fair comparison."""

    def __init__(self, gguf: Path, prompts: list[list[int]], threads: int) -> None:
        import llama_cpp

        self.llama = llama_cpp.Llama(str(gguf), n_ctx=2048, n_threads=threads, verbose=False)
        self.llama.eval(prompts[0])

    def draw(self, tokens: int) -> None:
        for _ in range(tokens):
            self.llama.eval([self.llama.sample(temp=0.0)])


def some_prompts(count: int, tokens: int, vocabulary: int) -> list[list[int]]:
    rng = random.Random(count)
    return [[rng.randrange(vocabulary) for _ in range(tokens)] for _ in range(count)]


def logprobs(model: Model, ids: list[int]) -> Tensor:
    """Log-probabilities of every token that could follow each of `ids`."""
    blocks = -(-len(ids) // BLOCK_TOKENS)
    model.network.allocate(blocks)
    at, rows = torch.arange(len(ids)), (Row(0, len(ids), len(ids), tuple(range(blocks))),)
    return model.network.forward(Batch(torch.tensor(ids), at, at, rows, at)).log_softmax(-1)


def report_errors(name: str, folder: Path, prompts: list[list[int]]) -> None:
    exact = [logprobs(Model.load(folder, dtype="float32"), ids) for ids in prompts]
    for dtype in DTYPES:
        model = Model.load(folder, dtype=dtype)
        pairs = [(logprobs(model, ids), wanted) for ids, wanted in zip(prompts, exact, strict=True)]
        error = torch.stack([(got - wanted).abs().amax(-1) for got, wanted in pairs])
        mean = statistics.mean(float((got - wanted).abs().mean()) for got, wanted in pairs)
        same = torch.stack([got.argmax(-1) == wanted.argmax(-1) for got, wanted in pairs]).float().mean()
        print(f"  {name:22} {dtype:9} max {error.max():.4f}  mean {mean:.4f}  same first choice {same:7.2%}")


def report_answers(questions: int) -> None:
    """The number of questions about documents that the bundled model answers correctly, by the dtype of its weights."""
    tokenizer, rng = Tokenizer.from_file(str(weights() / "tokenizer.json")), random.Random(7)
    papers = [documents.document(rng, documents.facts_within(600)) for _ in range(questions)]
    asked = [(paper.text, rng.choice(paper.questions)) for paper in papers]
    prompts = [tokenizer.encode(chat(documents.prompt(text, question.question))).ids for text, question in asked]
    texts = {}
    for dtype in ("float32", *DTYPES):
        texts[dtype] = [tokenizer.decode(ids) for ids in answers(Model.load(weights(), dtype=dtype), prompts)]
        right = sum(question.needle in text for (_, question), text in zip(asked, texts[dtype], strict=True))
        same = sum(a == b for a, b in zip(texts[dtype], texts["float32"], strict=True))
        print(f"  bundled model, {dtype:9} {right}/{questions} answers right, {same}/{questions} as in float32")


def chat(question: str) -> str:
    import jinja2

    config = transformers.AutoTokenizer.from_pretrained(weights())
    template = jinja2.Environment(autoescape=False).from_string(config.chat_template)
    messages = [{"role": "user", "content": question}]
    return template.render(messages=messages, add_generation_prompt=True, bos_token="", eos_token="")


def answers(model: Model, prompts: list[list[int]]) -> list[list[int]]:
    engine = Engine(model, EngineOptions(kv_bytes=2**28, max_running=len(prompts)))
    for key, ids in enumerate(prompts):
        engine.submit(Submission(key, len(ids), 40))
        engine.extend(key, np.asarray(ids, dtype="<u4").tobytes())
    drawn: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for step_tokens in engine.step().drawn:
            drawn[int(str(step_tokens.key))] += step_tokens.token_ids
    return drawn


def measure(contestants: dict[str, Contestant], rounds: int, tokens: int) -> dict[str, float]:
    """Median seconds per token of each contestant, in rounds in which they alternate."""
    for contestant in contestants.values():
        contestant.draw(2)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, contestant in contestants.items():
            started = time.perf_counter()
            contestant.draw(tokens)
            seconds[name].append((time.perf_counter() - started) / tokens)
    return {name: statistics.median(several) for name, several in seconds.items()}


def report_speed(models: dict[str, Model], network: Any, prompts: list[list[int]], asked: argparse.Namespace) -> None:
    contestants: dict[str, Contestant] = {"transformers bfloat16": Theirs(network, prompts)}
    contestants |= {f"pointsman {dtype}": Ours(model, prompts) for dtype, model in models.items()}
    if len(prompts) == 1:
        contestants |= dict(llama_cpp(asked, prompts))
    medians = measure(contestants, asked.rounds, asked.tokens)
    print(f"batch {len(prompts)}, context {asked.context}, {asked.threads} thread(s)")
    for name, seconds in medians.items():
        ratio = medians["transformers bfloat16"] / seconds
        print(f"  {name:24} {seconds * 1e3:8.1f} ms/step  {len(prompts) / seconds:8.1f} tok/s   {ratio:5.2f}x")


def llama_cpp(asked: argparse.Namespace, prompts: list[list[int]]) -> Iterator[tuple[str, Contestant]]:
    if importlib.util.find_spec("llama_cpp") is None:
        print("llama-cpp-python is not installed here; it is left out")
    elif asked.gguf is None:
        print("llama-cpp-python is installed, but --gguf names no model for it; it is left out")
    else:
        yield "llama.cpp", LlamaCpp(asked.gguf, prompts, asked.threads)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8, help="tokens drawn per sequence and round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=default_threads())
    parser.add_argument("--questions", type=int, default=100)
    parser.add_argument("--gguf", type=Path, default=None)
    asked = parser.parse_args()
    use_threads(asked.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        network = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SHAPE)).bfloat16().eval()
        network.save_pretrained(folder)
        models = {dtype: Model.load(folder, dtype=dtype) for dtype in DTYPES}
        for batch in asked.batches:
            report_speed(models, network, some_prompts(batch, asked.context, SHAPE["vocab_size"]), asked)
        models.clear()
        del network
        print("error of log-probabilities against float32, same weights")
        report_errors("Qwen3-0.6B, random", folder, some_prompts(3, 64, SHAPE["vocab_size"]))
    report_errors("bundled model", weights(), some_prompts(3, 256, 1536))
    report_answers(asked.questions)


if __name__ == "__main__":
    main()

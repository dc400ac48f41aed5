"""Engines on a CPU, side by side: this one against vLLM (bfloat16) and llama.cpp (eight bits).

The model has the shape of Qwen3-0.6B and random weights, made in `--folder`. Each engine runs in a process of its own,
from an environment of its own, with the same number of threads. They measure in turns, so that other work on the
machine meets all of them. Printed are tokens per CPU second, medians, and the median of the ratios within a round.
Prefixes are not reused: every measurement has new prompts. All engines are there at the same time and need 20 GB.

    make engines                                                    # vLLM
    pip install llama-cpp-python gguf                               # llama.cpp, in an environment of its own
    python -m benchmarks.engines_cpu --vllm .venv-engines/bin/python --llama OTHER/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
from pathlib import Path

import torch
import transformers

from benchmarks.decode_cpu import SHAPE

Sample = dict[str, float]
ROOT = Path(__file__).parents[1]


class Process:
    """One engine's process, which measures when asked."""

    def __init__(self, name: str, command: list[str], threads: int) -> None:
        self.name = name
        env = os.environ | {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
        log = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=env, cwd=ROOT
        )
        self._read("start")

    def measure(self, rows: int, context: int, tokens: int, seed: int) -> Sample:
        """The sample of `tokens` drawn after prompts of `context` tokens, or of the prompts themselves if it is 0."""
        wanted = {"rows": rows, "context": context, "tokens": tokens, "vocabulary": SHAPE["vocab_size"], "seed": seed}
        assert self._process.stdin is not None
        print(json.dumps(wanted), file=self._process.stdin, flush=True)
        sample: Sample = self._read("answer")
        return sample

    def end(self) -> None:
        """Have the process end."""
        self._process.communicate()

    def _read(self, purpose: str) -> Sample:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} did not {purpose}; run its program by hand to see why")
        read: Sample = json.loads(line)
        return read


def checkpoint(folder: Path) -> Path:
    """The folder with a checkpoint of Qwen3-0.6B's shape, made if it is not there."""
    if not (folder / "model.safetensors").exists():
        torch.manual_seed(0)
        config = transformers.Qwen3Config(**SHAPE, dtype="bfloat16")
        transformers.Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def commands(asked: argparse.Namespace) -> dict[str, list[str]]:
    """The engines that are there, and how each is started."""
    folder, threads = str(checkpoint(asked.folder)), str(asked.threads)
    ours = [sys.executable, "-m", "benchmarks.cpu_parts.ours_worker", folder]
    started = {"pointsman bfloat16": [*ours, "bfloat16", threads], "pointsman int8": [*ours, "int8", threads]}
    if asked.vllm:
        started["vllm bfloat16"] = [asked.vllm, "-m", "benchmarks.cpu_parts.vllm_worker", folder, "bfloat16"]
    if asked.llama:
        file = asked.folder / "q8_0.gguf"
        if not file.exists():
            convert = [asked.llama, "-m", "benchmarks.cpu_parts.write_gguf", folder, str(file)]
            subprocess.run(convert, check=True, cwd=ROOT)
        started["llama.cpp q8_0"] = [asked.llama, "-m", "benchmarks.cpu_parts.llama_worker", str(file), threads]
    return started


def report(title: str, tokens: int, samples: dict[str, list[Sample]]) -> None:
    """Print each engine's rate, and ours against its peer of the same width."""
    print(title, flush=True)
    for name, taken in samples.items():
        rates = [tokens / sample["cpu_seconds"] for sample in taken]
        line = f"  {name:20} {statistics.median(rates):9.1f} tokens per CPU second"
        ours = "pointsman bfloat16" if "bfloat16" in name else "pointsman int8"
        if name != ours:
            pairs = zip(samples[ours], taken, strict=True)
            ratios = [theirs["cpu_seconds"] / own["cpu_seconds"] for own, theirs in pairs]
            line += f"   pointsman is {statistics.median(ratios):.2f}x ({min(ratios):.2f} to {max(ratios):.2f})"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("build/qwen-shape"))
    parser.add_argument("--vllm", help="Python with vLLM")
    parser.add_argument("--llama", help="Python with llama-cpp-python and gguf")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8, help="tokens drawn per sequence and round")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    engines = [Process(name, command, asked.threads) for name, command in commands(asked).items()]
    measured = [(f"{rows} rows of {asked.context} tokens", rows, asked.context, asked.tokens) for rows in asked.batches]
    measured += [(f"a prompt of {tokens} tokens", 1, tokens, 0) for tokens in asked.prompts]
    for number, (title, rows, context, tokens) in enumerate(measured):
        samples: dict[str, list[Sample]] = {engine.name: [] for engine in engines}
        for turn in range(asked.rounds):
            for engine in engines:
                samples[engine.name].append(engine.measure(rows, context, tokens, 100 * number + turn))
        report(title, rows * tokens or context, samples)
    for engine in engines:
        engine.end()


if __name__ == "__main__":
    # as Ctrl-C: the programs that it has started end too
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    main()

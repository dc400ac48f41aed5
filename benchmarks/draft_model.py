"""A draft model on a CPU: the engine without drafts, with prompt lookup, and with a draft model besides, in turns.

No pair of a large and a small model of one family is at hand, so both are constructed from the bundled one. The large
model is the bundled one with further layers, with output matrices of zeros: they are computed and change nothing. The
small one is the bundled model itself, which then agrees in all tokens, or with noise in its matrices, so that it agrees
less often. So `agrees` is the best case, and the other rows show how the gain falls.

Prints tokens per second of CPU time without drafts, how many times as fast prompt lookup and the draft model are, in
medians over alternating rounds, and which share of the draft model's tokens was accepted. Answers are compared too:
all three must be the same.

    python -m benchmarks.draft_model --layers 36
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Hashable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks.speculation import Workload, spoken
from shards.bundled import weights
from shards.draft_model import DraftModel
from shards.engine import Engine, EngineOptions
from shards.model import Model
from shards.nouns import SamplingParams, Submission
from shards.threads import use_threads

NOISE = {"agrees": 0.0, "noise 0.1": 0.1, "noise 0.2": 0.2}
"""Standard deviations of the noise in a small model's matrices, as shares of the matrices' own."""


def deepened(source: Path, folder: Path, layers: int) -> Path:
    """The checkpoint `source` with `layers` layers, in `folder`. Those behind its own add zero: it draws the same."""
    config = json.loads((source / "config.json").read_text())
    own = config["num_hidden_layers"]
    tensors = load_file(source / "model.safetensors")
    for layer in range(own, layers):
        for name in [name for name in tensors if name.startswith(f"model.layers.{layer % own}.")]:
            copy = tensors[name].clone()
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                copy.zero_()
            tensors[name.replace(f"layers.{layer % own}.", f"layers.{layer}.", 1)] = copy
    return _written(source, folder, tensors, {**config, "num_hidden_layers": layers})


def perturbed(source: Path, folder: Path, noise: float, *, seed: int = 0) -> Path:
    """The checkpoint `source` in `folder`, with normal noise of `noise` times each matrix's standard deviation."""
    rng = torch.Generator().manual_seed(seed)
    tensors = load_file(source / "model.safetensors")
    for name, matrix in tensors.items():
        if matrix.dim() == 2:
            tensors[name] = matrix + noise * matrix.std() * torch.randn(matrix.shape, generator=rng)
    return _written(source, folder, tensors, json.loads((source / "config.json").read_text()))


def _written(source: Path, folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, object]) -> Path:
    folder.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(source / name, folder / name)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class Contestant:
    """One engine that lives through all rounds, as a shard does."""

    def __init__(self, model: Path, draft: Path | None, *, speculate: str) -> None:
        draft_model = None
        if draft is not None:
            draft_model = DraftModel(Model.load(draft), 2**28)
            draft_model.prepare(64)
        options = EngineOptions(kv_bytes=2**29, max_running=64, speculate=speculate)
        self.engine = Engine(Model.load(model), options, draft_model=draft_model)

    def run(self, work: Workload, number: int, temperature: float) -> tuple[float, dict[Hashable, list[int]]]:
        """Answer all prompts of a round, which arrive at once: CPU seconds for each token, and the answers."""
        answers: dict[Hashable, list[int]] = defaultdict(list)
        prompts = work.prompts(number)
        started = time.process_time()
        for place, ids in enumerate(prompts):
            sampling = SamplingParams(temperature=temperature, ignore_eos=True, seed=1000 * number + place)
            self.engine.submit(Submission(place, len(ids), work.tokens, sampling=sampling))
            self.engine.extend(place, np.asarray(ids, dtype="<u4").tobytes())
        while self.engine.has_work:
            report = self.engine.step()
            for drawn in report.drawn:
                answers[drawn.key] += drawn.token_ids
            self.load = report.load
        return (time.process_time() - started) / (len(prompts) * work.tokens), dict(answers)


def compare(large: Path, small: Path, work: Workload, rounds: int, *, temperature: float, name: str) -> None:
    """Print one row."""
    contestants = {
        "off": Contestant(large, None, speculate="off"),
        "lookup": Contestant(large, None, speculate="auto"),
        "model": Contestant(large, small, speculate="auto"),
    }
    seconds: dict[str, list[float]] = defaultdict(list)
    other = total = 0
    for number in range(rounds + 1):
        answers = {}
        for each in sorted(contestants, reverse=bool(number % 2)):
            token_s, answers[each] = contestants[each].run(work, number, temperature)
            # the first round warms up
            seconds[each] += [token_s] * bool(number)
        total += len(answers["off"])
        other += sum(answers[each] != answers["off"] for each in contestants)
    medians = {
        each: statistics.median(off / own for off, own in zip(seconds["off"], seconds[each], strict=True))
        for each in contestants
    }
    load = contestants["model"].load
    share = load.model_accepted_tokens / max(1, load.model_drafted_tokens)
    rate = 1 / statistics.median(seconds["off"])
    accepted = f"{share:4.0%} of {load.model_drafted_tokens} accepted"
    print(
        f"  {work.name}, temperature {temperature:g}, {name:10}: off {rate:6.1f} tok/s   "
        f"lookup {medians['lookup']:4.2f}x   with a draft model {medians['model']:4.2f}x   {accepted}   "
        f"other answers: {other} of {total}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    asked = parser.parse_args()
    use_threads(asked.threads)
    with tempfile.TemporaryDirectory() as directory:
        large = deepened(weights(), Path(directory) / "large", asked.layers)
        smalls = {
            name: perturbed(weights(), Path(directory) / str(noise), noise) if noise else weights()
            for name, noise in NOISE.items()
        }
        print(f"{asked.layers} layers against 3, {asked.prompt_tokens} tokens in, {asked.tokens} out", flush=True)
        for batch in asked.batches:
            work = spoken(batch, asked.prompt_tokens, asked.tokens, "chat")
            for temperature in (0.0, 1.0):
                for name, small in smalls.items():
                    compare(large, small, work, asked.rounds, temperature=temperature, name=name)


if __name__ == "__main__":
    main()

"""The engine's GPU side on one GPU in less than ten minutes, with nothing to download: weights are drawn at random.

Checks every kernel against its reference and every way to run a step against the others, then measures. Each figure is
compared with the limit of the hardware (a copy in device memory and a large matrix product, measured first), and with
torch's own attention and transformers' continuous batching on the same machine. A failing part affects only itself:
figures are saved as they come, parts that take too long are ended, and after a kernel that breaks the device's context
the rest continues in a new process.

It needs torch, Triton, a C compiler, numpy, xxhash and tokenizers, and transformers for the comparison.
In this order, each within ten minutes (compiled kernels are kept in ~/.triton):

    python benchmarks/gpu.py --dry-run                                          # does this script run? toy, no GPU
    python benchmarks/gpu.py --only kernels,checks --model Qwen3-0.6B,Llama-3.1-8B --json 1.json    # is it right?
    python benchmarks/gpu.py --only decode,prefill,times,tune --model Llama-3.1-8B --json 2.json    # is it fast?
    python benchmarks/gpu.py --only shared --model Llama-3.1-8B --json shared.json           # prefixes, in a minute
    python benchmarks/gpu.py --only sampler --model Llama-3.1-8B --json sampler.json         # draws, in a minute
    python benchmarks/gpu.py --only e2e,long --model Llama-3.1-8B,Qwen3-0.6B --json 3.json          # in the engine?
    python benchmarks/gpu.py --json 3.json --resume                             # the rest of a run that ended

If pytest is installed, the kernels' own tests run on the GPU too, with some minutes of compiling:

    python -m pytest -c /dev/null --rootdir . --import-mode importlib tests/shards/kernels --ignore-glob '*interpreted*'
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import importlib
import logging
import os
import platform
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

# it also runs from a bare checkout: a machine with a GPU may have torch and Triton, but no installation of this project
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PARTS = ("kernels", "checks", "decode", "shared", "sampler", "prefill", "times", "tune", "e2e", "long")
BY_MODEL = (
    ("checks", "graphs and running ahead", ("checks", "check_steps")),
    ("checks", "the engine's loop", ("checks", "check_engine")),
    ("decode", "decode attention", ("speed", "decode_attention")),
    ("decode", "decode steps", ("speed", "decode_model")),
    ("shared", "shared prefix, steps", ("shared", "shared_steps")),
    ("shared", "shared prefix, attention", ("shared", "shared_attention")),
    ("sampler", "sampler", ("sampler", "thresholds_and_draws")),
    ("prefill", "prefill attention", ("speed", "prefill_attention")),
    ("prefill", "short chunks", ("speed", "short_chunks")),
    ("prefill", "prompts", ("speed", "prefill_model")),
    ("times", "kernels of a step", ("times", "kernel_times")),
    ("tune", "decode's splits and warps", ("tune", "tune_decode")),
    ("tune", "prefill's tiles", ("tune", "tune_prefill")),
    ("e2e", "engine", ("e2e", "run_engine")),
    ("e2e", "running ahead", ("e2e", "compare_running_ahead")),
    ("e2e", "steps alone", ("e2e", "run_steps")),
    ("long", "long prompts", ("e2e", "run_long")),
)
MODELS = ("Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-14B")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, by comma: {', '.join(PARTS)}")
    parser.add_argument("--model", default=",".join(MODELS), help=f"models, by comma: {', '.join(MODELS)}")
    parser.add_argument("--minutes", type=float, default=9.0, help="parts that would end later are left out")
    parser.add_argument("--json", type=Path, help="file for the figures; default: $OUT/gpu.json, if $OUT is set")
    parser.add_argument("--resume", action="store_true", help="continue after the contents of the file of --json")
    parser.add_argument("--dry-run", action="store_true", help="toy sizes in Triton's interpreter, without a GPU")
    asked = parser.parse_args()
    asked.only, asked.model = asked.only.split(","), asked.model.split(",")
    for chosen, known in ((asked.only, PARTS), (asked.model, MODELS)):
        unknown = sorted(set(chosen) - set(known))
        if unknown:
            parser.error(f"{unknown[0]} is none of {', '.join(known)}")
    if asked.json is None and os.environ.get("OUT"):
        asked.json = Path(os.environ["OUT"]) / "gpu.json"
    return asked


def run_parts(report: Any, machine: Any, asked: argparse.Namespace) -> None:
    from benchmarks.gpu_parts import models

    sizes = models.DRY if asked.dry_run else models.REAL
    chosen = {"toy": models.TOY} if asked.dry_run else {name: models.MODELS[name] for name in asked.model}
    smallest = next(iter(chosen))
    if "kernels" in asked.only:
        measure_of("kernels", "check_kernels")(report, machine, sizes)
    if "checks" in asked.only:
        report.attempt("families", lambda: measure_of("checks", "check_families")(report, machine), needs_s=10)
    for part, label, where in BY_MODEL:
        for name, config in chosen.items():
            if part in asked.only:
                report.attempt(
                    f"{label}, {name}",
                    lambda where=where, name=name, config=config: measure_of(*where)(
                        report, machine, sizes, name, config
                    ),
                    needs_s=15,
                    # its parts have limits of their own
                    limit_s=60 * asked.minutes,
                )
                give_back(machine)
    if "e2e" in asked.only and chosen[smallest].query_key_norm:
        config = chosen[smallest]
        report.attempt(
            "transformers' continuous batching",
            lambda: measure_of("e2e", "run_transformers")(report, machine, sizes, smallest, config),
            needs_s=30,
        )


def measure_of(module: str, name: str) -> Any:
    """The measuring function, imported when its turn comes, so that a missing module affects only its own part."""
    return getattr(importlib.import_module(f"benchmarks.gpu_parts.{module}"), name)


def give_back(machine: Any) -> None:
    """Free the memory of one model before the next."""
    import torch

    gc.collect()
    if machine.is_gpu:
        torch.cuda.empty_cache()


def main() -> None:
    asked = arguments()
    if asked.dry_run:
        # before Triton is imported
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    if not asked.dry_run and not torch.cuda.is_available():
        sys.exit("torch sees no GPU here, and this benchmark needs one; --dry-run tries the script without it")
    import triton

    from benchmarks.gpu_parts.machine import Machine
    from benchmarks.gpu_parts.report import HEADING, Poisoned, Report

    logging.basicConfig(level=logging.INFO, format="         %(message)s")
    # a kernel that never ends cannot be interrupted: this reports where, and ends the process; the figures are saved
    faulthandler.dump_traceback_later(60 * asked.minutes + 15, exit=True)
    report = Report(deadline_s=time.monotonic() + 60 * asked.minutes, file=asked.json)
    if asked.resume:
        report.resume()
    report.is_alive = partial(answers, asked)
    machine = Machine.measure(torch.device("cpu" if asked.dry_run else "cuda"))
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    floors = {"copy_gb_s": machine.copy_gb_s, "matmul_tflops": machine.matmul_tflops}
    report.head = {"device": machine.name, "versions": versions, "dry_run": asked.dry_run, "floors": floors}
    report.save()
    print(f"{machine.name}; {', '.join(f'{name} {version}' for name, version in versions.items())}")
    print(
        f"floors: copy {machine.copy_gb_s:.0f} GB/s, product {machine.matmul_tflops:.3g} TFLOP/s\n{HEADING}", flush=True
    )
    try:
        run_parts(report, machine, asked)
    except Poisoned as name:
        print(f"POISONED {name}: the rest goes on in a new process", flush=True)
        if asked.json is not None:
            go_on(asked, report.deadline_s)
    report.print_table()
    if report.errors or not all(check["passed"] for check in report.checks):
        sys.exit(1)


def answers(asked: argparse.Namespace) -> bool:
    """Does the device still work? After a kernel has read outside its memory, every call fails."""
    import torch

    try:
        if not asked.dry_run:
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def go_on(asked: argparse.Namespace, deadline_s: float) -> None:
    """Replace this process by one that measures the remaining parts in the remaining time."""
    faulthandler.cancel_dump_traceback_later()
    minutes = max(0.0, deadline_s - time.monotonic()) / 60
    command = [sys.executable, __file__, "--only", ",".join(asked.only), "--model", ",".join(asked.model)]
    command += ["--json", str(asked.json), "--minutes", f"{minutes:.2f}", "--resume", *["--dry-run"] * asked.dry_run]
    sys.stdout.flush()
    os.execv(sys.executable, command)


if __name__ == "__main__":
    main()

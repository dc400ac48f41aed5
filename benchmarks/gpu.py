"""The engine's GPU side on one GPU in less than ten minutes, with nothing to download: weights are drawn at random.

Checks every kernel against its reference and every way to run a step against the others, then measures: each figure
stands beside what the hardware allows (a copy in device memory and a large matrix product, measured first), and beside
torch's own attention and transformers' continuous batching on the same machine. A part that fails costs only itself.

    python benchmarks/gpu.py --json gpu.json                          # everything
    python benchmarks/gpu.py --only kernels,checks                    # is it right?
    python benchmarks/gpu.py --only decode --model Llama-3.1-8B       # is it fast?
    python benchmarks/gpu.py --dry-run                                # does this script run? toy sizes, no GPU
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

# it runs from a bare checkout too: a machine with a GPU may have torch and Triton and nothing of ours installed
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

PARTS = ("kernels", "checks", "decode", "prefill", "e2e")
MODELS = ("Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-14B")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"parts, by comma: {', '.join(PARTS)}")
    parser.add_argument("--model", default=",".join(MODELS), help=f"models, by comma: {', '.join(MODELS)}")
    parser.add_argument("--minutes", type=float, default=9.5, help="what would end later than this is left out")
    parser.add_argument("--json", type=Path, help="where the figures go; default: $OUT/gpu.json, if $OUT is set")
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
    from benchmarks.gpu_parts import checks, e2e, kernels, models, speed

    sizes = models.DRY if asked.dry_run else models.REAL
    chosen = {"toy": models.TOY} if asked.dry_run else {name: models.MODELS[name] for name in asked.model}
    smallest = next(iter(chosen))
    if "kernels" in asked.only:
        kernels.check_kernels(report, machine, sizes)
    if "checks" in asked.only:
        report.attempt("families", lambda: checks.check_families(report, machine), needs_s=10)
    by_model = [
        ("checks", "graphs and running ahead", checks.check_steps),
        ("checks", "the engine's loop", checks.check_engine),
        ("decode", "decode attention", speed.decode_attention),
        ("decode", "decode steps", speed.decode_model),
        ("prefill", "prefill attention", speed.prefill_attention),
        ("prefill", "prompts", speed.prefill_model),
        ("e2e", "engine", e2e.run_engine),
        ("e2e", "running ahead", e2e.compare_running_ahead),
        ("e2e", "steps alone", e2e.run_steps),
    ]
    for part, label, measure in by_model:
        for name, config in chosen.items():
            if part in asked.only:
                report.attempt(
                    f"{label}, {name}",
                    lambda measure=measure, name=name, config=config: measure(report, machine, sizes, name, config),
                    needs_s=15,
                )
                give_back(machine)
    if "e2e" in asked.only and chosen[smallest].query_key_norm:
        config = chosen[smallest]
        report.attempt(
            "transformers' continuous batching",
            lambda: e2e.run_transformers(report, machine, sizes, smallest, config),
            needs_s=30,
        )


def give_back(machine: Any) -> None:
    """What one model held must not be missing to the next."""
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
        sys.exit("torch sees no GPU here, and this measures one; --dry-run tries the script itself without")
    import triton

    from benchmarks.gpu_parts.machine import Machine
    from benchmarks.gpu_parts.report import HEADING, Report

    logging.basicConfig(level=logging.INFO, format="         %(message)s")
    report = Report(deadline_s=time.monotonic() + 60 * asked.minutes)
    machine = Machine.measure(torch.device("cpu" if asked.dry_run else "cuda"))
    versions = {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()}
    print(f"{machine.name}; {', '.join(f'{name} {version}' for name, version in versions.items())}")
    print(f"floors: copy {machine.copy_gb_s:.0f} GB/s, product {machine.matmul_tflops:.3g} TFLOP/s\n{HEADING}")
    try:
        run_parts(report, machine, asked)
    finally:
        report.print_table()
        if asked.json is not None:
            head = {"device": machine.name, "versions": versions, "dry_run": asked.dry_run}
            floors = {"copy_gb_s": machine.copy_gb_s, "matmul_tflops": machine.matmul_tflops}
            asked.json.write_text(json.dumps(head | {"floors": floors} | report.as_json(), indent=1))
    if report.errors or not all(check["passed"] for check in report.checks):
        sys.exit(1)


if __name__ == "__main__":
    main()

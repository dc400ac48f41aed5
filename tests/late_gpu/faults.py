"""`python -m tests.late_gpu.faults`: faults that a GPU run may hide, put into the real code, and how each is noticed.

Each fault changes one place of a copy of the code, and one test runs on it, in a process of its own. Prints a table and
exits with 1 if a fault is not noticed. `python -m tests.late_gpu.faults race` runs those with this word in their names.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("shards", "policies", "tls", "backends", "http1", "tests", "pyproject.toml")
LIMIT_S = 1200
"""Seconds for one test: ten to a core of its own. A test that is late tells of the machine, and of no fault."""


@dataclass(frozen=True)
class Fault:
    """`old` in `file` becomes `new`; then `test` fails with a line that matches `sign`."""

    name: str
    file: str
    old: str
    new: str
    test: str
    sign: str

    def put_into(self, text: str) -> str:
        """`text` of the file with the fault. Raises RuntimeError if there is not one place for it."""
        if text.count(self.old) != 1:
            raise RuntimeError(f"{self.file} has {text.count(self.old)} places for the fault: {self.name}")
        return text.replace(self.old, self.new)


HERE = "tests/late_gpu/test_transfers.py"
KERNELS = "tests/shards/kernels"
DECODE = f"{KERNELS}/test_paged_decode.py::test_a_token_attends_to_its_context"
WRITE = f"{KERNELS}/test_kv_write.py::test_keys_and_values_are_where_they_belong"

FAULTS = (
    Fault(
        "race: every program writes the number of splits",
        "shards/kernels/paged_decode.py",
        "    if sequence == sequences - 1:\n",
        "    if sequence >= 0:\n",
        DECODE,
        r"program instances .* both touch",
    ),
    Fault(
        "race: all readers of a split write where the first one does",
        "shards/kernels/paged_decode.py",
        "tl.load(first_splits + reader, mask=is_read, other=0)",
        "tl.load(first_splits + sequence + 0 * reader, mask=is_read, other=0)",
        f"{KERNELS}/test_paged_decode.py::test_sinks_and_what_is_kept_of_a_context_are_the_same_for_several_sequences",
        r"two lanes of one store wrote",
    ),
    Fault(
        "out of bounds: a span is read beyond its last reader",
        "shards/kernels/paged_decode.py",
        "mask=in_item & (nth < count), other=-1)",
        "mask=in_item, other=-1)",
        f"{KERNELS}/test_paged_decode.py::test_sinks_and_what_is_kept_of_a_context_are_the_same_for_several_sequences",
        r"past the end",
    ),
    Fault(
        "race: two rows of the residual stream share a place",
        "shards/kernels/norm.py",
        "tl.store(stream + token * width + at, rounded, mask=mask)",
        "tl.store(stream + token // 2 * width + at, rounded, mask=mask)",
        f"{KERNELS}/test_norm.py::test_rows_are_normalised",
        r"program instances .* both touch",
    ),
    Fault(
        "out of bounds: a store without its mask",
        "shards/kernels/norm.py",
        "normal.to(out.dtype.element_ty), mask=mask)",
        "normal.to(out.dtype.element_ty))",
        f"{KERNELS}/test_norm.py::test_rows_are_normalised",
        r"writes \d+ element\(s\) past the end",
    ),
    Fault(
        "out of bounds: a weight is read beyond its end",
        "shards/kernels/norm.py",
        "tl.load(weight + at, mask=mask, other=0.0)",
        "tl.load(weight + at)",
        f"{KERNELS}/test_norm.py::test_rows_are_normalised",
        r"reads \d+ element\(s\) past the end",
    ),
    Fault(
        "out of bounds: tokens of padding are stored in the token pool",
        "shards/kernels/sampling.py",
        "        if place < places:\n",
        "        if place >= 0:\n",
        f"{HERE}::test_every_bucket_is_captured_and_gives_what_running_directly_gives",
        r"writes \d+ element\(s\) past the end|both touch",
    ),
    Fault(
        "race: two tiles of a row note their sums at one place",
        "shards/kernels/threshold.py",
        "tl.store(out + tile * _PIVOTS + tl.arange(0, _PIVOTS), total)",
        "tl.store(out + tile // 2 * _PIVOTS + tl.arange(0, _PIVOTS), total)",
        f"{KERNELS}/test_threshold.py::test_any_combination_leaves_what_the_reference_leaves",
        r"program instances .* both touch|assert \[",
    ),
    Fault(
        "out of bounds: more logits are gathered than there is room for",
        "shards/kernels/threshold.py",
        "mask=is_inside & (place < room))",
        "mask=is_inside)",
        f"{KERNELS}/test_threshold.py::test_rows_with_more_near_the_threshold_than_is_gathered_are_read_whole",
        r"writes \d+ element\(s\) past the end|both touch",
    ),
    Fault(
        "out of bounds: a slot is as long as the tokens before it",
        "shards/kernels/adjust.py",
        "tl.load(entries + slot * entries_row + token, mask=inside, other=0)",
        "tl.load(entries + slot * entries_row + token + 1, mask=inside, other=0)",
        f"{KERNELS}/test_adjust.py::test_greedy_rows_draw_the_tokens_and_logprobs_of_the_host_step_after_step",
        r"reads \d+ element\(s\) past the end|assert \d+ == \d+",
    ),
    Fault(
        "missing order: a step draws before its masks are sent",
        "shards/gpu/step.py",
        "        self._draws.send_masks(masks)\n        self._inbound.put(ticket, self._draw(computed))\n",
        "        self._inbound.put(ticket, self._draw(computed))\n        self._draws.send_masks(masks)\n",
        f"{HERE}::test_a_step_is_computed_before_its_masks_are_there_and_draws_by_them",
        r"masked is not None|assert None is not None|== 2",
    ),
    Fault(
        "wrong stride: heads lie as far apart as keys and values",
        "shards/kernels/kv_write.py",
        "at_kv = kv + block * kv_block + head * kv_head + offset * DIM + half",
        "at_kv = kv + block * kv_block + head * kv_side + offset * DIM + half",
        WRITE,
        r"writes \d+ element\(s\) past the end|both touch",
    ),
    Fault(
        "wrong stride: rows that lie apart are read as if side by side",
        "shards/kernels/norm.py",
        "tl.load(hidden + token * hidden_token + at",
        "tl.load(hidden + token * width + at",
        f"{KERNELS}/test_norm.py::test_rows_are_normalised",
        r"not close",
    ),
    Fault(
        "memory that was not written is read",
        "shards/kernels/paged.py",
        "        mask = mask & written[:, None]\n",
        "        mask = mask\n",
        DECODE,
        r"not close|nan",
    ),
    Fault(
        "out of bounds: tiles of padding look for pages",
        "shards/kernels/paged_prefill.py",
        "tl.minimum(tl.maximum(context - new_tokens + start + 1, 0) // BLOCK, end)",
        "tl.maximum(context - new_tokens + start + 1, 0) // BLOCK",
        f"{KERNELS}/test_paged_prefill.py::test_tokens_of_padding_are_zero_and_tiles_of_padding_need_no_page",
        r"past the end",
    ),
    Fault(
        "stale graph address: chunks are not sent to memory that the graph reads",
        "shards/gpu/step.py",
        "        fields = self._send(self._filled(step, decoding, tiles, layout), layout)\n",
        "        fields = layout.tensors(self._outbound.send(self._filled(step, decoding, tiles, layout)))\n",
        f"{HERE}::test_a_graph_with_chunks_reads_what_each_step_sends",
        r"index out of range",
    ),
    Fault(
        "missing event: a buffer is filled while it is copied to the GPU",
        "shards/gpu/transfers.py",
        "        if copied is not None:\n            copied.synchronize()\n",
        "",
        f"{HERE}::test_a_buffer_is_filled_again_only_once_it_was_copied",
        r"At index 0 diff: ",
    ),
    Fault(
        "missing event: tokens are read while they are copied to the host",
        "shards/gpu/transfers.py",
        "        _, copied = self._due.popleft()\n        copied.synchronize()\n",
        "        _, copied = self._due.popleft()\n",
        "tests/shards/gpu/test_decoder.py::test_running_ahead_changes_no_token",
        r"index out of range",
    ),
    Fault(
        "missing event: a copy counts as done when it was started",
        "shards/gpu/host.py",
        "self._landed < ticket and self._due[0][1].query():",
        "self._landed < ticket:",
        f"{HERE}::test_blocks_come_back_as_they_were_computed",
        # the copy to the host, or the one back
        r"NaN in the host's blocks|blocks that come back differ",
    ),
    Fault(
        "missing wait: blocks are copied before they are computed",
        "shards/gpu/host.py",
        "        self._stream.wait_stream(torch.cuda.current_stream(self._device))\n",
        "",
        f"{HERE}::test_blocks_come_back_as_they_were_computed",
        r"NaN in the host's blocks",
    ),
    Fault(
        "stale graph address: a step is sent to memory that the graph does not read",
        "shards/gpu/step.py",
        "fields = layout.tensors(self._outbound.send(host, self._static.input(layout.words)))",
        "fields = layout.tensors(self._outbound.send(host))",
        f"{HERE}::test_graphs_read_what_each_step_sends",
        r"not close",
    ),
    Fault(
        "stale graph address: tables move, the graph reads the old ones",
        "shards/gpu/step.py",
        "        logits = (self._decoding_adapted if adapts else self._decoding).run(bucket)\n",
        "        logits = (self._decoding_adapted if adapts else self._decoding).run(bucket)\n"
        "        self._static.tables = self._static.tables.clone()\n",
        f"{HERE}::test_graphs_read_what_each_step_sends",
        r"memory that was freed after its capture",
    ),
    Fault(
        "a step that is captured waits for the GPU",
        "shards/gpu/decoder.py",
        "        hidden, residual = self._embed(inputs.token_ids), None\n",
        "        hidden, residual = self._embed(inputs.token_ids.clamp(max=int(inputs.token_ids.max()))), None\n",
        f"{HERE}::test_graphs_read_what_each_step_sends",
        r"not permitted when stream is capturing",
    ),
    Fault(
        "mixed devices: a kernel is given memory of the host",
        "shards/gpu/step.py",
        'PrefillPlan(fields["first_queries"], fields["seen"]',
        'PrefillPlan(fields["first_queries"], fields["seen"].cpu()',
        f"{HERE}::test_graphs_read_what_each_step_sends",
        r"Pointer argument \(at \d+\) cannot be accessed",
    ),
)


def noticed(fault: Fault) -> str:
    """The line that tells of the fault; empty if its test passes. Raises RuntimeError if nothing could be tried."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / name, copy / name)
        (copy / fault.file).write_text(fault.put_into((copy / fault.file).read_text()))
        command = [sys.executable, "-m", "tests.late_gpu", "-q", "-x", "--tb=short", "-p", "no:cacheprovider"]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])}
        environment["TRITON_CACHE_DIR"] = str(copy / "compiled")
        try:
            done = subprocess.run(
                [*command, "--timeout=0", fault.test],
                cwd=copy,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"its test did not end within {LIMIT_S} s") from error
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return evidence_of(done.stdout, fault.sign)


def evidence_of(report: str, sign: str) -> str:
    """pytest's first line about what went wrong that matches `sign`; empty if there is none."""
    lines = re.findall(r"^E +(\S.*)$", report, re.MULTILINE)
    line = next((line for line in lines if re.search(sign, line)), "")
    if not line and lines:
        print(f"not a sign of the fault: {lines[0]}", file=sys.stderr)
    line = line.removeprefix("ttsem.sanitize.KernelFault: ")
    return line if len(line) <= 220 else f"{line[:217]}..."


def trials(faults: list[Fault]) -> Iterator[tuple[Fault, str]]:
    """Each fault with what told of it, in order, as they come."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        outcomes = [pool.submit(noticed, fault) for fault in faults]
        for fault, outcome in zip(faults, outcomes, strict=True):
            try:
                yield fault, outcome.result()
            except RuntimeError as error:
                print(f"{fault.name}: {error}", file=sys.stderr)
                yield fault, ""


def main(words: list[str]) -> int:
    """0 if each fault was noticed."""
    chosen = [fault for fault in FAULTS if all(word in fault.name for word in words)]
    missed = 0
    print("| fault | in | noticed by |\n|---|---|---|")
    for fault, evidence in trials(chosen):
        missed += not evidence
        print(f"| {fault.name} | `{fault.file}` | {evidence or '**nothing**'} |", flush=True)
    print(f"\n{len(chosen) - missed} of {len(chosen)} faults were noticed.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

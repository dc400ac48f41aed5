"""vLLM on CPUs, in one process. usage: PYTHON -m benchmarks.cpu_parts.vllm_worker FOLDER DTYPE"""

from __future__ import annotations

import contextlib
import os
import sys

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "3",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

from vllm import LLM, SamplingParams

from benchmarks.cpu_parts.worker import Prompts, serve


class Vllm:
    """Implements `benchmarks.cpu_parts.worker.Engine`."""

    def __init__(self, folder: str, dtype: str) -> None:
        self._engine = LLM(
            folder,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=9216,
            max_num_seqs=64,
            max_num_batched_tokens=2048,
            enable_prefix_caching=False,
            disable_log_stats=True,
        ).llm_engine
        self._count, self._keys = 0, list[str]()

    def start(self, prompts: Prompts) -> None:
        sampling = SamplingParams(temperature=0.0, max_tokens=512, ignore_eos=True, detokenize=False)
        for prompt in prompts:
            self._count += 1
            self._keys.append(str(self._count))
            self._engine.add_request(self._keys[-1], {"prompt_token_ids": prompt}, sampling)
        waiting = set(self._keys)
        while waiting:
            waiting -= {output.request_id for output in self._engine.step()}

    def draw(self, tokens: int) -> None:
        for _ in range(tokens):
            assert len(self._engine.step()) == len(self._keys), "a sequence was not computed"

    def end(self) -> None:
        self._engine.abort_request(self._keys)
        self._keys.clear()
        while self._engine.has_unfinished_requests():
            self._engine.step()


if __name__ == "__main__":
    # what the engine prints must not be taken for an answer
    with contextlib.redirect_stdout(sys.stderr):
        vllm = Vllm(*sys.argv[1:3])
    serve(vllm)

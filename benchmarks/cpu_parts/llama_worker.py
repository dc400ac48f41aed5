"""llama.cpp, through llama-cpp-python. usage: PYTHON -m benchmarks.cpu_parts.llama_worker FILE.gguf THREADS"""

from __future__ import annotations

import ctypes
import sys

import llama_cpp

from benchmarks.cpu_parts.worker import Prompts, serve

_MOST_ROWS, _MOST_TOKENS, _BATCH = 32, 33_000, 2048


class LlamaCpp:
    """Implements `benchmarks.cpu_parts.worker.Engine`."""

    def __init__(self, file: str, threads: str) -> None:
        llama_cpp.llama_backend_init()
        self._quiet = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._quiet, ctypes.c_void_p())
        self._model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = _MOST_TOKENS, _BATCH, 512, _MOST_ROWS
        params.n_threads = params.n_threads_batch = int(threads)
        params.kv_unified, params.no_perf = True, True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._sampler = llama_cpp.llama_sampler_init_greedy()
        self._batch = llama_cpp.llama_batch_init(_BATCH, 0, 1)
        self._positions, self._last = list[int](), list[int]()

    def start(self, prompts: Prompts) -> None:
        self._positions, self._last = [len(prompt) for prompt in prompts], [0] * len(prompts)
        entries = [
            (row, token, position, position == len(prompt) - 1)
            for row, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for begin in range(0, len(entries), _BATCH):
            self._decode(entries[begin : begin + _BATCH])

    def draw(self, tokens: int) -> None:
        for _ in range(tokens):
            self._decode([(row, self._last[row], position, True) for row, position in enumerate(self._positions)])
            self._positions = [position + 1 for position in self._positions]

    def end(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)

    def _decode(self, entries: list[tuple[int, int, int, bool]]) -> None:
        """Compute entries (row, token, position, whether a token is drawn behind it)."""
        batch = self._batch
        batch.n_tokens = len(entries)
        for index, (row, token, position, draws) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, draws
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, row
        if llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        for index, (row, _, _, draws) in enumerate(entries):
            if draws:
                self._last[row] = llama_cpp.llama_sampler_sample(self._sampler, self._context, index)


if __name__ == "__main__":
    serve(LlamaCpp(*sys.argv[1:3]))

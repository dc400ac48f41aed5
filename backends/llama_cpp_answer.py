"""One streamed answer of llama.cpp's `/completion`, from its bytes to Deltas. Pure but for its memory.

Source: llama.cpp, tools/server/README.md ("POST /completion").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from backends.openai_errors import error_in_stream
from backends.sse import SseDecoder
from policies.errors import BackendFailed
from policies.nouns import Delta, TokenLogprob, Usage

_FINISHES = {"limit": "length", "eos": "stop", "word": "stop", "none": "stop"}
_MISSHAPEN = (KeyError, TypeError, ValueError, AttributeError, msgspec.DecodeError)


class LlamaCppAnswer:
    """Fed with the body of a 200. The event with `stop` is the last: there is no [DONE].

    `wants_tops`: the most likely alternatives of drawn tokens are told beside them.
    """

    def __init__(self, backend: str, *, wants_tops: bool = False) -> None:
        self.is_over = False
        self._backend, self._wants_tops = backend, wants_tops
        self._events = SseDecoder()

    def __repr__(self) -> str:
        return f"<LlamaCppAnswer of {self._backend}: {'over' if self.is_over else 'open'}>"

    def feed(self, data: bytes) -> Iterator[Delta]:
        """What `data` adds. Raises BackendFailed at nonsense, and what an error event means."""
        for event in self._events.feed(data):
            if not self.is_over:
                yield from self._hear(event.data)

    def end(self) -> Iterator[Delta]:
        """Nothing more. Raises BackendFailed if the end came too early."""
        if not self.is_over:
            raise BackendFailed(f"{self._backend} ended its stream before it stopped")
        return iter(())

    def _hear(self, data: bytes) -> Iterator[Delta]:
        try:
            said = msgspec.json.decode(data)
            if said.get("error"):
                raise error_in_stream(self._backend, said["error"])
            delta = self._delta(said)
            last = self._last(said) if said["stop"] else ()
        except _MISSHAPEN as error:
            raise BackendFailed(f"{self._backend} answered nonsense: {data[:200].decode(errors='replace')}") from error
        if delta != Delta():
            yield delta
        yield from last

    def _delta(self, said: Mapping[str, Any]) -> Delta:
        progress = said.get("prompt_progress")
        if progress:
            # its `tokens` mean nothing
            return Delta(computed_tokens=int(progress["processed"]))
        entries = said.get("completion_probabilities") or ()
        return Delta(
            text=said["content"],
            token_ids=tuple(said.get("tokens") or ()),
            logprobs=tuple(self._logprob(entry) for entry in entries),
        )

    def _logprob(self, entry: Mapping[str, Any]) -> TokenLogprob:
        tops = entry.get("top_logprobs") or () if self._wants_tops else ()
        top = tuple(TokenLogprob(int(one["id"]), one["token"], float(one["logprob"])) for one in tops)
        return TokenLogprob(int(entry["id"]), entry["token"], float(entry["logprob"]), top)

    def _last(self, said: Mapping[str, Any]) -> tuple[Delta, ...]:
        self.is_over = True
        stop = str(said.get("stop_type") or "none")
        prompt, timings = int(said["tokens_evaluated"]), said.get("timings") or {}
        # before `cache_n` only the part that was computed is told
        cached = timings["cache_n"] if "cache_n" in timings else prompt - int(timings.get("prompt_n", prompt))
        usage = Usage(prompt, int(said["tokens_predicted"]), max(0, int(cached)))
        return (Delta(finish_reason=_FINISHES.get(stop, stop)), Delta(usage=usage))

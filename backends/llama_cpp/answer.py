"""One streamed answer of llama.cpp's `/completion`, from its bytes to Deltas. Pure but for its memory.

Source: llama.cpp, tools/server/README.md ("POST /completion").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from backends.http.errors import error_in_stream
from backends.http.event_answer import EventAnswer
from backends.http.nonsense import usage_told
from policies.nouns import Delta, TokenLogprob

_FINISHES = {"limit": "length", "eos": "stop", "word": "stop", "none": "stop"}


class LlamaCppAnswer(EventAnswer):
    """Fed with the body of a 200. The event with `stop` is the last: there is no [DONE].

    `wants_tops`: the most likely alternatives of drawn tokens are told beside them.
    """

    last_word = "a stop"

    def __init__(self, backend: str, *, wants_tops: bool = False) -> None:
        super().__init__(backend)
        self._wants_tops = wants_tops

    def _read(self, data: bytes) -> Iterator[Delta]:
        said = msgspec.json.decode(data)
        if said.get("error"):
            raise error_in_stream(self._backend, said["error"])
        delta = self._delta(said)
        if delta != Delta():
            yield delta
        if said["stop"]:
            yield from self._last(said)

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
        usage = usage_told(prompt, said["tokens_predicted"], max(0, int(cached)))
        word = said.get("stopping_word") or None
        return (Delta(finish_reason=_FINISHES.get(stop, stop), stop=word), Delta(usage=usage))

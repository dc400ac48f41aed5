"""One streamed answer of llama.cpp's `/completion`, from its bytes to Deltas. Pure but for its memory.

Source: llama.cpp, tools/server/README.md ("POST /completion").
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from backends.http.errors import error_in_stream
from backends.http.event_answer import EventAnswer
from backends.http.lenient_json import logprob_of, read_json
from backends.http.nonsense import REQUIRED, counts_in, reported_usage
from policies.nouns import Delta, TokenLogprob

_FINISHES = {"limit": "length", "eos": "stop", "word": "stop", "none": "stop"}


class LlamaCppAnswer(EventAnswer):
    """Fed with the body of a 200. The event with `stop` is the last: there is no [DONE].

    `wants_tops`: drawn tokens come with their most likely alternatives.
    """

    last_word = "a stop"

    def __init__(self, backend: str, *, wants_tops: bool = False) -> None:
        super().__init__(backend)
        self._wants_tops = wants_tops

    def _read(self, data: bytes) -> Iterator[Delta]:
        event = read_json(data)
        if event.get("error"):
            raise error_in_stream(self._backend, event["error"])
        delta = self._delta(event)
        if delta != Delta():
            yield delta
        if event["stop"]:
            yield from self._last(event)

    def _delta(self, event: Mapping[str, Any]) -> Delta:
        progress = event.get("prompt_progress")
        if progress:
            # its `tokens` mean nothing
            return Delta(computed_tokens=int(progress["processed"]))
        entries = event.get("completion_probabilities") or ()
        return Delta(
            text=event["content"],
            token_ids=tuple(event.get("tokens") or ()),
            logprobs=tuple(self._logprob(entry) for entry in entries),
        )

    def _logprob(self, entry: Mapping[str, Any]) -> TokenLogprob:
        tops = entry.get("top_logprobs") or () if self._wants_tops else ()
        top = tuple(TokenLogprob(int(each["id"]), each["token"], logprob_of(each["logprob"])) for each in tops)
        return TokenLogprob(int(entry["id"]), entry["token"], logprob_of(entry["logprob"]), top)

    def _last(self, event: Mapping[str, Any]) -> tuple[Delta, ...]:
        self.is_over = True
        stop = str(event.get("stop_type") or "none")
        timings = counts_in(event.get("timings"))
        prompt, completion = (event.get(name, REQUIRED) for name in ("tokens_evaluated", "tokens_predicted"))
        usage = reported_usage(prompt, completion, timings.get("cache_n"))
        if "cache_n" not in timings and "prompt_n" in timings:
            # before `cache_n`, only the computed part was reported
            computed = reported_usage(timings["prompt_n"], 0).prompt_tokens
            usage = replace(usage, cached_tokens=max(0, usage.prompt_tokens - computed))
        word = event.get("stopping_word") or None
        return (Delta(finish_reason=_FINISHES.get(stop, stop), stop=word), Delta(usage=usage))

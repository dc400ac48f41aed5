"""One streamed answer of `/generate` as SGLang and LMDeploy give it, from its bytes to Deltas. Pure but for its memory.

Source: SGLang documentation, "SGLang Native APIs"; LMDeploy's `/generate`, which follows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from backends.http.errors import error_in_stream, error_of
from backends.http.event_answer import EventAnswer
from backends.http.lenient_json import read_json
from backends.http.nonsense import REQUIRED, not_asked_for, reported_usage
from policies.errors import BackendErred, ExpectedError
from policies.nouns import Delta, TokenLogprob

_DONE = b"[DONE]"


@dataclass(slots=True)
class _Choice:
    """The totals of one choice so far: characters, tokens, log-probabilities."""

    text: int = 0
    tokens: int = 0
    logprobs: int = 0
    completion_tokens: int = 0


class GenerateAnswer(EventAnswer):
    """Fed with the body of a 200. Each event has a choice's text, ids, log-probabilities and state.

    `is_cumulative`: each event repeats all that came before, which is SGLang's usual way. There are
    `choices`. Usage comes last and once.
    """

    last_word = "[DONE]"

    def __init__(
        self,
        backend: str,
        *,
        is_cumulative: bool,
        choices: int = 1,
        error_of: Callable[[str, Any], ExpectedError] = error_in_stream,
    ) -> None:
        super().__init__(backend)
        self._is_cumulative, self._error_of = is_cumulative, error_of
        self._most_choices = choices
        self._choices: dict[int, _Choice] = {}
        self._prompt_tokens, self._cached_tokens = 0, 0

    def _read(self, data: bytes) -> Iterator[Delta]:
        if data == _DONE:
            self.is_over = True
            drawn = sum(choice.completion_tokens for choice in self._choices.values())
            yield Delta(usage=reported_usage(self._prompt_tokens or REQUIRED, drawn, self._cached_tokens))
            return
        chunk = read_json(data)
        if chunk.get("error"):
            raise self._error_of(self._backend, chunk["error"])
        delta = self._delta(chunk)
        if delta != Delta(choice=delta.choice):
            yield delta

    def _delta(self, chunk: Mapping[str, Any]) -> Delta:
        at, meta = int(chunk.get("index") or 0), chunk["meta_info"]
        if not 0 <= at < self._most_choices:
            raise not_asked_for(self._backend, at, self._most_choices)
        choice = self._choices.setdefault(at, _Choice())
        text, ids = chunk.get("text") or "", chunk.get("output_ids") or ()
        drawn, tops = meta.get("output_token_logprobs") or (), meta.get("output_top_logprobs") or ()
        if self._is_cumulative:
            text, ids = text[choice.text :], ids[choice.tokens :]
            drawn, tops = drawn[choice.logprobs :], tops[choice.logprobs :]
        choice.text, choice.tokens = choice.text + len(text), choice.tokens + len(ids)
        choice.logprobs += len(drawn)
        told = reported_usage(meta.get("prompt_tokens"), meta.get("completion_tokens"), meta.get("cached_tokens"))
        choice.completion_tokens = told.completion_tokens or choice.tokens
        self._prompt_tokens = told.prompt_tokens
        self._cached_tokens = max(self._cached_tokens, told.cached_tokens)
        finish = meta.get("finish_reason")
        stop = finish.get("matched") if finish else None
        return Delta(
            text=text,
            choice=at,
            token_ids=tuple(ids),
            logprobs=tuple(_logprobs(drawn, tops)),
            finish_reason=self._finish(finish),
            stop=stop if isinstance(stop, str) else None,
        )

    def _finish(self, finish: Mapping[str, Any] | None) -> str | None:
        """OpenAI's finish reason of a choice. Raises the error of an abort."""
        if finish is None:
            return None
        kind = str(finish["type"])
        if kind in ("abort", "error"):
            raise self._error_of(self._backend, {**finish, "code": finish.get("status_code")})
        return kind


def flat_error(backend: str, error: Any) -> ExpectedError:
    """The error in an SGLang event. Without a code it is the request's fault: the server checks it while it streams."""
    details = error if isinstance(error, Mapping) else {"message": error}
    code = details.get("code")
    if details.get("type") == "abort" and not isinstance(code, int):
        return BackendErred(f"{backend} broke the answer off: {details.get('message')}")
    status = code if isinstance(code, int) else 400
    return error_of(backend, status, msgspec.json.encode({"error": dict(details)}), {})


def _logprobs(drawn: Sequence[Sequence[Any]], tops: Sequence[Any]) -> Iterator[TokenLogprob]:
    for at, entry in enumerate(drawn):
        top = tops[at] if at < len(tops) else None
        yield _logprob(entry, tuple(_logprob(other) for other in top or ()))


def _logprob(entry: Sequence[Any], top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
    """[log-probability, id, text]; the text may be missing or null."""
    text = entry[2] if len(entry) > 2 else None
    return TokenLogprob(int(entry[1]), text or "", 0.0 if entry[0] is None else float(entry[0]), top)

"""Asks a server to compute a prompt and to keep its KV for another one. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from backends.base import Prefilled
from backends.http.exchange import Post, WholeBody, encoded
from backends.http.lenient_json import read_json
from backends.http.nonsense import MISSHAPEN, reported_usage
from backends.openai.prompt import completion_of
from policies.errors import BackendFailed
from policies.nouns import Delta, Prompt, Request

_MOST_BYTES = 16 << 20
"""Bytes of an answer: it names each block of KV, or each token of the prompt, in eight bytes or so."""

_OF_ANSWERS = ("stream_options", "max_completion_tokens", "min_tokens")
"""Fields of a body that do not go with an answer of one token."""


def prefill_post(request: Request, prompt: Prompt, fields: Mapping[str, Any]) -> Post:
    """The post that computes `prompt` and draws one token, with `fields` in place of the client's."""
    path, body = prompt.path, prompt.body
    if body is None:
        path, body = "/v1/completions", completion_of(request, prompt.token_ids)
    sent = {**body, **dict.fromkeys(_OF_ANSWERS), **fields, "stream": False, "max_tokens": 1}
    return Post(path, encoded({name: value for name, value in sent.items() if value is not None}), is_streamed=False)


class PrefillAnswer(WholeBody):
    """Reads the body of a 200; then `prefilled` is what it says. It gives no Deltas.

    `transfer_of` finds in the answer what the other server needs; None: the server keeps no KV, and `hint` says why.
    """

    limit_bytes = _MOST_BYTES
    backend: str
    transfer_of: Callable[[Mapping[str, Any]], Mapping[str, Any] | None]
    hint: str
    found: Prefilled | None = None

    @property
    def prefilled(self) -> Prefilled:
        """Raises BackendFailed if the body ended before it was whole."""
        if self.found is None:
            raise BackendFailed(f"{self.backend} answered nothing when asked for a prefill")
        return self.found

    def read(self, whole: bytes) -> list[Delta]:
        """None. Raises as for any other answer, and BackendFailed where the server keeps no KV."""
        try:
            answer = read_json(whole)
            transfer, usage = self.transfer_of(answer), answer.get("usage") or {}
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            used = reported_usage(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)
        except MISSHAPEN as error:
            raise BackendFailed(f"{self.backend} answered nonsense when asked for a prefill") from error
        if not isinstance(transfer, dict):
            raise BackendFailed(f"{self.backend} keeps no KV for others", hint=self.hint)
        self.found = Prefilled(transfer, used)
        return []

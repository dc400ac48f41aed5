"""What all dialects have in common: a dialect's Protocol, bodies that are read, answers that are collected, and the
headers with a client's limits.

The headers are those of OpenAI's API (its guide "Rate limits"): `x-ratelimit-limit-*`, `-remaining-*` and `-reset-*`,
for requests and tokens; a reset is a duration as Go prints it: `12ms`, `1s`, `6m0s`, `23h47m36.648s`. `Retry-After` is
in `router.protocols.status`. `x-pointsman-budget-used` is ours.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from backends.http.lenient_json import whole_characters
from backends.nesting import TooDeep, decode_json
from backends.openai.gathered import merge_message
from policies.errors import ExpectedError, InvalidRequest
from policies.nouns import Delta, TokenLogprob, Usage
from policies.quota.budget import Standing
from router.ask import Ask

_Fields = TypeVar("_Fields")

BUDGET_USED = "x-pointsman-budget-used"
"""The header for the budget of which most is used, once 80% of it are."""

_REASONING = ("reasoning_content", "reasoning")
"""Names of the model's reasoning at servers of open models; older and newer vLLM, for two."""


class Head(msgspec.Struct, frozen=True):
    """The fields that all pieces of one answer repeat. `created` is in seconds of Unix time."""

    id: str
    created: int
    model: str


class Answer(msgspec.Struct):
    """One choice of a whole answer, while its Deltas arrive."""

    texts: list[str] = []
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    message: dict[str, Any] = {}
    finish_reason: str | None = None
    stop: str | None = None
    body: bytes = b""

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def add(self, delta: Delta) -> None:
        """Add one piece."""
        self.texts.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.logprobs.extend(delta.logprobs)
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.stop = delta.stop or self.stop
        self.body = delta.body or self.body
        if delta.message:
            merge_message(self.message, delta.message)


def usage_sum(usages: Iterable[Usage]) -> Usage:
    """The usage of all prompts of a call together."""
    each = list(usages)
    return reduce(Usage.and_, each) if each else Usage()


def refusal_in(message: Mapping[str, Any]) -> str:
    """The text of a refusal in a message or a piece of one; OpenAI's models keep it apart from the answer's text."""
    return str(message.get("refusal") or "")


def thought_in(message: Mapping[str, Any]) -> str:
    """The reasoning in a message or a piece of one."""
    return next((str(message[name]) for name in _REASONING if message.get(name)), "")


class Failure(NamedTuple):
    """An error as a reply: HTTP status and JSON body."""

    status: int
    body: bytes


class Stream(Protocol):
    """Renders one streamed answer as server-sent events. Pure but for its own memory."""

    @property
    def has_begun(self) -> bool:
        """Whether events were rendered with which an answer begins, so that those of a backend are to be merged."""
        ...

    def begin(self, prompt_tokens: int) -> None:
        """A prompt of `prompt_tokens` goes to a backend; called again if another one is tried."""
        ...

    def resume(self, raw: bytes, characters: int) -> None:
        """Another backend continues the answer, of which the client has so many `characters`.

        `raw` are the newest of the first backend's own events; empty if all events were rendered here.
        """
        ...

    def progress(self, comment: str) -> bytes:
        """Bytes that keep the connection alive during prefill. Another backend may still be tried after them."""
        ...

    def render(self, index: int, delta: Delta) -> bytes:
        """The events for one piece of choice `index`; empty if it has nothing for the client."""
        ...

    def merge(self, first: int, raw: bytes) -> bytes:
        """A backend's own events for one of several prompts, or behind events of ours; its first choice gets number
        `first`."""
        ...

    def end(self, usage: Usage) -> bytes:
        """The events that end the stream."""
        ...

    def fail(self, error: ExpectedError) -> bytes:
        """The events that end the stream with `error`."""
        ...


class Dialect(Protocol):
    """One endpoint, the same for all calls. `prefix` begins the ids of its answers. `passes_on`: the body of a backend
    that speaks it is the answer to a call of one prompt, as it is.
    """

    prefix: str
    passes_on: bool

    def parse(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Ask:
        """The Ask of `body`. `headers` have lower-case names. Raises InvalidRequest."""
        ...

    def stream(self, head: Head, ask: Ask) -> Stream:
        """A renderer for the streamed answer to `ask`."""
        ...

    def whole(self, head: Head, ask: Ask, answers: Sequence[Answer], usage: Usage) -> bytes:
        """The JSON body of the answer to `ask`, if that is not streamed and no body was passed on."""
        ...

    def failure(self, error: ExpectedError) -> Failure:
        """The reply to a call that failed before any part of its answer was sent."""
        ...


def comment(text: str) -> bytes:
    """`text` as a comment of server-sent events, which clients skip (WHATWG HTML, section 9.2)."""
    return f": {text}\n\n".encode()


def decode(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`. Raises InvalidRequest."""
    return decode_whole(raw)[0]


def decode_whole(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The JSON object in `raw`, and its bytes for others.

    Halves of surrogate pairs, which clients make where they cut texts, are U+FFFD in both: they are no Unicode, and
    engines answer 500 to them. Raises InvalidRequest.
    """
    try:
        try:
            body = decode_json(raw)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            whole = whole_characters(raw)
            if whole == raw:
                raise
            body, raw = decode_json(whole), whole
    except UnicodeDecodeError as error:
        raise InvalidRequest(
            f"the body is not UTF-8: {error.reason} at byte {error.start}", hint="send UTF-8"
        ) from None
    except TooDeep as error:
        raise InvalidRequest(f"the body is {error}", hint="send a flatter JSON object") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}", hint="send one JSON object") from None
    if not isinstance(body, dict):
        raise InvalidRequest("the body is not a JSON object", hint="send {'model': ..., ...}")
    return body, raw


def converted(body: Mapping[str, Any], kind: type[_Fields], *, hints: Mapping[str, str], elsewhere: str) -> _Fields:
    """`body` as a `kind`. Raises InvalidRequest with the hint for the wrong field, or else with `elsewhere`."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at ")
        missing = re.search(r"missing required field `(\w+)`", what)
        param = ".".join(filter(None, (path.strip("`$."), missing[1] if missing else "")))
        hint = hints.get(re.split(r"[.\[]", param)[0], elsewhere)
        raise InvalidRequest(f"{param}: {what}" if param else what, hint=hint, param=param or None) from None


def members_beyond(
    body: Mapping[str, Any], fields: type[msgspec.Struct], *, idle: Collection[str], instead: Mapping[str, str]
) -> dict[str, Any]:
    """The other fields of `body`, for backends that read them under the same names; without null and `idle` ones.

    `instead` has fields of OpenAI's chats with another name here. Raises InvalidRequest for one of them, with the name
    to use.
    """
    more: dict[str, Any] = {}
    for name, value in body.items():
        if value is None or name in fields.__struct_fields__ or name in idle:
            continue
        if name in instead:
            raise InvalidRequest(f"`{name}` is not a field of this API", hint=instead[name], param=name)
        more[name] = value
    return more


def rate_limit_headers(standing: Standing) -> dict[str, str]:
    """Headers for each limit that the client has."""
    headers = {}
    for name, allowance in (("requests", standing.requests), ("tokens", standing.tokens)):
        if allowance is not None:
            headers[f"x-ratelimit-limit-{name}"] = str(allowance.limit)
            headers[f"x-ratelimit-remaining-{name}"] = str(allowance.remaining)
            headers[f"x-ratelimit-reset-{name}"] = _duration(round((allowance.reset_s or 0.0) * 1000))
    if standing.near:
        most = max(standing.near, key=lambda near: near.percent)
        # the name of an end user is the client's own text
        shown = most.meter.descriptor.kind
        headers[BUDGET_USED] = f"{most.percent}% of {most.meter}, {shown}"
    return headers


@lru_cache(maxsize=1024)
def _duration(total_ms: int) -> str:
    """Milliseconds as Go prints a duration: `0s`, `12ms`, `1.5s`, `6m0s`."""
    if 0 < total_ms < 1000:
        return f"{total_ms}ms"
    minutes, ms = divmod(total_ms, 60_000)
    hours, minutes = divmod(minutes, 60)
    text = f"{ms / 1000:g}s"
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text

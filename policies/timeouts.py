"""How long a request waits for its backend: for a first byte, a first token and between tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from policies.nouns import ServiceClass

FACTOR = 8.0
"""A backend that takes this many times what it takes in 99 of 100 cases is taken to hang."""

WHOLE_FACTOR = 3.0
"""The same for the decoding of an answer in one piece, of which the longest possible length counts."""

USUAL_PATIENCE_S = 10.0
"""Shortest timeout for a first token of a class without a target and without a deadline."""

_TARGETS, _DEADLINES = 4.0, 0.1
"""Shortest timeout for a first token of a class, in targets for the time to first token and in deadlines."""

_LATER = 2.0
"""Factor for a request that another backend failed already: the prediction may be wrong for all of them."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Floor and ceiling of a timeout, in seconds."""

    least_s: float
    most_s: float = 600.0

    def hold(self, seconds: float) -> float:
        """`seconds`, moved to the nearest bound if it lies outside."""
        return max(self.least_s, min(self.most_s, seconds))


@dataclass(frozen=True, slots=True)
class Timeouts:
    """The bounds of the three timeouts of requests at one backend."""

    first_byte: Bounds = Bounds(5.0)
    first_token: Bounds = Bounds(5.0)
    between_tokens: Bounds = Bounds(20.0)

    @property
    def least_s(self) -> float:
        """No timeout is shorter."""
        return min(self.first_byte.least_s, self.first_token.least_s, self.between_tokens.least_s)


USUAL = Timeouts()
"""The bounds for most kinds of backends."""

_THINKS = Timeouts(Bounds(60.0), Bounds(60.0), Bounds(60.0))
_LOADS = Timeouts(Bounds(120.0), Bounds(120.0))
_SLOW_KINDS = {"openai": _THINKS, "azure": _THINKS, "anthropic": _THINKS, "ollama": _LOADS}
"""Kinds of backends that may be silent for long: hosted models think unseen, Ollama loads a model when it is asked."""


def timeouts_of(kind: str) -> Timeouts:
    """The bounds for backends of this kind, unless the file sets others."""
    return _SLOW_KINDS.get(kind, USUAL)


def patience_s(service_class: ServiceClass | None) -> float:
    """Shortest timeout in seconds for a first token of a request of this class, within the bounds of its backend; None:
    of one that was promised nothing."""
    if service_class is None:
        return USUAL_PATIENCE_S
    if service_class.ttft_s is not None:
        return _TARGETS * service_class.ttft_s
    if service_class.deadline_s is not None:
        return max(USUAL_PATIENCE_S, _DEADLINES * service_class.deadline_s)
    return USUAL_PATIENCE_S


@dataclass(frozen=True, slots=True)
class SlowTimes:
    """What a backend takes for one request in 99 of 100 cases, in seconds.

    `first_byte_s` is None where it was not observed; `whole_s` is the decoding of the longest answer, where the answer
    comes in one piece, else 0. `gap_s` is one step of decoding behind all prefill that waits there.
    """

    first_byte_s: float | None
    first_token_s: float
    whole_s: float
    gap_s: float


def first_byte_s(bounds: Timeouts, slow: SlowTimes, patience: float, *, is_first_try: bool) -> float:
    """Timeout from sending a request to the first sign that its backend has it; at most that of the first token."""
    whole = first_token_s(bounds, slow, patience, is_first_try=is_first_try)
    if slow.first_byte_s is None or slow.whole_s:
        return whole
    # a long prompt is received and tokenized before the head of the answer
    usual = max(FACTOR * slow.first_byte_s, slow.first_token_s, patience)
    return min(whole, bounds.first_byte.hold(usual) * (1.0 if is_first_try else _LATER))


def first_token_s(bounds: Timeouts, slow: SlowTimes, patience: float, *, is_first_try: bool) -> float:
    """Timeout from sending a request, or from the last sign of its progress, to its first token."""
    held = bounds.first_token.hold(max(FACTOR * slow.first_token_s, patience))
    return held * (1.0 if is_first_try else _LATER) + WHOLE_FACTOR * slow.whole_s


def between_tokens_s(bounds: Timeouts, slow: SlowTimes) -> float:
    """Timeout from one piece of an answer to the next."""
    return bounds.between_tokens.hold(FACTOR * slow.gap_s)


@dataclass(frozen=True, slots=True)
class Overdue:
    """A backend is late with `what` (a noun): nothing for `quiet_s`, longer than its timeout.

    `is_beyond_most`: longer than the ceiling too, so that the request ends even if no other backend can take it.
    """

    what: str
    quiet_s: float
    is_beyond_most: bool


def overdue(what: str, quiet_s: float, timeout_s: float, bounds: Bounds) -> Overdue | None:
    """The Overdue of a request that has waited `quiet_s` for `what`; None within the timeout."""
    if quiet_s < timeout_s:
        return None
    return Overdue(what, quiet_s, quiet_s >= max(timeout_s, bounds.most_s))

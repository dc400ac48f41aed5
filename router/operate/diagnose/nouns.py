"""The results of a diagnosis, as they are in its JSON."""

from __future__ import annotations

import msgspec


class LoggedExample(msgspec.Struct, frozen=True):
    """A request of the log that shows a cause. `at_s` is its arrival in seconds since 1970.

    `amount` is in the unit of its list: tokens or seconds. `note` says what else is known of it.
    """

    request: str
    at_s: float
    backend: str
    amount: float
    note: str = ""


class TokenLoss(msgspec.Struct, frozen=True):
    """Cached tokens that were lost for one cause, `points` of the hit rate (100 points: all prompt tokens).

    `where` has the backends, or of `cache_domains` the tenants, that lost most of them, with their tokens.
    """

    cause: str
    meaning: str
    tokens: int
    points: float
    requests: int
    remedy: str
    where: tuple[tuple[str, int], ...] = ()
    examples: tuple[LoggedExample, ...] = ()


class HitRate(msgspec.Struct, frozen=True):
    """Why `measured_tokens` of `prompt_tokens` were cached, and not `ideal_tokens`: the losses in order.

    The tokens of all losses together are the ideal ones minus the measured ones. `unjudged` has the number of the other
    requests of the log, by the reason for which they are not in it.
    """

    requests: int
    prompt_tokens: int
    ideal_tokens: int
    measured_tokens: int
    losses: tuple[TokenLoss, ...]
    unjudged: dict[str, int] = {}

    @property
    def ideal(self) -> float:
        """The ideal hit rate, in percent."""
        return 100.0 * self.ideal_tokens / max(1, self.prompt_tokens)

    @property
    def measured(self) -> float:
        """The measured hit rate, in percent."""
        return 100.0 * self.measured_tokens / max(1, self.prompt_tokens)


class TimeCause(msgspec.Struct, frozen=True):
    """Seconds of missed targets that one cause took. In `requests` of them it took more than any other cause."""

    cause: str
    meaning: str
    seconds: float
    requests: int
    remedy: str
    examples: tuple[LoggedExample, ...] = ()


class MissedTarget(msgspec.Struct, frozen=True):
    """Why answers of the log missed one `target`, `TTFT` or `TPOT`. `requests` had the target, `missed` missed it.

    `seconds` is the sum of the missed ones' times, for `TPOT` those from the first to the last token: the seconds of
    all causes together. `unjudged` has the number of the other requests of the log, by reason.
    """

    target: str
    requests: int
    missed: int
    seconds: float
    causes: tuple[TimeCause, ...]
    unjudged: dict[str, int] = {}


class Diagnosis(msgspec.Struct, frozen=True):
    """The diagnosis of a log of `requests` from `first_s` to `last_s`. `notes` say what could not be attributed."""

    requests: int
    first_s: float
    last_s: float
    notes: tuple[str, ...]
    hit_rate: HitRate | None
    targets: tuple[MissedTarget, ...]

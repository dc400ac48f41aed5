"""Hints from answers of backends without cache events: how much of a prompt was cached."""

from __future__ import annotations

from typing import NamedTuple

_COUNTED_SHARE = 0.9
"""An evaluated count above this share of the prompt gives no information: some servers count cached tokens too."""

_CLEAR_SHARE = 0.25
"""Largest distance, relative to the gap between warm and cold prediction, at which a measured TTFT supports one."""

_NOTICEABLE_S = 0.1
"""Predictions closer than this cannot be distinguished: a queue or a network makes such differences."""


class Hint(NamedTuple):
    """`share` of a prompt was cached; `weight` in [0, 1] is the certainty."""

    share: float
    weight: float


def from_usage(cached_tokens: int, prompt_tokens: int) -> Hint:
    """From OpenAI's `usage.prompt_tokens_details.cached_tokens`, which is exact."""
    return Hint(min(1.0, cached_tokens / max(1, prompt_tokens)), 1.0)


def from_evaluated(evaluated_tokens: int | None, prompt_tokens: int) -> Hint | None:
    """From Ollama's `prompt_eval_count`: absent or small if a prefix was cached, the whole prompt if nothing was.

    None for a full count, because some versions always count the whole prompt.
    """
    if evaluated_tokens is None:
        return Hint(1.0, 0.5)
    share = evaluated_tokens / max(1, prompt_tokens)
    return None if share >= _COUNTED_SHARE else Hint(1.0 - share, 0.8)


def from_ttft(ttft_s: float, *, cold_s: float, warm_s: float, warm_share: float) -> Hint | None:
    """From a measured TTFT, with the predictions `cold_s` if nothing is cached and `warm_s` if `warm_share` of it is.

    None unless it is clearly close to one of them.
    """
    between_s = cold_s - warm_s
    if between_s < _NOTICEABLE_S:
        return None
    if ttft_s <= warm_s + _CLEAR_SHARE * between_s:
        return Hint(warm_share, 0.5)
    # an unseen queue delays a hit too, so slowness is weaker evidence
    return Hint(0.0, 0.25) if ttft_s >= cold_s - _CLEAR_SHARE * between_s else None

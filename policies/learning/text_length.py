"""The number of tokens of a prompt without a tokenizer, learned from the counts of backends, and of an answer. Pure.

A prompt's length is modelled as a sum: each of its parts (words, digits, ideographs, messages, ...) has a cost in
tokens that depends on the model's tokenizer and chat template.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import add, mul
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from policies.learning.cost import ObservationSample

PARTS = (
    "words",
    "word_middles",
    "word_ends",
    "glued_words",
    "capitals",
    "digits",
    "numbers",
    "punctuation",
    "punctuation_runs",
    "lines",
    "indents",
    "ideographs",
    "ideograph_runs",
    "two_byte",
    "three_byte",
    "four_byte",
)
"""The counted parts, in this order.

`word_middles` are letters behind the fourth of a word, `word_ends` those behind the eighth. `glued_words` begin without
a space before them, `capitals` are those behind another letter. `ideographs` are characters from U+3000 to U+9FFF, and
`ideograph_runs` begin behind ASCII; the last three are other characters by the bytes that they take in UTF-8.
"""

_LOWER, _UPPER, _DIGIT, _SPACE, _LINE, _MARK, _TWO, _IDEOGRAPH, _THREE, _FOUR, _REST, _CUT = range(12)
_KINDS = 12

SHORT = 512
"""Texts of up to so many characters together are counted without arrays: in half the time where the code is cold."""

WINDOWS, WINDOW_CHARACTERS = 128, 256
"""Of a text of more than twice as many characters, this number of windows is counted, evenly spaced. That is 0.7 % off
in the median for a megabyte of prose or code, and 2.6 % for one that changes its kind all the time."""


_GUESSED_ANSWER_TOKENS = 256
"""The length of an answer before any was seen."""

_ANSWER_SHARE = 0.05
"""Weight of one answer: the last forty dominate the mean."""


def _kinds() -> bytes:
    """The kind of each byte of UTF-8."""
    kinds = bytearray([_MARK] * 256)
    # between texts
    kinds[0] = _REST
    for first, last, kind in ((b"a", b"z", _LOWER), (b"A", b"Z", _UPPER), (b"0", b"9", _DIGIT), (b"\n", b"\r", _LINE)):
        kinds[first[0] : last[0] + 1] = bytes([kind]) * (last[0] - first[0] + 1)
    for space in b"\t ":
        kinds[space] = _SPACE
    for low, high, kind in ((0x80, 0xC0, _REST), (0xC0, 0xE0, _TWO), (0xE0, 0xF0, _THREE), (0xF0, 0x100, _FOUR)):
        kinds[low:high] = bytes([kind]) * (high - low)
    kinds[0xE3:0xEA] = bytes([_IDEOGRAPH]) * 7
    return bytes(kinds)


_KIND_OF = _kinds()


def _pairs() -> NDArray[np.float64]:
    """Row for each part, column for each pair of neighbouring kinds, before * _KINDS + after: 1 if the pair counts.

    Parts that depend on more than two neighbours have a row of zeros.
    """
    letters, blanks = {_LOWER, _UPPER}, {_SPACE, _LINE}
    counts: dict[str, Callable[[int, int], bool]] = {
        "words": lambda before, after: after in letters and before not in letters,
        "glued_words": lambda before, after: after in letters and before not in letters and before != _SPACE,
        "capitals": lambda before, after: after == _UPPER and before in letters,
        "digits": lambda _, after: after == _DIGIT,
        "numbers": lambda before, after: after == _DIGIT != before,
        "punctuation": lambda _, after: after == _MARK,
        "punctuation_runs": lambda before, after: after == _MARK != before,
        "lines": lambda before, after: after == _LINE != before,
        "indents": lambda before, after: after == _SPACE and before in blanks,
        "ideographs": lambda _, after: after == _IDEOGRAPH,
        "ideograph_runs": lambda before, after: after == _IDEOGRAPH and before != _REST,
        "two_byte": lambda _, after: after == _TWO,
        "three_byte": lambda _, after: after == _THREE,
        "four_byte": lambda _, after: after == _FOUR,
    }
    rows = [
        [
            part in counts and before != _CUT and counts[part](before, after)
            for before in range(_KINDS)
            for after in range(_KINDS)
        ]
        for part in PARTS
    ]
    return np.array(rows, np.float64)


_PAIRS = _pairs()
_BEFORE, _BETWEEN = bytes([_REST]), bytes([_CUT])
_MIDDLES, _ENDS = PARTS.index("word_middles"), PARTS.index("word_ends")


def _kept(kinds: tuple[int, ...]) -> bytes:
    """A table that makes spaces of all other kinds, `a` of these, and `A` of capitals."""
    return bytes([(ord("A") if kind == _UPPER else ord("a")) if kind in kinds else ord(" ") for kind in range(256)])


_LETTERS, _DIGITS, _SPACES, _LINES, _MARKS = map(_kept, ((_LOWER, _UPPER), (_DIGIT,), (_SPACE,), (_LINE,), (_MARK,)))
_BEGINS, _FOURTH, _EIGHTH = b" a", 4, 8
_SPACED, _SPACED_CAPITAL = bytes([_SPACE, _LOWER]), bytes([_SPACE, _UPPER])
_INDENT_OF_LINE, _NO_IDEOGRAPH = bytes([_LINE, _SPACE]), bytes([_REST, _IDEOGRAPH])


def composition(texts: Sequence[str]) -> list[float]:
    """The counts of PARTS in `texts` together; estimated for long texts.

    8 us for 200 characters, 0.3 ms for 64 KB, and 0.15 ms for any longer text.
    """
    text = texts[0] if len(texts) == 1 else "\0".join(texts)
    if len(text) > SHORT:
        return _of_long(text)
    kinds = _BEFORE + text.encode("utf-8", "replace").translate(_KIND_OF)
    letters, capitals, middles, ends = kinds.translate(_LETTERS), kinds.count(_UPPER), 0, 0
    split = letters.split()
    for length in map(len, split):
        if length > _FOURTH:
            middles += length - _FOURTH
            if length > _EIGHTH:
                ends += length - _EIGHTH
    words, first_capitals = len(split), capitals and letters.count(b" A")
    digits, spaces, lines, marks = kinds.count(_DIGIT), kinds.count(_SPACE), kinds.count(_LINE), kinds.count(_MARK)
    # a run begins behind another kind
    blanks = spaces and spaces - kinds.translate(_SPACES).count(_BEGINS)
    is_ascii = text.isascii()
    ideographs = 0 if is_ascii else kinds.count(_IDEOGRAPH)
    return [
        words,
        middles,
        ends,
        words - kinds.count(_SPACED) - kinds.count(_SPACED_CAPITAL),
        capitals - first_capitals,
        digits,
        digits and kinds.translate(_DIGITS).count(_BEGINS),
        marks,
        marks and kinds.translate(_MARKS).count(_BEGINS),
        lines and kinds.translate(_LINES).count(_BEGINS),
        blanks + (lines and kinds.count(_INDENT_OF_LINE)),
        ideographs,
        ideographs and ideographs - kinds.count(_NO_IDEOGRAPH),
        *((0, 0, 0) if is_ascii else map(kinds.count, (_TWO, _THREE, _FOUR))),
    ]


def _of_long(text: str) -> list[float]:
    """The counts by operations on arrays, of windows of a text that is twice as long as all of them."""
    size, share = WINDOWS * WINDOW_CHARACTERS, 1.0
    if len(text) > 2 * size:
        # the first character of a window is only what stands before the others
        step, share = (len(text) - WINDOW_CHARACTERS - 1) / (WINDOWS - 1), len(text) / size
        starts = [round(step * number) for number in range(WINDOWS)]
        windows = [text[start : start + WINDOW_CHARACTERS + 1] for start in starts]
        joined = _BETWEEN.join([window.encode("utf-8", "replace").translate(_KIND_OF) for window in windows])
    else:
        joined = _BEFORE + text.encode("utf-8", "replace").translate(_KIND_OF)
    kinds = np.frombuffer(joined, np.uint8)
    pairs = np.bincount(kinds[:-1] * _KINDS + kinds[1:], minlength=_KINDS * _KINDS)
    # of floats: of whole numbers it takes longer
    counts = _PAIRS @ pairs.astype(np.float64)
    letters = kinds <= _UPPER
    fourth = letters[1:] & letters[:-1]
    fourth = fourth[2:] & fourth[:-2]
    fifth = fourth[1:] & letters[:-4]
    counts[_MIDDLES] = np.count_nonzero(fifth)
    counts[_ENDS] = np.count_nonzero(fifth[4:] & fourth[:-5])
    found: list[float] = (counts * share).tolist()
    return found


Array = NDArray[np.float64]


class _Cost(NamedTuple):
    """The prior cost in tokens of one part of a prompt.

    `spread` is its standard deviation, as a share of it. `least` is the minimum with any tokenizer in use: one token
    for two words, or for twenty ideographs.
    """

    tokens: float
    spread: float
    least: float = 0.0


_COSTS = {
    "words": _Cost(1.0, 0.5, 0.5),
    "word_middles": _Cost(0.06, 1.0),
    "word_ends": _Cost(0.12, 1.0),
    # WordPiece makes one unknown token of letters and digits without a space between them, however many they are
    "glued_words": _Cost(0.1, 1.0, -0.5),
    "capitals": _Cost(0.25, 1.0),
    "digits": _Cost(0.45, 0.7),
    "numbers": _Cost(0.25, 1.0),
    "punctuation": _Cost(0.4, 0.6),
    "punctuation_runs": _Cost(0.4, 0.6),
    "lines": _Cost(0.7, 0.6),
    "indents": _Cost(0.1, 1.0),
    # 0.6 with vocabularies of 100,000 and more, up to 3 with small ones that fall back to bytes
    "ideographs": _Cost(0.8, 1.0, 0.05),
    "ideograph_runs": _Cost(0.2, 1.0),
    "two_byte": _Cost(0.7, 0.7),
    "three_byte": _Cost(1.0, 0.7),
    "four_byte": _Cost(2.0, 0.7),
    "texts": _Cost(1.0, 1.0),
    "chats": _Cost(6.0, 3.0),
    "messages": _Cost(5.0, 0.8),
    "tools": _Cost(6.0, 1.5),
    "tool_bytes": _Cost(0.25, 0.6),
}
_NAMES = tuple(_COSTS)
assert _NAMES[: len(PARTS)] == PARTS

_FIRST = np.array([cost.tokens for cost in _COSTS.values()])
_LEAST = np.array([cost.least for cost in _COSTS.values()])
_LEAST_OF_TEXT = tuple(_LEAST[: len(PARTS)].tolist())

_SHARED_SPREAD = 0.5
"""Standard deviation that all costs share: a small vocabulary makes all of them larger."""

_PRIOR = np.linalg.inv(np.diag([cost.spread**2 for cost in _COSTS.values()]) + _SHARED_SPREAD**2)
_PRIOR_PULL = _PRIOR.sum(axis=1)

_NOISE = 0.05
"""Standard deviation of a count, as a share of it, with all costs known: the parts do not explain everything."""

_KEPT = 128
"""Number of prompts that are kept, the newest: a model's behaviour changes with its backends."""

_FITS_EACH, _FITS_EVERY = 32, 8
"""The first prompts, this many, are each followed by a fit, later ones every eighth: a fit takes 0.2 ms."""

_LEARNT_PER_S = 10.0
"""Prompts that are learnt from, all models together, after a burst of `_KEPT`."""

_OUTLIER = 2.5
"""Errors beyond this multiple of the median count less and less (Huber's weight), and at least beyond `_NOISE`."""

_ROUNDS = 3
"""Number of refits in which prompts are weighted by the errors of the previous fit."""

_FIRST_ERROR, _FIRST_ERRORS = 0.1, 4
"""The expected error before any observation, and the number of observations that it counts as."""

_WITHIN = 1.64
"""Standard deviations to each side that hold nine counts of ten."""

_FEW_TOKENS = 512
"""Prompts of so many tokens fit wherever any prompt does: their range need not be narrow."""

MEDIA_TOKENS, MOST_MEDIA_TOKENS = 1024, 4096
"""Assumed tokens of an image, a sound or a file, and a number that few of them exceed."""

_MOST_PREAMBLE_TOKENS = 8192
"""The most tokens that a chat template adds to a prompt."""


class Measured(NamedTuple):
    """Measures of a prompt that was not tokenized: the count of each part, and the fewest and the most
    tokens that it can have. `media` counts its images, sounds and files, which are not in `parts`."""

    parts: tuple[float, ...]
    least: int
    most: int
    media: int = 0


class Estimate(NamedTuple):
    """`tokens` is the expected count; nine of ten prompts have `low` to `high`, and all have at least `least`."""

    tokens: int
    low: int
    high: int
    least: int


def measured(
    texts: Sequence[str],
    *,
    replies: Sequence[str] = (),
    is_chat: bool = False,
    tools: int = 0,
    tool_bytes: int = 0,
    media: int = 0,
) -> Measured:
    """The measures of a prompt of `texts`. In a chat these are its messages, and `replies` those of the assistant,
    parts of which templates omit. `tool_bytes` are those of its tools as compact JSON. 12 us for 200 characters.
    """
    surely = composition(texts)
    whole = [*map(add, surely, composition(replies))] if replies else surely
    messages = len(texts) + len(replies)
    characters = sum(map(len, texts)) + sum(map(len, replies)) + tool_bytes
    # what is not in the texts
    beside = (0, 1, messages, tools, tool_bytes) if is_chat else (1, 0, 0, 0, 0)
    return Measured(
        (*whole, *beside),
        max(1, int(sum(map(mul, surely, _LEAST_OF_TEXT)))),
        # a token has at least one byte
        4 * characters + 32 * messages + _MOST_PREAMBLE_TOKENS,
        media,
    )


class TextLength:
    """The prompt lengths of one model: the cost of each part, fitted to the newest counted prompts."""

    __slots__ = (
        *("_at", "_cost_of_each", "_costs", "_counts", "_errors", "_parts", "_spread_of_each", "_uncertainty"),
        *("error", "learnt"),
    )

    def __init__(self) -> None:
        self.learnt = 0
        self._parts, self._counts = np.zeros((0, len(_NAMES))), np.zeros(0)
        self._errors = np.zeros(0)
        self.error = _FIRST_ERROR
        """The typical error of an estimate, as a share, from the errors before each kept prompt was learned."""
        self._at = 0
        self._hold(_FIRST.copy(), np.linalg.inv(_PRIOR))

    def __repr__(self) -> str:
        return f"<TextLength after {self.learnt} prompts, {self.error:.1%} off>"

    def estimate(self, prompt: Measured) -> Estimate:
        """The estimated tokens of `prompt`. 20 us for one of more than _FEW_TOKENS, and 5 us for others: these have a
        wider range, as if all of their costs were wrong in the same direction, since they are shorter than any limit.
        """
        text = max(1.0, sum(map(mul, self._cost_of_each, prompt.parts)))
        if text <= _FEW_TOKENS:
            variance = sum(map(mul, self._spread_of_each, prompt.parts)) ** 2
        else:
            parts = np.array(prompt.parts)
            variance = float(parts @ self._uncertainty @ parts)
        deviation = math.sqrt(self.error**2 + variance / text**2)
        factor = math.exp(min(_WITHIN * deviation, 3.0))
        least, most, media = prompt.least, prompt.most, prompt.media
        likely = max(least, min(most, round(text)))
        low, high = max(least, min(most, round(text / factor))), max(least, min(most, round(text * factor)))
        return Estimate(
            likely + MEDIA_TOKENS * media,
            min(likely, low) + media,
            max(likely, high) + MOST_MEDIA_TOKENS * media,
            least,
        )

    def learn(self, prompt: Measured, tokens: int) -> None:
        """Learn that a backend counted `tokens` of `prompt`. Impossible counts and prompts with media are ignored."""
        if prompt.media or not prompt.least <= tokens <= prompt.most:
            return
        error = math.log(max(1.0, sum(map(mul, self._cost_of_each, prompt.parts))) / tokens)
        if len(self._counts) < _KEPT:
            self._parts = np.vstack((self._parts, prompt.parts))
            self._counts = np.append(self._counts, float(tokens))
            self._errors = np.append(self._errors, error)
        else:
            self._parts[self._at], self._counts[self._at], self._errors[self._at] = prompt.parts, tokens, error
            self._at = (self._at + 1) % _KEPT
        self.learnt += 1
        seen, usual = len(self._errors), 1.48 * _median(np.abs(self._errors))
        self.error = math.sqrt((_FIRST_ERRORS * _FIRST_ERROR**2 + seen * usual**2) / (_FIRST_ERRORS + seen))
        if self.learnt <= _FITS_EACH or self.learnt % _FITS_EVERY == 0:
            self._fit()

    def check(self) -> None:
        """Assert that costs are finite and not negative, and that the bounds on memory hold."""
        assert np.isfinite(self._costs).all(), f"{self!r}: a cost is no number"
        assert (self._costs >= 0.0).all(), f"{self!r}: a cost is negative"
        assert len(self._counts) == len(self._parts) == len(self._errors) <= _KEPT, f"{self!r}: remembers too much"

    def _fit(self) -> None:
        """Ridge regression of relative errors towards the first costs, robust (Huber, Robust Statistics, 1981), with
        no cost below zero. In units of the first costs, so that rare and frequent parts have equal weight."""
        rows = self._parts * (_FIRST / self._counts[:, None])
        costs, weights = self._costs / _FIRST, np.ones(len(rows))
        for _ in range(_ROUNDS):
            if self.learnt > _FIRST_ERRORS:
                errors = np.abs(rows @ costs - 1.0)
                weights = np.minimum(1.0, max(_NOISE, _OUTLIER * _median(errors)) / np.maximum(errors, 1e-9))
            weighted = rows.T * (weights / _NOISE**2)
            matrix = weighted @ rows + _PRIOR
            costs = _solved(matrix, weighted.sum(axis=1) + _PRIOR_PULL)
        self._hold(costs * _FIRST, np.linalg.inv(matrix))

    def _hold(self, costs: Array, uncertainty: Array) -> None:
        """Estimate with these `costs`, known but for the covariance `uncertainty` in units of the first costs."""
        self._costs, self._uncertainty = costs, uncertainty * np.outer(_FIRST, _FIRST)
        # few numbers are multiplied faster without arrays
        self._cost_of_each: list[float] = costs.tolist()
        self._spread_of_each: list[float] = np.sqrt(np.diag(self._uncertainty)).tolist()


class TextLengths:
    """The prompt lengths of several models, by name; beyond `most`, the least recently used one is dropped."""

    def __init__(self, most: int = 256) -> None:
        self._most = most
        self._observed = ObservationSample(per_s=_LEARNT_PER_S, burst=_KEPT)
        self._models: OrderedDict[str, TextLength] = OrderedDict()

    def __repr__(self) -> str:
        return f"<TextLengths of {len(self._models)} models>"

    def of(self, model: str) -> TextLength:
        """The TextLength of `model`, by its backends' name."""
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = TextLength()
        self._models.move_to_end(model)
        if len(self._models) > self._most:
            self._models.popitem(last=False)
        return known

    def learn(self, model: str, prompt: Measured, tokens: int, *, now: float) -> None:
        """Learn at `now` that a backend of `model` counted `tokens` of `prompt`; from a sample at high rates."""
        if self._observed.takes(now):
            self.of(model).learn(prompt, tokens)

    def check(self) -> None:
        """Assert that each is correct and that there are not too many."""
        assert len(self._models) <= self._most, f"{self!r}: too many"
        for lengths in self._models.values():
            lengths.check()


class AnswerLengths:
    """Mean tokens of answers, by tenant and service class, because callers of one class ask for similar things."""

    def __init__(self) -> None:
        self._means: dict[tuple[str, str], float] = {}

    def __repr__(self) -> str:
        return f"<AnswerLengths of {len(self._means)} kinds>"

    def expected(self, tenant: str, service_class: str, *, most: int) -> int:
        """Expected tokens of an answer that has at most `most`; at least one."""
        mean = self._means.get((tenant, service_class), _GUESSED_ANSWER_TOKENS)
        return max(1, min(most, round(mean)))

    def learn(self, tenant: str, service_class: str, tokens: int) -> None:
        """Record an answer of `tokens`."""
        kind = (tenant, service_class)
        mean = self._means.get(kind, float(tokens))
        self._means[kind] = mean + _ANSWER_SHARE * (tokens - mean)


def _solved(matrix: Array, pull: Array) -> Array:
    """The solution, with costs that would be negative set to 0."""
    costs = np.asarray(np.linalg.solve(matrix, pull), np.float64)
    free = np.ones(len(pull), np.bool_)
    while (costs < 0.0).any():
        free &= costs > 0.0
        costs = np.zeros(len(pull))
        costs[free] = np.linalg.solve(matrix[np.ix_(free, free)], pull[free])
    return costs


def _median(values: Array) -> float:
    """The median of `values`, of which there is at least one. np.median takes ten times as long for so few."""
    ordered = np.sort(values)
    return float(ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

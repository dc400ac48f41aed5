"""Reach: the requests that each rule still gets, and whether every request matches one. Exact, by cutting boxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from policies.nouns import Tenant
from policies.rules import FACTS, Fact, Range, Rule, When, may_use

Box: TypeAlias = tuple[int, ...]
"""Requests by their values in the rules' conditions: per dimension a bit for each piece."""

_FIRST = ("tenant", "model", "priority", "prompt_tokens", "uncached_tokens")
_TENANT, _MODEL, _PRIORITY, _PROMPT, _UNCACHED = range(len(_FIRST))
"""The facts that a proof knows more of than their values; their dimensions come first."""

_MOST_BOXES = 10_000
_MOST_CUTS = 300_000
"""Work limit for one file, a few seconds. Rules beyond it were hardly written by a person."""


class TooManyRulesError(Exception):
    """The proof would take too long."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """One field that rules test, cut into the fewest `pieces` that no rule distinguishes.

    A piece is a text, a Range of numbers, or None: every other text, and no text at all.
    """

    name: str
    pieces: tuple[str | Range | None, ...]
    places: Mapping[str | Range | None, int]

    @classmethod
    def of(cls, name: str, pieces: Sequence[str | Range | None]) -> Dimension:
        """The dimension with these pieces, each once."""
        once = tuple(dict.fromkeys(pieces))
        return cls(name, once, {piece: at for at, piece in enumerate(once)})

    @property
    def whole(self) -> int:
        """All of it."""
        return (1 << len(self.pieces)) - 1

    def mask(self, wanted: Sequence[str | Range]) -> int:
        """The pieces that match any entry of `wanted`; all of them if it is empty."""
        if not wanted:
            return self.whole
        bits = 0
        for entry in wanted:
            if isinstance(entry, Range):
                inside = (at for at, piece in enumerate(self.pieces) if _is_inside(piece, entry))
                bits |= sum(1 << at for at in inside)
            else:
                bits |= 1 << self.places[entry]
        return bits

    def described(self, mask: int, *, last: bool = False) -> str:
        """The first piece of `mask`, or the last, in words; empty if `mask` is everything."""
        if mask == self.whole:
            return ""
        piece = self.last(mask) if last else self.first(mask)
        return f"{self.name} {piece}" if piece is not None else f"no {self.name} that a rule names"

    def first(self, mask: int) -> str | Range | None:
        """The first piece of `mask`."""
        return self.pieces[(mask & -mask).bit_length() - 1]

    def last(self, mask: int) -> str | Range | None:
        """The last piece of `mask`."""
        return self.pieces[mask.bit_length() - 1]


class Reach:
    """The requests that the `rules` of one file reach, for these `tenants` and classes. A rule is skipped for a tenant
    that may not use its class.
    """

    def __init__(self, rules: Sequence[Rule], tenants: Mapping[str, Tenant], classes: Sequence[str]) -> None:
        self._rules, self._tenants = rules, tuple(tenants.values())
        whens = [rule.when for rule in rules]
        models = [name for tenant in self._tenants for name in sorted(tenant.models)]
        self._dimensions = (
            Dimension.of("tenant", list(tenants)),
            Dimension.of("model", [*models, *(name for when in whens for name in when.model), None]),
            Dimension.of("priority", [*classes, None]),
            *(_numbers(name, whens) for name in ("prompt_tokens", "uncached_tokens")),
            *(found for name, fact in FACTS.items() if name not in _FIRST for found in _others(name, fact, whens)),
        )
        self._models_of = [self._dimensions[_MODEL].mask(sorted(tenant.models)) for tenant in self._tenants]
        self._asked = [self._box(rule.when) for rule in rules]
        self._served = [self._usable(box, rule) for box, rule in zip(self._asked, rules, strict=True)]
        self._cuts = 0

    def contradiction(self, number: int) -> str:
        """Why no request can match rule `number`, regardless of earlier rules; empty if one can."""
        box = self._served[number]
        if not box[_TENANT]:
            return f"none of its tenants may use class '{self._rules[number].service_class}'"
        if not self._is_cacheable(box):
            return "uncached_tokens are never more than prompt_tokens"
        return "" if self._is_allowed(box) else "none of its tenants may use its models"

    def takers(self, number: int) -> tuple[int, ...]:
        """The earlier rules that together take every request of rule `number`; empty if some request is left.

        Raises TooManyRulesError.
        """
        box = self._served[number]
        left, takers = [box], []
        for at in self._overlapping(box, before=number):
            before, left = left, self._cut(left, self._served[at])
            if left != before:
                takers.append(at)
            if not left:
                alone = (
                    taker for taker in takers if not any(map(self._is_possible, _without(box, self._served[taker])))
                )
                return next(((taker,) for taker in alone), tuple(takers))
        return ()

    def unmatched(self) -> str:
        """A kind of request that matches no rule, in words; empty if it is proven that every request matches one."""
        if any(rule.when == When() for rule in self._rules):
            return ""
        try:
            return self._described(self._left([dimension.whole for dimension in self._dimensions], self._asked))
        except TooManyRulesError:
            return "too many different conditions to tell which"

    def unserved(self, tenant: str) -> str:
        """A kind of request of `tenant` that matches no rule with an allowed class, in words; empty if there is none.

        Raises TooManyRulesError.
        """
        whole = [dimension.whole for dimension in self._dimensions]
        whole[_TENANT] = self._dimensions[_TENANT].mask((tenant,))
        if any(rule.when == When() and whole[_TENANT] & box[_TENANT] for rule, box in self._pairs()):
            return ""
        return self._described(self._left(whole, self._served))

    def _left(self, whole: Sequence[int], taken: Sequence[Box]) -> list[Box]:
        left = [tuple(whole)]
        for box in taken:
            left = self._cut(left, box)
        return left

    def _described(self, left: Sequence[Box]) -> str:
        """One kind of request of the first box: the tenant may use the model, and the prompt is long enough."""
        if not left:
            return ""
        box = left[0]
        user = next(
            at for at in range(len(self._tenants)) if box[_TENANT] >> at & 1 and box[_MODEL] & self._models_of[at]
        )
        box = (1 << user, box[_MODEL] & self._models_of[user], *box[_PRIORITY:])
        pairs = enumerate(zip(self._dimensions, box, strict=True))
        parts = (dimension.described(mask, last=at == _PROMPT) for at, (dimension, mask) in pairs)
        return ", ".join(filter(None, parts)) or "any"

    def _box(self, when: When) -> Box:
        named = [name for name, fact in FACTS.items() if fact.form == "named"]
        asked = {f"{name}.{entry}": values for name in named for entry, values in getattr(when, name)}
        return tuple(
            dimension.mask(asked.get(dimension.name, ()) if "." in dimension.name else getattr(when, dimension.name))
            for dimension in self._dimensions
        )

    def _usable(self, box: Box, rule: Rule) -> Box:
        users = sum(1 << at for at, tenant in enumerate(self._tenants) if may_use(tenant, rule.service_class))
        return (box[_TENANT] & users, *box[_TENANT + 1 :])

    def _pairs(self) -> Iterator[tuple[Rule, Box]]:
        return zip(self._rules, self._served, strict=True)

    def _overlapping(self, box: Box, *, before: int) -> Sequence[int]:
        """The rules before number `before` that share a piece with `box` in every dimension; usually few."""
        found: Sequence[int] = range(before)
        for at, mask in enumerate(box):
            if mask != self._dimensions[at].whole:
                # about as much work as this many cuts
                self._spend(len(found) // 16)
                found = [number for number in found if self._served[number][at] & mask]
        return found

    def _cut(self, boxes: Sequence[Box], taken: Box) -> list[Box]:
        self._spend(len(boxes))
        left = [rest for box in boxes for rest in _without(box, taken) if self._is_possible(rest)]
        if len(left) > _MOST_BOXES:
            raise TooManyRulesError
        return left

    def _spend(self, cuts: int) -> None:
        self._cuts += cuts
        if self._cuts > _MOST_CUTS:
            raise TooManyRulesError

    def _is_possible(self, box: Box) -> bool:
        return self._is_cacheable(box) and self._is_allowed(box)

    def _is_cacheable(self, box: Box) -> bool:
        """Whether its prompt is at least as long as the uncached part."""
        longest = self._dimensions[_PROMPT].last(box[_PROMPT])
        least = self._dimensions[_UNCACHED].first(box[_UNCACHED])
        assert isinstance(longest, Range)
        assert isinstance(least, Range)
        # an empty prompt counts as one uncached token
        return longest.most is None or (least.least or 0) <= max(1, longest.most)

    def _is_allowed(self, box: Box) -> bool:
        """Whether a tenant may use one of the models."""
        return any(box[_TENANT] >> at & 1 and box[_MODEL] & models for at, models in enumerate(self._models_of))


def _without(box: Box, taken: Box) -> Iterator[Box]:
    """The part of `box` outside `taken`, in boxes that do not overlap."""
    for mine, theirs in zip(box, taken, strict=True):
        if not mine & theirs:
            yield box
            return
    for at, theirs in enumerate(taken):
        if outside := box[at] & ~theirs:
            yield (*box[:at], outside, *box[at + 1 :])
            box = (*box[:at], box[at] & theirs, *box[at + 1 :])


def _is_inside(piece: str | Range | None, span: Range) -> bool:
    return isinstance(piece, Range) and span.holds(piece.least or 0)


def _numbers(name: str, whens: Sequence[When]) -> Dimension:
    spans = [span for when in whens for span in getattr(when, name)]
    starts = {0} | {span.least for span in spans if span.least is not None}
    starts |= {span.most + 1 for span in spans if span.most is not None}
    ordered = sorted(starts)
    ends = [start - 1 for start in ordered[1:]]
    return Dimension.of(name, [Range(start, end) for start, end in zip(ordered, [*ends, None], strict=True)])


def _others(name: str, fact: Fact, whens: Sequence[When]) -> Iterator[Dimension]:
    """The dimensions of a fact that the proof knows only the values of."""
    wanted = [entry for when in whens for entry in getattr(when, name)]
    if fact.form == "number":
        yield _numbers(name, whens)
    elif fact.form == "named":
        values: dict[str, list[str | Range | None]] = {}
        for entry, texts in wanted:
            values.setdefault(entry, []).extend(texts)
        yield from (Dimension.of(f"{name}.{entry}", [*found, None]) for entry, found in values.items())
    elif isinstance(fact.known, tuple):
        yield Dimension.of(name, fact.known)
    else:
        yield Dimension.of(name, [*wanted, None])

"""Parity: do an engine's answers and cache events agree with the router's computation for the same prompts? Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

_REMEMBERED = 20
"""Comparisons that count: older ones are forgotten."""

_RECENT, _BAD_OF_RECENT = 8, 6
"""Number of differences among the last 8 comparisons that cannot be accidental."""

_LEAST_GOOD = 4
"""Comparisons that are needed before events are used alone."""

_FORGIVEN = 1
"""Differences among the remembered comparisons with which events are still used alone."""

_CLEAN = 12
"""Number of equal comparisons in a row that outweigh earlier differences."""


class Trust(StrEnum):
    """How an engine's events are used for one model.

    `unproven`: beside lessons from answers; the better of both counts. `proven`: alone. `broken`: not at all.
    """

    UNPROVEN = "unproven"
    PROVEN = "proven"
    BROKEN = "broken"


class Doubt(StrEnum):
    """The kind of difference: the `count` of prompt tokens, the stored `blocks`, or the `cached` tokens.

    `unreported`: the engine may have stored the blocks of a prompt before the router received its events, and does not
    report them again when it reuses them.
    """

    COUNT = "count"
    BLOCKS = "blocks"
    CACHED = "cached"
    UNREPORTED = "unreported"


@dataclass(frozen=True, slots=True)
class ParityReport:
    """How the events of `backend` are used for `model`, since when (in seconds of the router's clock), and why.

    `reason` is a sentence for operators, empty if nothing differs.
    """

    backend: str
    model: str
    trust: Trust
    doubt: Doubt | None
    reason: str
    since: float


@dataclass(slots=True)
class _Window:
    """The last comparisons of one kind. `different` has a bit for each, the newest lowest; 1 is a difference."""

    compared: int = 0
    different: int = 0

    def note(self, *, is_equal: bool) -> None:
        self.compared = min(self.compared + 1, _REMEMBERED)
        self.different = (self.different << 1 | (not is_equal)) & ((1 << _REMEMBERED) - 1)

    @property
    def is_bad(self) -> bool:
        return (self.different & ((1 << _RECENT) - 1)).bit_count() >= _BAD_OF_RECENT

    @property
    def is_forgiven(self) -> bool:
        is_clean = self.compared >= _CLEAN and not self.different & ((1 << _CLEAN) - 1)
        return is_clean or self.different.bit_count() <= _FORGIVEN

    @property
    def is_good(self) -> bool:
        return self.compared >= _LEAST_GOOD and self.is_forgiven


@dataclass(slots=True)
class Parity:
    """Compares one model at one engine, and decides how the engine's events may be used for it.

    The last 20 comparisons of each kind count. Six differences among the last eight break it, so a wrong tokenizer
    or template is detected within eight answers. Blocks outrank counts: if the expected blocks are
    stored, the keys are right whatever the engine counts. Unreported blocks break nothing, but while there are
    any, lessons from answers include hits that events do not.
    """

    trust: Trust = Trust.UNPROVEN
    doubt: Doubt | None = None
    _windows: dict[Doubt, _Window] = field(default_factory=lambda: {doubt: _Window() for doubt in Doubt})

    def note(self, what: Doubt, *, is_equal: bool) -> bool:
        """Record one comparison of `what`; returns whether `trust` or `doubt` changed."""
        self._windows[what].note(is_equal=is_equal)
        before = self.trust, self.doubt
        counts, blocks, cached, unreported = (self._windows[doubt] for doubt in Doubt)
        if blocks.is_bad:
            self.trust, self.doubt = Trust.BROKEN, Doubt.BLOCKS
        elif cached.is_bad:
            self.trust, self.doubt = Trust.BROKEN, Doubt.CACHED
        elif blocks.is_good and unreported.is_forgiven:
            self.trust, self.doubt = Trust.PROVEN, Doubt.COUNT if counts.is_bad else None
        elif counts.is_bad and not blocks.is_good:
            self.trust, self.doubt = Trust.BROKEN, Doubt.COUNT
        else:
            self.trust, self.doubt = Trust.UNPROVEN, None if unreported.is_forgiven else Doubt.UNREPORTED
        return before != (self.trust, self.doubt)

    def seen(self, what: Doubt) -> tuple[int, int]:
        """(comparisons, differences among them) of the last 20 of `what`."""
        window = self._windows[what]
        return window.compared, window.different.bit_count()


@dataclass(slots=True)
class Watched:
    """A watched block: whether it was stored, whether it was lost, and since when it is watched."""

    since: float
    users: int = 0
    was_stored: bool = False
    was_lost: bool = False


class Watch:
    """The reports of an engine's events about a few blocks since they were watched: at most `most` at once.

    A block that is watched for longer than `forgotten_s` makes room for another: its request has ended long ago.
    """

    def __init__(self, *, most: int = 128, forgotten_s: float = 900.0) -> None:
        self._most, self._forgotten_s = most, forgotten_s
        self._watched: dict[int, Watched] = {}

    def __repr__(self) -> str:
        return f"<Watch on {len(self._watched)} blocks>"

    def __len__(self) -> int:
        return len(self._watched)

    def begin(self, key: int, now: float) -> Watched | None:
        """Watch the block `key` from now on; None if there is no room."""
        watched = self._watched.get(key)
        if watched is None:
            if len(self._watched) >= self._most:
                oldest = next(iter(self._watched))
                if now - self._watched[oldest].since < self._forgotten_s:
                    return None
                del self._watched[oldest]
            watched = self._watched[key] = Watched(now)
        watched.users += 1
        return watched

    def end(self, key: int, watched: Watched) -> None:
        """Release one use of the watched block."""
        watched.users -= 1
        if not watched.users and self._watched.get(key) is watched:
            del self._watched[key]

    def stored(self, keys: Sequence[int]) -> None:
        """Record that events report these blocks as stored."""
        for watched in self._of(keys):
            watched.was_stored = True

    def lost(self, keys: Sequence[int]) -> None:
        """Record that events report these blocks as evicted."""
        for watched in self._of(keys):
            watched.was_lost = True

    def cleared(self) -> None:
        """Record that nothing is known of the engine any more."""
        for watched in self._watched.values():
            watched.was_lost = True

    def check(self) -> None:
        """Assert that the bound holds, and that every block has a user."""
        assert len(self._watched) <= self._most, f"{self!r}: over its bound"
        assert all(watched.users > 0 for watched in self._watched.values()), f"{self!r}: a block has no user"

    def _of(self, keys: Sequence[int]) -> Collection[Watched]:
        if not self._watched:
            return ()
        found = self._watched.keys() & set(keys) if len(keys) > 1 else [key for key in keys if key in self._watched]
        return [self._watched[key] for key in found]

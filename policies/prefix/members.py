"""Members: the bits of backends and their tiers in masks of holders."""

from __future__ import annotations

TIERS = ("device", "host", "disk")
"""From the fastest to the slowest. A tier of any other name counts as the last."""

_BITS = len(TIERS)
_MOST_REMEMBERED = 1024


def level_of(tier: str) -> int:
    """The place of `tier` in TIERS."""
    return TIERS.index(tier) if tier in TIERS else _BITS - 1


class Members:
    """Assigns each backend a number, and with it `len(TIERS)` neighbouring bits of a mask.

    The number of a removed backend is not reused until `clean` is called, because masks may still have its bits. `live`
    are the bits of all members, `firsts` those of their first tier alone.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._names: dict[int, str] = {}
        self._clean: list[int] = []
        self._issued = 0
        self.live = self.firsts = 0
        self.has_slower = False
        self._remembered: dict[int, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def __contains__(self, name: str) -> bool:
        return name in self._numbers

    def bit(self, name: str, level: int) -> int:
        """The bit of `name` for one tier; a new name becomes a member."""
        number = self._numbers.get(name)
        if number is None:
            number = self._join(name)
        self.has_slower |= level > 0
        return 1 << (_BITS * number + level)

    def bits(self, name: str) -> int:
        """All bits of `name`, 0 if it is no member."""
        number = self._numbers.get(name)
        return 0 if number is None else ((1 << _BITS) - 1) << (_BITS * number)

    def leave(self, name: str) -> int:
        """Remove the member `name`; returns its former bits."""
        bits = self.bits(name)
        if bits:
            del self._names[self._numbers.pop(name)]
            self._changed()
        return bits

    def clean(self, bits: int) -> None:
        """Record that no mask has any of `bits`: their numbers may be reused."""
        while bits:
            number = ((bits & -bits).bit_length() - 1) // _BITS
            bits &= ~(((1 << _BITS) - 1) << (_BITS * number))
            self._clean.append(number)

    def reach(self, mask: int) -> int:
        """`mask` with the bits of all slower tiers set if a faster one is: the holders in that tier or a faster one.

        Without slower tiers the first ones are enough.
        """
        if not self.has_slower:
            return mask & self.firsts
        mask &= self.live
        mask |= (mask & self.firsts) << 1
        return mask | (mask & self.firsts << 1) << 1

    def names(self, mask: int) -> tuple[str, ...]:
        """The members with their first bit in `mask`."""
        if not mask & (mask - 1):
            # found faster than remembered
            return (self._names[(mask.bit_length() - 1) // _BITS],) if mask else ()
        known = self._remembered.get(mask)
        if known is None:
            if len(self._remembered) >= _MOST_REMEMBERED:
                self._remembered.clear()
            known = self._remembered[mask] = tuple(self._named(mask))
        return known

    def check(self) -> None:
        """Assert that names, numbers and bits agree."""
        assert self._names == {number: name for name, number in self._numbers.items()}, "two share a number"
        assert self.live == sum(map(self.bits, self._numbers)), "a live bit belongs to no member"
        assert not set(self._clean) & set(self._names), "a clean number is in use"
        assert len(set(self._clean)) == len(self._clean), "a number is clean twice"
        assert all(number < self._issued for number in [*self._names, *self._clean]), "a number was never issued"

    def _join(self, name: str) -> int:
        if self._clean:
            number = self._clean.pop()
        else:
            number = self._issued
            self._issued += 1
        self._numbers[name], self._names[number] = number, name
        self._changed()
        return number

    def _changed(self) -> None:
        self.firsts = sum(1 << (_BITS * number) for number in self._names)
        self.live = self.firsts * ((1 << _BITS) - 1)
        self._remembered.clear()

    def _named(self, mask: int) -> list[str]:
        names = []
        while mask:
            lowest = mask & -mask
            names.append(self._names[(lowest.bit_length() - 1) // _BITS])
            mask ^= lowest
        return names

from __future__ import annotations

import random

import pytest

from shards.exec.slots import Slot, Slots


def test_a_sequence_keeps_its_place_until_another_one_needs_it() -> None:
    slots = Slots(2)
    assert slots.take([7, 8]) == {7: Slot(0, is_new=True), 8: Slot(1, is_new=True)}
    assert slots.take([7]) == {7: Slot(0, is_new=False)}
    # 8 drew longer ago
    assert slots.take([9]) == {9: Slot(1, is_new=True)}
    assert slots.take([8]) == {8: Slot(0, is_new=True)}


def test_more_sequences_than_places_in_one_step_are_refused() -> None:
    with pytest.raises(ValueError, match="3 sequences adjust their logits, and there is room for 2"):
        Slots(2).take([1, 2, 3])


def test_in_any_history_a_place_is_new_unless_its_sequence_was_the_last_to_have_it() -> None:
    rng = random.Random(1)
    slots, holder = Slots(4), dict[int, int]()
    for _ in range(2000):
        drawing = rng.sample(range(9), rng.randint(0, 4))
        taken = slots.take(drawing)
        assert taken.keys() == set(drawing)
        assert len({slot.place for slot in taken.values()}) == len(drawing)
        for arrival, slot in taken.items():
            assert slot.is_new == (holder.get(slot.place) != arrival)
            holder[slot.place] = arrival

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from shards.gpu.adapted_rows import AdaptedFields, most_tiles, shapes_of, sorted_rows
from shards.gpu.layout import Layout


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=90), st.sampled_from([16, 64]))
def test_every_row_with_an_adapter_is_in_one_tile_of_its_slot(slots: list[int], most: int) -> None:
    sources, tiles = sorted_rows(np.array(slots), most=most)
    placed: list[tuple[int, int]] = []
    for slot, start, stop in tiles.tolist():
        assert 0 < stop - start <= most
        placed += [(row, slot) for row in sources[start:stop].tolist()]
    assert sorted(placed) == [(row, slot) for row, slot in enumerate(slots) if slot >= 0]
    assert len(tiles) <= most_tiles(len(slots), 5, most)


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=40), st.integers(0, 9))
def test_fields_hold_the_rows_and_padding_for_any_mixture(slots: list[int], padding: int) -> None:
    fields = AdaptedFields(len(slots) + padding, 5, 16)
    layout = Layout.of(shapes_of([fields]))
    layout.check()
    arrays = layout.arrays(np.full(layout.words, 77, dtype=np.int32))
    fields.fill(arrays, np.array(slots))
    tiles = arrays["adapted tiles"]
    used = tiles[tiles[:, 0] >= 0]
    assert used[:, 2].max(initial=0) == sum(slot >= 0 for slot in slots)
    assert (tiles[len(used) :] == -1).all()

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies import quantities
from policies.nouns import Usage
from policies.quota.budget import charge_of
from policies.quota.prices import Prices
from policies.rules import Range
from policies.timeouts import Bounds

READERS: list[Callable[[str], object]] = [
    getattr(quantities, name) for name in vars(quantities) if name.startswith("read_")
]


@pytest.mark.parametrize(
    ("text", "seconds"), [("800ms", 0.8), ("12s", 12), ("15m", 900), ("1.5h", 5400), ("2 d", 172800)]
)
def test_durations_are_seconds(text: str, seconds: float) -> None:
    assert quantities.read_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "tokens"), [("0", 0), ("512", 512), ("16k", 16000), ("1.5k", 1500), ("6M", 6000000)])
def test_k_is_a_thousand_tokens(text: str, tokens: int) -> None:
    assert quantities.read_tokens(text) == tokens


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *(("512", 512), ("512B", 512), ("1KiB", 2**10), ("16MiB", 16 * 2**20), ("2GiB", 2 * 2**30)),
        *(("1kB", 10**3), ("1MB", 10**6), ("1.5 GB", 1_500_000_000)),
    ],
)
def test_sizes_are_bytes(text: str, size: int) -> None:
    assert quantities.read_bytes(text) == size


@pytest.mark.parametrize(
    ("text", "span"),
    [
        (">= 16k", Range(16000)),
        ("> 4k", Range(4001)),
        ("<4k", Range(None, 3999)),
        ("<= 512", Range(None, 512)),
        ("4k..16k", Range(4000, 15999)),
    ],
)
def test_comparisons_are_ranges(text: str, span: Range) -> None:
    assert quantities.read_range(text) == span


@pytest.mark.parametrize("text", ["12", "12 s s", "-1s", "0s", "1e3s", "", "9" * 40 + "s", "١s"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be|too large"):
        quantities.read_seconds(text)


def test_a_timeout_has_a_floor_and_a_ceiling_or_one_value_for_both() -> None:
    assert quantities.read_bounds("5s..10m") == Bounds(5.0, 600.0)
    assert quantities.read_bounds("800ms .. 1.5h") == Bounds(0.8, 5400.0)
    assert quantities.read_bounds("30s") == Bounds(30.0, 30.0)
    with pytest.raises(ValueError, match="floor above its ceiling"):
        quantities.read_bounds("10m..5s")
    with pytest.raises(ValueError, match="must be a duration"):
        quantities.read_bounds("5..10")


@given(st.text(max_size=20), st.sampled_from(READERS))
def test_readers_raise_nothing_but_value_error(text: str, reader: Callable[[str], object]) -> None:
    with contextlib.suppress(ValueError):
        reader(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "1 ms"),
        (0.0004, "1 ms"),
        (0.1, "100 ms"),
        (0.0421, "43 ms"),
        (0.9999, "1 s"),
        (1.21, "1.3 s"),
        (10.0, "10 s"),
        (10.1, "11 s"),
        (60, "60 s"),
        (121, "3 min"),
        (7199, "120 min"),
        (86_399.0, "24 h"),
    ],
)
def test_times_are_shown_in_fitting_units_and_never_as_zero(seconds: float, text: str) -> None:
    assert quantities.rounded_seconds(seconds) == text


@given(st.floats(0, 1e9))
def test_a_client_that_waits_as_long_as_retry_after_has_waited_long_enough(seconds: float) -> None:
    number, unit = quantities.rounded_seconds(seconds).replace(",", "").split()
    assert float(number) > 0
    assert float(number) * {"ms": 1e-3, "s": 1, "min": 60, "h": 3600}[unit] >= seconds * (1 - 1e-9) - 1e-6


@pytest.mark.parametrize("text", ["0", "0.001", "0.0375", "2.5", "1000"])
def test_a_price_is_charged_as_it_is_written(text: str) -> None:
    prices = Prices(uncached=quantities.read_price(text))
    assert charge_of(Usage(prompt_tokens=1_000_000), prices).cost == round(float(text) * 10**9)


@pytest.mark.parametrize("text", ["0.0000001", "1.0000005", "1001", "1000.001"])
def test_a_price_that_would_be_charged_otherwise_than_it_is_written_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        quantities.read_price(text)

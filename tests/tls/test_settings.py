"""Pins as they are written."""

import pytest

from tls.settings import read_pin


def test_a_pin_is_read_in_any_case() -> None:
    assert read_pin(" SHA256:" + "aB" * 32) == "ab" * 32


@pytest.mark.parametrize("text", ["", "ab" * 32, "sha256:" + "ab" * 31, "sha256:" + "xy" * 32, "sha1:" + "ab" * 32])
def test_anything_else_is_refused_with_the_form_that_is_meant(text: str) -> None:
    with pytest.raises(ValueError, match="sha256: and 64 hexadecimal digits"):
        read_pin(text)

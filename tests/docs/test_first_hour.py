"""Each user of the first hour gets to the end of it; `python -m tests.docs.first_hour` prints the times."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.first_hour import USERS, lived
from tests.docs.reader import can_read


@pytest.mark.skipif(not can_read(), reason="needs bash and curl")
@pytest.mark.parametrize("name", [name for name in USERS if name != "contributor"])
def test_the_first_hour_has_no_obstacle(name: str, tmp_path: Path) -> None:
    assert lived(name, tmp_path / "home").steps

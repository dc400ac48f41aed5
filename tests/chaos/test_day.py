"""Half a minute of random faults of three routers, three shards and a Redis with a replica: nothing is lost or left.

The long form has all faults and lasts ten minutes: `python -m tests.chaos.days`.
"""

from __future__ import annotations

import os
import shutil
import sys

import pytest

from tests.chaos.day.day import PLAN, Day
from tests.chaos.day.timeline import TROUBLES
from tests.chaos.system import a_system

SLOW = {"router killed", "shard ended"}
"""Faults that a short form leaves out: reservations of a router that died lapse after a minute."""


@pytest.mark.torch
@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="mounts disks, which Linux' root may")
@pytest.mark.skipif(shutil.which("nsenter") is None, reason="there is no nsenter")
@pytest.mark.slow("half a minute of random faults, and the starts of three routers, three shards and two Redis")
async def test_the_books_of_all_parts_agree_after_random_faults() -> None:
    troubles = tuple(trouble for trouble in TROUBLES if trouble.name not in SLOW)
    async with a_system(PLAN) as system:
        day = Day(system, seed=1, minutes=0.4, troubles=troubles)
        objections = await day.day()
        print(day.summary)
        assert not objections, "\n".join(objections)

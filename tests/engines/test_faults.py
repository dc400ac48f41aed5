"""A real vLLM that is killed or stopped under load: what `make chaos` does to it, a second long."""

from __future__ import annotations

import pytest

from tests.chaos.experiment import Times, run
from tests.chaos.faults import BY_NAME, ENGINES
from tests.chaos.load import Shape
from tests.chaos.system import a_system
from tests.engines.programs import MISSING

pytestmark = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


async def test_a_vllm_that_is_stopped_or_killed_loses_no_request_and_leaves_nothing() -> None:
    async with a_system(ENGINES) as system:
        for name in ("vllm stopped", "vllm killed"):
            result = await run(system, (BY_NAME[name],), Times(recovery=30), Shape(per_s=6, timeout_s=30))
            print(result)
            assert not result.violations, str(result)

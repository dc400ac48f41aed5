import pytest

from policies import filters
from policies.compose import Filter
from policies.nouns import BackendView, Capability, Request
from tests.policies.builders import a_backend, a_request


@pytest.mark.parametrize(
    ("passes", "request_", "backend", "verdict"),
    [
        (filters.healthy(), a_request(), a_backend(), True),
        (filters.healthy(), a_request(), a_backend(healthy=False), False),
        (filters.healthy(), a_request(), a_backend(draining=True), False),
        (filters.healthy(), a_request(), a_backend(reported_s_ago=11.0), False),
        (filters.healthy(fresh=20.0), a_request(), a_backend(reported_s_ago=11.0), True),
        (filters.healthy(), a_request(), a_backend(reported_s_ago=None), True),
        (filters.serves_model(), a_request(model="llama"), a_backend(), True),
        (filters.serves_model(), a_request(model="qwen"), a_backend(), False),
        (filters.fits_context(), a_request(prompt_tokens=90, max_new_tokens=10), a_backend(context_tokens=100), True),
        (filters.fits_context(), a_request(prompt_tokens=91, max_new_tokens=10), a_backend(context_tokens=100), False),
        (filters.fits_context(), a_request(prompt_tokens=10**9), a_backend(context_tokens=None), True),
        (
            filters.fits_context(),
            a_request(prompt_tokens=500, least_prompt_tokens=90, max_new_tokens=10),
            a_backend(context_tokens=100),
            True,
        ),
        (
            filters.fits_context(),
            a_request(prompt_tokens=500, least_prompt_tokens=91, max_new_tokens=10),
            a_backend(context_tokens=100),
            False,
        ),
        (
            filters.fits_context(),
            a_request(prompt_tokens=10**6, needs=frozenset({Capability.EMBEDDINGS})),
            a_backend(context_tokens=100),
            True,
        ),
        (filters.has_room(), a_request(prompt_tokens=101), a_backend(free_tokens=100, running=1), False),
        (filters.has_room(), a_request(prompt_tokens=101), a_backend(free_tokens=100, running=1, held_tokens=1), True),
        (filters.has_room(tokens=1), a_request(prompt_tokens=100), a_backend(free_tokens=100, waiting=1), False),
        (filters.has_room(), a_request(prompt_tokens=101), a_backend(free_tokens=100), True),
        (filters.has_room(), a_request(prompt_tokens=101), a_backend(free_tokens=None, running=9), True),
        (filters.under_limit(), a_request(), a_backend(running=3, waiting=1, max_requests=4), False),
        (filters.under_limit(), a_request(), a_backend(running=2, waiting=1, max_requests=4), True),
        (filters.under_limit(), a_request(), a_backend(running=2000, max_requests=None), True),
        (filters.under_limit(), a_request(), a_backend(running=9, adaptive_limit=9), False),
        (filters.under_limit(), a_request(), a_backend(running=8, adaptive_limit=9), True),
        (filters.under_limit(), a_request(), a_backend(running=9, adaptive_limit=9, max_requests=16), True),
        (filters.under_limit(), a_request(), a_backend(running=4, max_requests=4, reclaimable_requests=1), True),
        (
            filters.has_room(),
            a_request(prompt_tokens=9),
            a_backend(running=1, free_tokens=5, reclaimable_tokens=4),
            True,
        ),
        (
            filters.has_room(),
            a_request(prompt_tokens=9),
            a_backend(running=1, free_tokens=5, reclaimable_tokens=3),
            False,
        ),
    ],
)
def test_a_filter_asks_one_question(passes: Filter, request_: Request, backend: BackendView, verdict: bool) -> None:
    assert passes(request_, backend) is verdict

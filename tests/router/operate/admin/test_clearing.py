"""A tenant's cache is cleared wherever that can be done, and the answer says where it cannot."""

from __future__ import annotations

import pytest

from backends.fake import FakeBackend
from policies.errors import InvalidRequest
from router.fleet.prompt_keys import PromptKeys
from router.operate.admin.clearing import clear_cache, named_tenant
from tests.router.call.test_warming import a_keeper, a_warmer, an_ask, ignored
from tests.router.parts import a_config, a_tenant

LABS = a_tenant("labs", key="labs-key")
OF_LABS_TOO = a_tenant("lent", key="lent-key", domain="labs")


def cached(backend: FakeBackend) -> set[str]:
    return set(backend.cache.values())


async def test_one_domain_goes_everywhere_and_the_others_stay() -> None:
    made = a_keeper("b0"), a_keeper("b1")
    async with a_warmer(*made, config=a_config(a_tenant(), LABS)) as (warmer, router):
        for tenant in ("acme", "labs"):
            for avoiding in (frozenset({"b0"}), frozenset({"b1"})):
                await warmer.warm(an_ask(), tenant, avoiding=avoiding, placed=ignored)
        kept = await router.gateway.prefixes.keep(an_ask(), a_tenant(), shards=2, ttl_s=60.0)
        cleared = (await clear_cache(a_tenant(), router.gateway)).shown()
        assert [cached(backend) for backend in made] == [{"labs"}, {"labs"}]
        assert all(not backend.pinned for backend in made)
    tokens = kept.tokens
    assert cleared == {
        "domain": "acme",
        "tenants": ["acme"],
        "prefixes": [kept.id],
        "complete": True,
        "backends": [
            {"backend": "b0", "cleared": True, "tokens": tokens},
            {"backend": "b1", "cleared": True, "tokens": tokens},
        ],
    }


async def test_it_lists_backends_where_it_failed_or_is_impossible() -> None:
    made = a_keeper("b0"), a_keeper("b1", pins=False), a_keeper("b2")
    async with a_warmer(*made) as (_, router):
        made[2].is_well = False
        cleared = await clear_cache(a_tenant(), router.gateway)
    assert cleared.backends == {"b0": 0}
    assert cleared.failed.keys() == {"b1", "b2"}
    assert "no command for that" in cleared.failed["b1"]
    assert cleared.failed["b2"] == "b2 is not well"
    assert cleared.shown()["complete"] is False


async def test_tenants_that_share_the_cache_are_named() -> None:
    async with a_warmer(config=a_config(a_tenant(), LABS, OF_LABS_TOO)) as (_, router):
        cleared = await clear_cache(named_tenant("lent", router.gateway.config), router.gateway)
    assert (cleared.domain, cleared.tenants) == ("labs", ("labs", "lent"))


async def test_what_was_just_sent_is_no_longer_believed_to_be_there() -> None:
    async with a_warmer(a_keeper("b0")) as (warmer, router):
        measure = await warmer.measure(an_ask(), a_tenant())
        router.gateway.beliefs.sent("b0", PromptKeys(measure.keys))
        await clear_cache(a_tenant(), router.gateway)
        assert not router.gateway.beliefs.longest(PromptKeys(measure.keys))


async def test_the_text_that_was_tokenized_for_it_is_forgotten() -> None:
    text = "the quick brown fox\njumps over the lazy dog\n" * 300
    async with a_warmer(config=a_config(a_tenant(), LABS)) as (warmer, router):
        await warmer.measure(an_ask(text), LABS)
        for_labs = router.gateway.tokenizers.cache.bytes
        await warmer.measure(an_ask(text), a_tenant())
        assert router.gateway.tokenizers.cache.bytes == 2 * for_labs > 0
        await clear_cache(a_tenant(), router.gateway)
        assert router.gateway.tokenizers.cache.bytes == for_labs


async def test_an_unknown_tenant_is_refused_with_the_known_ones() -> None:
    anonymous = a_tenant("everyone", key=None)
    async with a_warmer(config=a_config(anonymous=anonymous)) as (_, router):
        assert named_tenant("everyone", router.gateway.config) == anonymous
        with pytest.raises(InvalidRequest, match=r"there is no tenant 'acmee' \(did you mean 'acme'\?"):
            named_tenant("acmee", router.gateway.config)

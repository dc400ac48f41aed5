"""The cache domains of adapters: apart from each other inside a shard, and as routers know them in keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shards.kv.adapter_domain import adapter_digest, adapter_domain, domain_root, is_adapter_domain, tenant_domain
from shards.kv.keys import chunk_domain, is_chunk_domain, root_key
from shards.kv.raw_block import BlockLabels, domain_digest

DOMAINS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=8)
NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=8)
DIGESTS = st.text("0123456789abcdef", min_size=1, max_size=8)


@given(DOMAINS, NAMES, DIGESTS)
def test_a_domain_is_taken_apart_again_and_so_is_that_of_its_chunks(domain: str, name: str, digest: str) -> None:
    own = adapter_domain(domain, name, digest)
    assert (tenant_domain(own), adapter_digest(own), is_adapter_domain(own)) == (domain, digest, True)
    assert domain_root("model", own) == root_key(name, domain)
    chunks = chunk_domain(own)
    assert (tenant_domain(chunks), adapter_digest(chunks)) == (chunk_domain(domain), digest)
    assert is_chunk_domain(chunks)
    assert domain_root("model", chunks) == root_key(name, chunk_domain(domain))


@given(DOMAINS)
def test_a_domain_without_an_adapter_stays_what_it_is(domain: str) -> None:
    assert (tenant_domain(domain), adapter_digest(domain), is_adapter_domain(domain)) == (domain, "", False)
    assert domain_root("model", domain) == root_key("model", domain)


@given(st.lists(st.tuples(DOMAINS, NAMES, DIGESTS), unique=True, min_size=2, max_size=2))
def test_different_adapters_and_tenants_have_different_domains(parts: list[tuple[str, str, str]]) -> None:
    first, second = (adapter_domain(*each) for each in parts)
    assert first != second


def test_labels_tell_adapters_apart_and_show_the_tenant_alone() -> None:
    labels, tokens = BlockLabels("model", b"f" * 32), bytes(256)
    domains = ["t", adapter_domain("t", "a", "1"), adapter_domain("t", "a", "2")]
    found = [labels.first(tokens, domain=domain) for domain in domains]
    assert len({label.chain for label in found}) == 3
    assert {label.domain for label in found} == {domain_digest("t")}
    assert found[1].key == found[2].key != found[0].key, "a router knows the name alone"

"""The cache domain of an adapter's KV: an adapter computes other KV from the same tokens. Torch-free.

Inside a shard each adapter has a domain of its own in the domain of each tenant, named by its weights and not only by
its name. Routers know the name alone: to them an adapter is another model, and keys are made like that.
"""

from __future__ import annotations

from shards.kv.keys import root_key

_ADAPTER = "\x00adapter\x00"


def adapter_domain(domain: str, name: str, digest: str) -> str:
    """The domain of the adapter called `name` with weights of `digest`, for the tenant's `domain`."""
    return f"{domain}{_ADAPTER}{digest}\x00{name}"


def is_adapter_domain(domain: str) -> bool:
    """Whether `domain` is that of an adapter, or of the chunks of one."""
    return _ADAPTER in domain


def tenant_domain(domain: str) -> str:
    """`domain` without its adapter; the domain of chunks stays one of chunks."""
    return _parts(domain)[0]


def adapter_digest(domain: str) -> str:
    """The digest of the weights of the adapter of `domain`; empty: that of the model itself."""
    return _parts(domain)[2]


def domain_root(model: str, domain: str) -> int:
    """The root key of `domain` in `model`, as a router computes it: an adapter counts as a model."""
    if _ADAPTER not in domain:
        return root_key(model, domain)
    tenant, name, _ = _parts(domain)
    return root_key(name, tenant)


def _parts(domain: str) -> tuple[str, str, str]:
    """The domain without its adapter, and the adapter's name and digest."""
    tenant, _, rest = domain.partition(_ADAPTER)
    digest, _, behind = rest.partition("\x00")
    name, chunks, kind = behind.partition("\x00")
    return tenant + chunks + kind, name, digest

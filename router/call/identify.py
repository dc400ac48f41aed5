"""From the key of a call to its tenant."""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from policies.errors import Unauthenticated, Unavailable
from policies.keys import PREFIX, IssuedKey, hash_of, id_of
from policies.nouns import Limits, Team, Tenant
from policies.quota.budget import Descriptor, of_key
from policies.sla.config import Config
from router.shared.keys.ring import KeyRing


class Identity(NamedTuple):
    """The tenant of a call, the `key` that it used if that has limits of its own, the id of that key, and its team."""

    tenant: Tenant
    key: Descriptor | None = None
    key_id: str | None = None
    team: Team | None = None


def identify(key: str | None, config: Config, issued: KeyRing) -> Tenant:
    """The tenant of this key. Raises as `identity_of` does."""
    return identity_of(key, config, issued).tenant


def identity_of(key: str | None, config: Config, issued: KeyRing) -> Identity:
    """The tenant of this key, from the file or from `issued`; without a key the anonymous one, if the file has one.

    Keys are looked up by their sha256, so the time of a lookup says nothing about keys that exist.
    Raises Unauthenticated, and Unavailable for what may be an issued key while these cannot be looked up.
    """
    if key:
        digest = hash_of(key)
        tenant = config.tenant_by_key_hash.get(digest)
        if tenant is not None:
            return _identity(tenant, digest, tenant.key_limits.get(digest), tenant.team_by_key.get(digest))
        if (found := issued.find(digest)) is not None:
            return _identity(_owner(found, config, issued.now()), digest, found.limits, found.team)
    # if no tenant has keys, any key will do: some clients must send one
    if config.anonymous is not None and (not key or not _tells_apart(key, config, issued)):
        return Identity(config.anonymous)
    if not key:
        raise Unauthenticated("no API key was sent", hint="send the header 'Authorization: Bearer YOUR_KEY'")
    if key.startswith(PREFIX) and not issued.is_known:
        raise Unavailable("API keys cannot be looked up now", hint="try again in a moment", retry_after_s=1.0)
    raise Unauthenticated("the API key is not known", hint="ask the operator for a key of this router")


def on_behalf_of(name: str, config: Config) -> Tenant:
    """The tenant `name`, which was identified before, for what the router goes on doing for it.

    Raises Unauthenticated.
    """
    tenant = config.tenants.get(name)
    if tenant is None and config.anonymous is not None and config.anonymous.name == name:
        return config.anonymous
    if tenant is None:
        raise Unauthenticated(f"there is no tenant '{name}' any more", hint="the SLA file has changed")
    return tenant


def _identity(tenant: Tenant, digest: str, limits: Limits | None, team: str | None) -> Identity:
    key_id = id_of(digest)
    key = None if limits is None else of_key(tenant, limits, key_id)
    return Identity(tenant, key, key_id, None if team is None else tenant.teams[team])


def _owner(key: IssuedKey, config: Config, now: float) -> Tenant:
    if key.expires is not None and key.has_expired(now):
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(key.expires))
        raise Unauthenticated(f"the API key {key.id} expired at {when}", hint="ask the operator for a new one")
    if key.tenant not in config.tenants:
        hint = "ask the operator for a key of another tenant"
        raise Unauthenticated(f"the tenant of the API key {key.id} is not there any more", hint=hint)
    tenant = config.tenants[key.tenant]
    if key.team is not None and key.team not in tenant.teams:
        hint = "ask the operator for a key of another team"
        raise Unauthenticated(f"the team of the API key {key.id} is not there any more", hint=hint)
    return tenant


def _tells_apart(key: str, config: Config, issued: KeyRing) -> bool:
    """Could this key belong to a tenant? A key that was issued and revoked belongs to none."""
    return bool(config.tenant_by_key_hash) or not issued.is_empty or key.startswith(PREFIX)


def key_in(headers: Mapping[str, str]) -> str | None:
    """The key in `authorization: Bearer KEY`, else the one in `x-api-key`; names are in lower case or indifferent.

    The password of `authorization: Basic ...` is one too: that is what clients make of http://any:KEY@host.
    """
    scheme, _, token = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    if scheme.lower() == "basic":
        with suppress(binascii.Error, UnicodeDecodeError):
            return base64.b64decode(token, validate=True).decode().partition(":")[2] or None
    return headers.get("x-api-key") or None

"""From the key or token of a call to its tenant."""

from __future__ import annotations

import base64
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from policies.errors import NoCredential, Unassigned, Unauthenticated, Unavailable
from policies.identity import grant_of
from policies.keys import PREFIX, IssuedKey, hash_of, id_of
from policies.nouns import Limits, Team, Tenant
from policies.quota.budget import Descriptor, descriptors, of_key
from policies.rules import Facts, Ruling, classify, settled
from policies.sla.config import Config
from router.call.observer import Observer
from router.identity.errors import KeysAway, UnknownKey
from router.shared.keys.ring import KeyRing

if TYPE_CHECKING:
    # a router that trusts no issuer runs without joserfc
    from router.identity.tokens import Verified, Verifier


MOST_BOUND = 1024
"""Models of which an identity keeps the limits and the ruling; beyond that all are found again."""


class Identity(msgspec.Struct, frozen=True):
    """The tenant of a call, the `key` that it used if that has limits of its own, the id of that key, and its team.

    `user` is the end user that its token names. A token's tenant may have fewer classes and models than the file's.
    """

    tenant: Tenant
    key: Descriptor | None = None
    key_id: str | None = None
    team: Team | None = None
    user: str | None = None
    known_bounds: dict[str, tuple[Descriptor, ...]] = {}
    rulings: dict[str, tuple[Config, Ruling | None]] = {}
    """By model, with the file that it is by, where one was found: what holds for all its calls without a priority."""

    def bound(self, model: str) -> tuple[Descriptor, ...]:
        """The descriptors of its calls to `model` that have neither an end user nor tags; made once for each and
        kept in `known_bounds`."""
        found = self.known_bounds.get(model)
        if found is None:
            if len(self.known_bounds) >= MOST_BOUND:
                self.known_bounds.clear()
            found = self.known_bounds[model] = descriptors(self.tenant, model, self.key, team=self.team)
        return found

    def ruled(self, facts: Facts, config: Config) -> Ruling:
        """The ruling of `config` for a call with these `facts`; what is the same for all of them is kept in `rulings`.

        Raises as `classify` does.
        """
        kept = self.rulings.get(facts.model)
        if kept is None or kept[0] is not config:
            if len(self.rulings) >= MOST_BOUND:
                self.rulings.clear()
            self.rulings[facts.model] = config, settled(self.tenant, facts.model, config)
        return classify(facts, config)


class Identities:
    """Finds the identities of callers: of the file's own keys, each once for each file, of `keys` that operators
    issued, and of `tokens`, where the file has issuers. The `observer` hears of refusals.
    """

    def __init__(self, keys: KeyRing, observer: Observer) -> None:
        self.tokens: Verifier | None = None
        self._keys, self._observer = keys, observer
        self._config: Config | None = None
        self._known: dict[str, Identity] = {}

    def __repr__(self) -> str:
        return f"<Identities of {len(self._known)} keys>"

    def find(self, key: str | None, config: Config) -> Identity | None:
        """The identity of `key`, if it is one of `config`; None for any other, which may be issued or a token."""
        if not key:
            return None
        if config is not self._config:
            self._config, self._known = config, {}
        # as `hash_of`, without a call: every request asks
        digest = sha256(key.encode(errors="surrogateescape")).hexdigest()
        if (found := self._known.get(digest)) is None and digest in config.tenant_by_key_hash:
            found = self._known[digest] = _configured(digest, config)
        return found

    def of(self, key: str | None, config: Config) -> Identity:
        """The identity of `key` on what is known now. Raises as `identity_of` does."""
        return identity_of(key, config, self._keys, self.tokens)

    async def identified(self, key: str | None, config: Config, address: str) -> Identity:
        """The result of `of`, for a client at `address`. Raises as it does, and tells the observer of refusals.

        A token that is signed with an unknown key waits until its issuer's keys are fetched, if they may be.
        """
        try:
            try:
                return self.of(key, config)
            except (UnknownKey, KeysAway) as missing:
                if not await missing.issuer.refreshed():
                    raise
            return self.of(key, config)
        except (Unauthenticated, Unassigned) as refused:
            if not isinstance(refused, NoCredential):
                self._observer.refused(address, refused)
            raise


def identity_of(key: str | None, config: Config, issued: KeyRing, tokens: Verifier | None = None) -> Identity:
    """The tenant of this key, from the file or from `issued`, or of this token, by the file's rules; without either the
    anonymous one, if the file has one.

    Both are looked up by their sha256, so the time of a lookup says nothing about keys that exist.
    Raises Unauthenticated; Unassigned for a token that no rule gives a tenant; Unavailable for what may be an issued
    key, or is a token, while these cannot be verified.
    """
    if key:
        digest = hash_of(key)
        if (known := _known(digest, config, issued)) is not None:
            return known
        if tokens is not None and (verified := tokens.find(key, digest)) is not None:
            return _identity_of_token(verified, config)
    # if no tenant has keys, any key will do: some clients must send one
    if config.anonymous is not None and (not key or not _tells_apart(key, config, issued)):
        return Identity(config.anonymous)
    if not key:
        raise NoCredential("no API key was sent", hint="send the header 'Authorization: Bearer YOUR_KEY'")
    if key.startswith(PREFIX) and not issued.is_known:
        raise Unavailable("API keys cannot be looked up now", hint="try again in a moment", retry_after_s=1.0)
    raise Unauthenticated("the API key is not known", hint="ask the operator for a key of this router")


def known_tenant(name: str, config: Config) -> Tenant | None:
    """The tenant `name`; None if there is none any more."""
    tenant = config.tenants.get(name)
    if tenant is None and config.anonymous is not None and config.anonymous.name == name:
        return config.anonymous
    return tenant


class Granted(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is kept of an identity for calls that the router makes later: the sha256 of its `key`, or, where it had
    none, as a token, what that allowed."""

    tenant: str
    key: str | None = None
    team: str | None = None
    user: str | None = None
    classes: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()


def granted_to(identity: Identity, key: str | None) -> Granted:
    """What is kept of `identity`, which was found by `key`."""
    tenant = identity.tenant
    if key and identity.key_id is not None:
        return Granted(tenant.name, hash_of(key))
    team = None if identity.team is None else identity.team.name
    return Granted(tenant.name, None, team, identity.user, tenant.classes, tenant.models)


def identity_again(granted: Granted, config: Config, issued: KeyRing) -> Identity:
    """The identity of which `granted` was kept, by the file of now.

    Raises Unauthenticated if tenant, team or key are not there any more, and Unavailable while issued keys cannot be
    looked up.
    """
    digest = granted.key
    if digest is None:
        tenant = on_behalf_of(granted.tenant, config)
        if granted.team is not None and granted.team not in tenant.teams:
            raise Unauthenticated("the team is not there any more", hint="the SLA file has changed")
        classes, models = _both(tenant.classes, granted.classes), _both(tenant.models, granted.models)
        if classes is None or models is None:
            raise Unauthenticated("nothing is left of what was granted", hint="the SLA file has changed")
        team = None if granted.team is None else tenant.teams[granted.team]
        return Identity(replace(tenant, classes=classes, models=models), team=team, user=granted.user)
    known = _known(digest, config, issued)
    if known is not None and known.tenant.name == granted.tenant:
        return known
    if not issued.is_known:
        raise Unavailable("API keys cannot be looked up now", hint="try again in a moment", retry_after_s=1.0)
    raise Unauthenticated(f"the API key {id_of(digest)} is not known any more", hint="send it again with another key")


def _known(digest: str, config: Config, issued: KeyRing) -> Identity | None:
    """The identity of a key by its sha256. Raises Unauthenticated."""
    if digest in config.tenant_by_key_hash:
        return _configured(digest, config)
    if (found := issued.find(digest)) is not None:
        return _identity(_owner(found, config, issued.now()), digest, found.limits, found.team)
    return None


def _configured(digest: str, config: Config) -> Identity:
    """The identity of a key of the file by its sha256."""
    tenant = config.tenant_by_key_hash[digest]
    return _identity(tenant, digest, tenant.key_limits.get(digest), tenant.team_by_key.get(digest))


def on_behalf_of(name: str, config: Config) -> Tenant:
    """The tenant `name`, which was identified before, for what the router goes on doing for it.

    Raises Unauthenticated.
    """
    tenant = known_tenant(name, config)
    if tenant is None:
        raise Unauthenticated(f"there is no tenant '{name}' any more", hint="the SLA file has changed")
    return tenant


def _identity(tenant: Tenant, digest: str, limits: Limits | None, team: str | None) -> Identity:
    key_id = id_of(digest)
    key = None if limits is None else of_key(tenant, limits, key_id)
    return Identity(tenant, key, key_id, None if team is None else tenant.teams[team])


def _identity_of_token(verified: Verified, config: Config) -> Identity:
    """What the rules of `config` give the token; found once for each file. Raises Unassigned."""
    if verified.seen is None or verified.seen[0] is not config:
        verified.seen = (config, _assigned(verified, config))
    identity: Identity = verified.seen[1]
    return identity


def _assigned(verified: Verified, config: Config) -> Identity:
    rules = () if config.identity is None else config.identity.rules
    grant = grant_of(rules, verified.issuer, verified.claims)
    ask = "ask the operator to add one to `identity`"
    if grant is None:
        raise Unassigned("no rule of this router gives the token a tenant", hint=ask)
    tenant = config.tenants.get(grant.tenant)
    if tenant is None:
        raise Unassigned("the token names a tenant that is not here", hint="ask the operator to add it")
    if grant.team is not None and grant.team not in tenant.teams:
        raise Unassigned("the token names a team that its tenant does not have", hint="ask the operator to add it")
    classes, models = _both(tenant.classes, grant.classes), _both(tenant.models, grant.models)
    if classes is None or models is None:
        raise Unassigned("the rule for the token allows nothing that its tenant may use", hint="ask the operator")
    team = None if grant.team is None else tenant.teams[grant.team]
    if grant.classes or grant.models:
        tenant = replace(tenant, classes=classes, models=models)
    return Identity(tenant, team=team, user=grant.user)


def _both(own: frozenset[str], granted: frozenset[str]) -> frozenset[str] | None:
    """What is in both, where an empty set means everything; None if nothing is."""
    return own | granted if not own or not granted else own & granted or None


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
        # no base64, or no text in it
        with suppress(ValueError):
            return base64.b64decode(token, validate=True).decode().partition(":")[2] or None
    return headers.get("x-api-key") or None

"""Tokens of issuers: the issuers that are trusted, and the rules from claims to tenants and roles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from policies.roles import OperatorRole
from tls.settings import TlsSettings

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures of RFC 7518 and RFC 8037 with a public key. Those with a shared secret, and `none`, are never allowed."""

USUAL_ALGORITHMS = frozenset(("RS256", "PS256", "ES256", "EdDSA"))

USUAL_SKEW_S = 60.0
USUAL_KEEP_S = 24 * 3600.0

_WORDS = frozenset(("scope", "scp"))
"""Claims that hold several values in one text (RFC 8693, section 4.2)."""

Claims = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Issuer:
    """A trusted issuer: its tokens name it as `url`, and one of `audiences`.

    Its keys are at `jwks`, a URL or a file; None: where its discovery document says. `skew_s` is how far clocks may
    differ. While it cannot be reached, its keys are used for `keep_s`.
    """

    name: str
    url: str
    audiences: frozenset[str]
    jwks: str | None = None
    algorithms: frozenset[str] = USUAL_ALGORITHMS
    skew_s: float = USUAL_SKEW_S
    keep_s: float = USUAL_KEEP_S
    tls: TlsSettings | None = None


@dataclass(frozen=True, slots=True)
class FromClaim:
    """A value that a claim gives."""

    claim: str


Value = str | FromClaim


@dataclass(frozen=True, slots=True)
class ClaimRule:
    """Gives tokens of `issuers` (empty: of all), with one of the values of each of `claims`, a tenant, a role or both.

    Empty `models` and `classes` are those of the tenant.
    """

    issuers: frozenset[str] = frozenset()
    claims: Mapping[str, frozenset[str]] = field(default_factory=dict)
    tenant: Value | None = None
    team: Value | None = None
    user: Value | None = None
    classes: frozenset[str] = frozenset()
    models: frozenset[str] = frozenset()
    role: OperatorRole | None = None

    def matches(self, issuer: str, claims: Claims) -> bool:
        """Whether it is about tokens of `issuer` with these `claims`."""
        if self.issuers and issuer not in self.issuers:
            return False
        return all(not wanted.isdisjoint(values_of(claims, name)) for name, wanted in self.claims.items())


@dataclass(frozen=True, slots=True)
class IdentitySettings:
    """The issuers by name, and the rules in their order."""

    issuers: Mapping[str, Issuer]
    rules: tuple[ClaimRule, ...]

    @property
    def gives_roles(self) -> bool:
        """Whether a token can make its bearer an operator."""
        return any(rule.role is not None for rule in self.rules)


@dataclass(frozen=True, slots=True)
class Grant:
    """What the first rule that matches gives the bearer of a token, by names."""

    tenant: str
    team: str | None
    user: str | None
    classes: frozenset[str]
    models: frozenset[str]


def grant_of(rules: Sequence[ClaimRule], issuer: str, claims: Claims) -> Grant | None:
    """What the first rule with a tenant that matches gives; None if none does.

    A rule that takes a value from a claim does not match a token without a single text there.
    """
    for rule in rules:
        if rule.tenant is None or not rule.matches(issuer, claims):
            continue
        wanted = (rule.tenant, rule.team, rule.user)
        found = [_resolved(value, claims) for value in wanted]
        if [value is None for value in found] == [value is None for value in wanted]:
            tenant, team, user = found
            assert tenant is not None
            return Grant(tenant, team, user, rule.classes, rule.models)
    return None


def role_of(rules: Sequence[ClaimRule], issuer: str, claims: Claims) -> OperatorRole | None:
    """The role that the first rule with a role that matches gives; None if none does."""
    return next((rule.role for rule in rules if rule.role is not None and rule.matches(issuer, claims)), None)


def values_of(claims: Claims, name: str) -> frozenset[str]:
    """The values of a claim as texts; `realm_access.roles` is a claim of that name, or `roles` in `realm_access`."""
    return frozenset(_texts(claim_at(claims, name), words=name in _WORDS))


def claim_at(claims: Claims, name: str) -> Any:
    """The claim of this name, or inside the objects that its parts name; None if there is none."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found


def _resolved(value: Value | None, claims: Claims) -> str | None:
    if not isinstance(value, FromClaim):
        return value
    found = list(_texts(claim_at(claims, value.claim), words=False))
    return found[0] if len(found) == 1 and found[0].strip() else None


def _texts(value: Any, *, words: bool) -> Iterator[str]:
    if isinstance(value, bool):
        yield "true" if value else "false"
    elif isinstance(value, str):
        yield from value.split() if words else (value,)
    elif isinstance(value, int):
        yield str(value)
    elif isinstance(value, list | tuple):
        for item in value:
            if isinstance(item, str | int):
                yield from _texts(item, words=False)

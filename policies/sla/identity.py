"""The section `identity`: issuers of trusted tokens, and rules from claims to tenants and roles."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from policies.identity import (
    ALGORITHMS,
    USUAL_ALGORITHMS,
    USUAL_KEEP_S,
    USUAL_SKEW_S,
    ClaimRule,
    FromClaim,
    IdentitySettings,
    Issuer,
    Value,
)
from policies.nouns import Tenant
from policies.quantities import quoted, read_seconds
from policies.roles import ROLES, OperatorRole
from policies.shapes import TEXT, Either, Key, Many, Named, Scalar, Table
from policies.sla.fields import Field, Section
from policies.sla.secrets import Outside
from policies.sla.tls import CLIENT_TLS, read_client
from policies.suggest import did_you_mean

_MOST_SKEW_S = 600.0

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


def read_https(text: str) -> str:
    """An https URL; http is for this machine alone. Raises ValueError with a sentence."""
    try:
        parts = urlsplit(text)
        host, is_sound = parts.hostname, parts.port != 0 and not parts.fragment and parts.username is None
    except ValueError:
        host, is_sound = None, False
    if not host or not is_sound or parts.scheme not in {"http", "https"}:
        raise ValueError(f"must be a URL such as https://login.example.com, not {quoted(text)}")
    if parts.scheme == "http" and host not in _LOOPBACK:
        raise ValueError("must begin with https://: keys that come in plain text could be exchanged on their way")
    return text


def read_algorithm(text: str) -> str:
    """An algorithm of signatures with a public key. Raises ValueError with a sentence."""
    if text in ALGORITHMS:
        return text
    if text.upper().startswith("HS") or text.lower() == "none":
        raise ValueError(f"{text} is never allowed: its signatures prove nothing here (known: {', '.join(ALGORITHMS)})")
    hint = did_you_mean(text, ALGORITHMS) or f"known: {', '.join(ALGORITHMS)}"
    raise ValueError(f"there is no algorithm {quoted(text)} ({hint})")


def read_role(text: str) -> OperatorRole:
    """A role of operators. Raises ValueError with a sentence."""
    if text not in ROLES:
        hint = did_you_mean(text, ROLES) or f"known: {', '.join(ROLES)}"
        raise ValueError(f"there is no role {quoted(text)} ({hint})")
    return ROLES[text]


URL = Scalar(read_https, {"type": "string", "pattern": r"^\s*https?://"})
ALGORITHM = Scalar(read_algorithm, {"enum": list(ALGORITHMS)})
ROLE = Scalar(read_role, {"enum": list(ROLES)})
CLAIM = Table(
    {"claim": Key(TEXT, "the claim with the value: a name, or a path such as realm_access.org", required=True)}
)
VALUE = Either((TEXT, CLAIM))

ISSUER = Table(
    {
        "issuer": Key(URL, "the issuer as its tokens name it in `iss`", required=True),
        "audience": Key(Many(TEXT), "what its tokens for this router name in `aud`", required=True),
        "jwks": Key(TEXT, "its keys: a URL, or a file; default: where its discovery document says"),
        "algorithms": Key(Many(ALGORITHM), f"allowed signatures; default {', '.join(sorted(USUAL_ALGORITHMS))}"),
        "skew": Key(read_seconds, "how far clocks may differ; default 60s"),
        "keep": Key(read_seconds, "how long its keys are used while it cannot be reached; default 24h"),
        "tls": Key(CLIENT_TLS, "certificates for connections to it; default: the system's authorities"),
    }
)

WHEN = Table(
    {
        "issuer": Key(Many(TEXT), "names of issuers; default any"),
        "claims": Key(Named(Many(TEXT), free=True), "claims by name: each must have one of these values"),
    }
)

RULE = Table(
    {
        "when": Key(WHEN, "the condition: every key in it must match; default always"),
        "tenant": Key(VALUE, "the tenant, or {claim: NAME}"),
        "team": Key(VALUE, "the tenant's team, or {claim: NAME}; default none"),
        "user": Key(VALUE, "the end user, such as {claim: sub}; default: as the request says"),
        "classes": Key(Many(TEXT), "service classes that the token may use; default the tenant's"),
        "models": Key(Many(TEXT), "models that the token may use; default the tenant's"),
        "role": Key(ROLE, "the role at the operators' port: viewer, operator or owner; default none"),
    }
)

IDENTITY = Table(
    {
        "issuers": Key(Named(ISSUER), "issuers of trusted tokens, by a name of yours", required=True),
        "rules": Key(Many(RULE), "what a token gives: the first rule that matches wins", required=True),
    }
)


@dataclass(frozen=True, slots=True)
class Assignable:
    """The names that rules may refer to."""

    tenants: Mapping[str, Tenant]
    classes: Collection[str]


def read_identity(field: Field | None, known: Assignable, outside: Outside) -> IdentitySettings | None:
    """The issuers and rules; None without the section."""
    if field is None:
        return None
    section = field.section(IDENTITY)
    given = section.get("issuers")
    fields = given.named_entries() if given else {}
    if given is not None and not fields and given.is_sound():
        given.complain("has no issuer (write a name of yours, with issuer: https://... and audience: ...)")
    issuers = {
        name: issuer for name, entry in fields.items() if (issuer := _read_issuer(name, entry, outside)) is not None
    }
    _refuse_twins(fields, issuers)
    rules = [(item, _read_rule(item, fields, known)) for item in section.items("rules")]
    _check_reach(rules)
    return IdentitySettings(issuers, tuple(rule for _, rule in rules))


def _read_issuer(name: str, field: Field, outside: Outside) -> Issuer | None:
    section = field.section(ISSUER)
    url, jwks, keep = section.read_any("issuer"), section.get("jwks"), section.read("keep", USUAL_KEEP_S)
    skew_s = section.read("skew", USUAL_SKEW_S)
    if skew_s > _MOST_SKEW_S:
        section.entries["skew"].complain("must be at most 10m: expired tokens are accepted for so long")
    place = None if jwks is None else jwks.read(_read_place)
    if jwks is not None and place is not None and (doubt := _doubt_of_keys(place, outside)) is not None:
        jwks.doubt(f"{doubt}: until it can be read, no token of this issuer is accepted")
    algorithms = frozenset(section.read_many("algorithms"))
    if url is None:
        return None
    return Issuer(
        name,
        url,
        frozenset(section.texts("audience")),
        jwks=place,
        algorithms=algorithms or USUAL_ALGORITHMS,
        skew_s=skew_s,
        keep_s=keep,
        tls=read_client(section.get("tls")),
    )


def _doubt_of_keys(place: str, outside: Outside) -> str | None:
    """Why a file of keys at `place` is of no use; None for a URL, and where files may be absent."""
    return None if "://" in place or outside.may_be_absent else outside.doubt_keys(place)


def _read_place(text: str) -> str:
    return read_https(text) if "://" in text else text


def _refuse_twins(fields: Mapping[str, Field], issuers: Mapping[str, Issuer]) -> None:
    first: dict[str, str] = {}
    for name, issuer in issuers.items():
        if (other := first.setdefault(issuer.url, name)) != name:
            fields[name].complain(f"is the issuer '{other}' again (give that one a list of audiences)")


def _read_rule(field: Field, issuers: Collection[str], known: Assignable) -> ClaimRule:
    section = field.section(RULE)
    when = section.section("when")
    tenant, team, user = _read_tenant(section, known), _read_value(section, "team"), _read_value(section, "user")
    role = section.read_any("role")
    if "tenant" not in section and "role" not in section:
        field.complain("gives nothing (write a tenant, a role, or both)")
    for name in ("team", "user", "classes", "models"):
        if name in section and "tenant" not in section:
            section.entries[name].complain("needs a tenant beside it")
    its = known.tenants.get(tenant) if isinstance(tenant, str) else None
    if its is not None and isinstance(team, str) and team not in its.teams:
        section.entries["team"].complain_of_name(team, its.teams, what="team")
    classes, models = section.some_of("classes", known.classes, what="class"), section.texts("models")
    _check_within(section, "classes", classes, its.classes if its else ())
    _check_within(section, "models", models, its.models if its else ())
    return ClaimRule(
        issuers=frozenset(when.some_of("issuer", issuers, what="issuer")),
        claims=_read_claims(when),
        tenant=tenant,
        team=team,
        user=user,
        classes=frozenset(classes),
        models=frozenset(models),
        role=role,
    )


def _read_claims(when: Section) -> dict[str, frozenset[str]]:
    field = when.get("claims")
    return {} if field is None else {name: frozenset(entry.texts()) for name, entry in field.entries().items()}


def _read_tenant(section: Section, known: Assignable) -> Value | None:
    tenant = _read_value(section, "tenant")
    if isinstance(tenant, str) and tenant not in known.tenants:
        section.entries["tenant"].complain_of_name(tenant, known.tenants, what="tenant")
        return None
    return tenant


def _read_value(section: Section, name: str) -> Value | None:
    field = section.get(name)
    if field is None or not isinstance(field.node.value, dict):
        return None if field is None else field.text()
    claim = field.section(CLAIM).read_any("claim")
    return None if claim is None else FromClaim(claim)


def _check_within(section: Section, name: str, wanted: Collection[str], own: Collection[str]) -> None:
    """Complain of names that the tenant itself may not use; it may use all if `own` is empty."""
    if own and (more := sorted(set(wanted) - set(own))):
        section.entries[name].complain(
            f"has {more[0]}, which the tenant may not use (it may use {', '.join(sorted(own))})"
        )


def _check_reach(rules: Sequence[tuple[Field, ClaimRule]]) -> None:
    """Complain of rules that an earlier one takes every token from, and doubt those that lose some to a lower role."""
    for gives in ("tenant", "role"):
        giving = [(field, rule) for field, rule in rules if getattr(rule, gives) is not None and field.is_sound()]
        for at, (field, rule) in enumerate(giving):
            taker = next((earlier for _, earlier in giving[:at] if _takes_all(earlier, rule, gives)), None)
            if taker is not None and not taker.issuers and not taker.claims:
                field.complain(f"is never reached: the rule before it gives every token a {gives} (put it last)")
            elif taker is not None:
                field.complain(f"is never reached: a rule before it gives all its tokens a {gives} (put it first)")
            elif gives == "role" and (lower := _lower(giving[:at], rule)) is not None:
                field.doubt(
                    f"a token that an earlier rule matches too is only a {lower}'s (put the higher role first, unless "
                    "that is meant)"
                )


def _takes_all(earlier: ClaimRule, later: ClaimRule, gives: str) -> bool:
    """Whether every token that `later` matches gets a tenant, or a role, from `earlier`."""
    takes = any(isinstance(value, FromClaim) for value in (earlier.tenant, earlier.team, earlier.user))
    if gives == "tenant" and takes:
        return False
    if earlier.issuers and not (later.issuers and later.issuers <= earlier.issuers):
        return False
    return all(name in later.claims and later.claims[name] <= wanted for name, wanted in earlier.claims.items())


def _lower(earlier: Sequence[tuple[Field, ClaimRule]], rule: ClaimRule) -> OperatorRole | None:
    """The role that some token of `rule` may get from one of the `earlier` rules, if that is lower; else None."""
    assert rule.role is not None, "it gives a role"
    for _, taker in earlier:
        may_match = not taker.issuers or not rule.issuers or taker.issuers & rule.issuers
        if taker.role is not None and taker.role < rule.role and may_match:
            return taker.role
    return None

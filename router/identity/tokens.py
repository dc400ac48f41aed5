"""Verifies tokens, and keeps those that were verified until they expire.

Sources: RFC 7515 (JWS), RFC 7519 (JWT), RFC 8725 (best practices), RFC 9068 (access tokens).
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from joserfc import jws
from joserfc.errors import JoseError
from joserfc.jws import JWSRegistry

from backends.nesting import decode_json
from policies.errors import Unauthenticated
from policies.identity import Claims, Issuer
from policies.keys import hash_of
from router.identity.issuers import Issuers, KeyFetcher, KnownIssuer, MakeSource
from router.identity.signing_keys import SigningKey

MOST_BYTES = 16 << 10
"""Of one token."""

MOST_KNOWN = 20_000
"""Verified tokens that are kept, 1.2 KB each with ten claims; the one that was verified first makes room."""

_NEW = "get a new token from its issuer"


def _no_source(issuer: Issuer) -> KeyFetcher:
    raise AssertionError(f"{issuer.name} has no source")


class Verified:
    """A token that was verified: its issuer by the file's name, and its claims. `expires` is Unix time.

    `seen` is for the reader of the claims: what it made of them.
    """

    __slots__ = ("claims", "expires", "issuer", "key", "seen")

    def __init__(self, issuer: str, claims: Claims, expires: float, key: SigningKey) -> None:
        self.issuer, self.claims, self.expires, self.key = issuer, claims, expires, key
        self.seen: Any = None

    def __repr__(self) -> str:
        return f"<Verified by {self.issuer}, {len(self.claims)} claims>"


class Verifier:
    """Verifies the tokens of `issuers`. `unix_time` is the router's clock."""

    def __init__(self, issuers: Issuers, *, unix_time: Callable[[], float]) -> None:
        self.issuers, self._unix_time = issuers, unix_time
        self._known: dict[str, Verified] = {}
        issuers.on_gone = self._forget

    def __repr__(self) -> str:
        return f"<Verifier, {len(self._known)} verified, of {self.issuers!r}>"

    def find(self, token: str, digest: str | None = None) -> Verified | None:
        """The token, verified; None for text that is no token. `digest` is its `hash_of`, if that is known.

        Raises Unauthenticated, and KeysAway while it cannot be verified; no text of an error is from the token.
        """
        if not is_token(token):
            return None
        digest = digest or hash_of(token)
        now = self._unix_time()
        known = self._known.get(digest)
        if known is None:
            known = self._known[digest] = self._verified(token, now)
            if len(self._known) > MOST_KNOWN:
                del self._known[next(iter(self._known))]
        elif now >= known.expires:
            del self._known[digest]
            raise _expired()
        return known

    def follow(self, issuers: Mapping[str, Issuer], source_of: MakeSource = _no_source) -> None:
        """Trust these `issuers` from now on, and no others. Every token is verified anew."""
        self.issuers.follow(issuers, source_of)
        self._known.clear()

    def _forget(self, keys: frozenset[SigningKey]) -> None:
        for digest in [digest for digest, known in self._known.items() if known.key in keys]:
            del self._known[digest]

    def _verified(self, token: str, now: float) -> Verified:
        header, claims = _parts(token)
        issuer = self.issuers.at(claims.get("iss"))
        if issuer is None:
            hint = "get one from an issuer that the operator names"
            raise Unauthenticated("the token's issuer is not trusted here", hint=hint)
        key = _key(header, issuer)
        registry = _Registry(issuer.settings.algorithms)
        try:
            # the claims are those that were parsed: the signature is over the same text
            jws.deserialize_compact(token, key.public, registry=registry)
        except (JoseError, ValueError, TypeError) as error:
            raise Unauthenticated("the token's signature is not valid", hint=_NEW) from error
        return Verified(issuer.settings.name, claims, _checked(claims, issuer.settings, now), key)


class _Registry(JWSRegistry):
    """Allows these algorithms alone. joserfc warns of EdDSA, which does not say its curve: here the key does."""

    max_header_length = MOST_BYTES
    max_payload_length = MOST_BYTES

    def __init__(self, allowed: frozenset[str]) -> None:
        super().__init__(algorithms=allowed, strict_check_header=False)

    def get_alg(self, name: str) -> Any:
        assert name in (self.allowed or ()), "it was compared before"
        return self.algorithms[name]


def is_token(text: str) -> bool:
    """Whether it has the form of a signed token: three parts, the first of which is a JSON object in base64url."""
    return text.startswith("eyJ") and text.count(".") == 2


def _parts(token: str) -> tuple[Mapping[str, Any], Claims]:
    """Header and claims, which are not verified yet. Raises Unauthenticated."""
    header, payload, _ = token.split(".")
    if len(token) > MOST_BYTES:
        raise Unauthenticated(f"the token is longer than {MOST_BYTES:,} bytes", hint="ask for one with fewer claims")
    return _decoded(header), _decoded(payload)


def _decoded(part: str) -> Mapping[str, Any]:
    try:
        found = decode_json(base64.b64decode(part + "=" * (-len(part) % 4), altchars=b"-_", validate=True))
    except (ValueError, binascii.Error, msgspec.DecodeError, UnicodeError) as error:
        raise _unreadable() from error
    if not isinstance(found, dict):
        raise _unreadable()
    return found


def _unreadable() -> Unauthenticated:
    return Unauthenticated("the token cannot be read", hint="send the whole token as its issuer gave it")


def _key(header: Mapping[str, Any], issuer: KnownIssuer) -> SigningKey:
    """The key that the token is said to be signed with. Raises Unauthenticated, UnknownKey, KeysAway."""
    algorithm, kid = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in issuer.settings.algorithms:
        hint = f"tokens of its issuer are signed with {' or '.join(sorted(issuer.settings.algorithms))}"
        raise Unauthenticated("the token's signature algorithm is not allowed", hint=hint)
    if "crit" in header or not isinstance(kid, str | None):
        raise Unauthenticated("the token's header has members that are not supported", hint=_NEW)
    return issuer.key_for(kid, algorithm)


def _checked(claims: Claims, issuer: Issuer, now: float) -> float:
    """When the token expires, in Unix time, skew included. Raises Unauthenticated if it is not valid now."""
    expires, begins = _moment(claims, "exp"), _moment(claims, "nbf")
    if expires is None:
        raise Unauthenticated("the token has no expiry", hint="its issuer must give it the claim `exp`")
    if now >= expires + issuer.skew_s:
        raise _expired()
    if begins is not None and now < begins - issuer.skew_s:
        hint = "compare the clocks of issuer and router"
        raise Unauthenticated("the token is not valid yet", hint=hint)
    audiences = claims.get("aud")
    named = {audiences} if isinstance(audiences, str) else audiences
    if not isinstance(named, set | list) or not any(one in issuer.audiences for one in named if isinstance(one, str)):
        hint = "ask its issuer for a token with the audience that the operator names"
        raise Unauthenticated("the token is for another audience", hint=hint)
    return expires + issuer.skew_s


def _moment(claims: Claims, name: str) -> float | None:
    """The NumericDate `name` (RFC 7519, section 2); None without one. Raises Unauthenticated."""
    value = claims.get(name)
    if value is None:
        return None
    # 4e11: the year 14645, so that no sum overflows
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 4e11:
        raise Unauthenticated("a time in the token is not a number of seconds", hint=_NEW)
    return float(value)


def _expired() -> Unauthenticated:
    return Unauthenticated("the token has expired", hint=_NEW)

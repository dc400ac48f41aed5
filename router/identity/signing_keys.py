"""The public keys of one issuer, as its JWKS document has them (RFC 7517)."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from joserfc import jwk
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, OKPKey, RSAKey

from backends.nesting import decode_json

MOST_KEYS = 100
"""Keys of one document that are read."""

_LEAST_RSA_BITS = 2048
"""RFC 7518, section 3.3."""

_MOST_RSA_BITS, _MOST_EXPONENT_BITS = 16_384, 64
"""OpenSSL's bounds (OPENSSL_RSA_MAX_MODULUS_BITS, OPENSSL_RSA_MAX_PUBEXP_BITS): a signature by more takes seconds."""

_MOST_TEXT = 4096
"""Characters of a member of a key."""

_PUBLIC = {"RSA": ("n", "e"), "EC": ("crv", "x", "y"), "OKP": ("crv", "x")}
"""The members of each type that make a public key; private ones are not read."""

_CURVES = {"ES256": "P-256", "ES384": "P-384", "ES512": "P-521", "EdDSA": "Ed25519"}


class SigningKey:
    """One key. `fits` an algorithm of its type and curve that its issuer allows it for."""

    __slots__ = ("_algorithm", "_kind", "kid", "material", "public")

    def __init__(
        self, material: bytes, kid: str | None, algorithm: str | None, public: RSAKey | ECKey | OKPKey
    ) -> None:
        self.material, self.kid, self.public = material, kid, public
        self._algorithm = "EdDSA" if algorithm == "Ed25519" else algorithm
        self._kind = public.key_type if isinstance(public, RSAKey) else public.curve_name

    def __repr__(self) -> str:
        return f"<SigningKey {self._kind}>"

    def fits(self, algorithm: str) -> bool:
        """Whether a signature of this algorithm may be made with it."""
        return self._kind == _CURVES.get(algorithm, "RSA") and self._algorithm in (None, algorithm)


class SigningKeys(NamedTuple):
    """The keys of an issuer that can verify signatures. Immutable: each fetch makes new ones."""

    keys: tuple[SigningKey, ...]

    def candidates(self, kid: str | None, algorithm: str) -> list[SigningKey]:
        """The keys that a token of this algorithm may be signed with; if it names a key, those of this name."""
        return [key for key in self.keys if key.fits(algorithm) and kid in (None, key.kid)]


NO_KEYS = SigningKeys(())


def read_keys(document: bytes, before: SigningKeys = NO_KEYS) -> SigningKeys:
    """The keys in a JWKS document; those that are in `before` too are the same objects.

    Keys for encryption, shared secrets and unknown types are left out. Raises ValueError with a sentence if no key is
    left.
    """
    try:
        found = decode_json(document)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ValueError("its key document is not JSON") from error
    entries = found.get("keys") if isinstance(found, Mapping) else None
    if not isinstance(entries, list):
        raise ValueError("its key document has no list `keys` (RFC 7517, section 5)")
    known = {key.material: key for key in before.keys}
    keys = tuple(known.get(key.material, key) for key in _usable(entries[:MOST_KEYS]))
    if not keys:
        raise ValueError("its key document has no key that can verify a signature")
    return SigningKeys(keys)


def _usable(entries: list[Any]) -> Iterator[SigningKey]:
    for entry in entries:
        if isinstance(entry, Mapping) and (key := _read(entry)) is not None:
            yield key


def _read(entry: Mapping[str, Any]) -> SigningKey | None:
    kind, kid, algorithm = entry.get("kty"), entry.get("kid"), entry.get("alg")
    operations = entry.get("key_ops", ["verify"])
    if kind not in _PUBLIC or entry.get("use", "sig") != "sig":
        return None
    if not isinstance(operations, list) or "verify" not in operations:
        return None
    members = {"kty": kind, **{name: entry.get(name) for name in _PUBLIC[kind]}}
    if not all(isinstance(value, str) and len(value) <= _MOST_TEXT for value in members.values()):
        return None
    named = {"kid": kid if isinstance(kid, str) else None, "alg": algorithm if isinstance(algorithm, str) else None}
    try:
        # joserfc only warns of a short key
        if kind == "RSA" and not (
            _LEAST_RSA_BITS <= _bits(members["n"]) <= _MOST_RSA_BITS and _bits(members["e"]) <= _MOST_EXPONENT_BITS
        ):
            return None
        public = jwk.import_key(members)
    except (JoseError, ValueError, TypeError):
        return None
    if not isinstance(public, RSAKey | ECKey | OKPKey):
        return None
    material = msgspec.json.encode({**members, **named}, order="sorted")
    return SigningKey(material, named["kid"], named["alg"], public)


def _bits(number: str) -> int:
    """The length of a number in base64url. Raises ValueError."""
    return int.from_bytes(base64.urlsafe_b64decode(number + "=" * (-len(number) % 4))).bit_length()

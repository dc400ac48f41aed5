"""An issuer on this machine: real keys, OpenID discovery and a JWKS document over HTTP.

It signs with `cryptography` alone, so that the router's library is checked by other code.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from aiohttp import web
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, padding, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature

AUDIENCE = "pointsman"

PrivateKey = rsa.RSAPrivateKey | ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey


def base64url(data: bytes) -> str:
    """RFC 7515, section 2."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _number(value: int, size: int | None = None) -> str:
    return base64url(value.to_bytes(size or (value.bit_length() + 7) // 8))


@cache
def an_rsa_key(number: int = 0, bits: int = 2048) -> rsa.RSAPrivateKey:
    """The same key for the same number: making one takes 50 ms."""
    return rsa.generate_private_key(65537, bits)


def a_key(algorithm: str, number: int = 0) -> PrivateKey:
    if algorithm == "ES256":
        return ec.generate_private_key(ec.SECP256R1())
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return an_rsa_key(number)


def jwk_of(key: PrivateKey, **members: Any) -> dict[str, Any]:
    """The public key as a JWK (RFC 7517, RFC 8037)."""
    if isinstance(key, rsa.RSAPrivateKey):
        numbers = key.public_key().public_numbers()
        return {"kty": "RSA", "n": _number(numbers.n), "e": _number(numbers.e), **members}
    if isinstance(key, ec.EllipticCurvePrivateKey):
        point = key.public_key().public_numbers()
        return {"kty": "EC", "crv": "P-256", "x": _number(point.x, 32), "y": _number(point.y, 32), **members}
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return {"kty": "OKP", "crv": "Ed25519", "x": base64url(raw), **members}


def pem_of(key: PrivateKey) -> bytes:
    """The public key in PEM, which every client may know."""
    return key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)


def signature(key: PrivateKey | bytes, algorithm: str, text: bytes) -> bytes:
    """The signature of `text` (RFC 7518, section 3)."""
    if isinstance(key, bytes):
        return hmac.new(key, text, hashlib.sha256).digest()
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(text)
    if isinstance(key, ec.EllipticCurvePrivateKey):
        r, s = decode_dss_signature(key.sign(text, ec.ECDSA(hashes.SHA256())))
        return r.to_bytes(32) + s.to_bytes(32)
    if algorithm == "PS256":
        return key.sign(text, padding.PSS(padding.MGF1(hashes.SHA256()), 32), hashes.SHA256())
    return key.sign(text, padding.PKCS1v15(), hashes.SHA256())


def signed(header: Any, claims: Any, key: PrivateKey | bytes | None) -> str:
    """A token with this header and these claims, whatever they are; without a key its signature is empty."""
    text = ".".join(
        base64url(part if isinstance(part, bytes) else json.dumps(part).encode()) for part in (header, claims)
    )
    algorithm = header.get("alg", "") if isinstance(header, Mapping) else ""
    return f"{text}.{'' if key is None else base64url(signature(key, algorithm, text.encode()))}"


@dataclass
class LocalIssuer:
    """Publishes the keys in `keys` (kid -> algorithm and key). `fails` has it answer with 503; `fetches` counts."""

    url: str = ""
    keys: dict[str, tuple[str, PrivateKey]] = field(default_factory=dict)
    fails: bool = False
    fetches: int = 0
    document: Any = None
    discovery: Any = None

    def add(self, kid: str, algorithm: str = "RS256", number: int = 0) -> None:
        """Publish one more key."""
        self.keys[kid] = (algorithm, a_key(algorithm, number))

    def claims(self, **changed: Any) -> dict[str, Any]:
        """Claims of a good token; None removes one."""
        now = int(time.time())
        usual = {"iss": self.url, "aud": AUDIENCE, "sub": "u-17", "iat": now, "exp": now + 600}
        return {name: value for name, value in {**usual, **changed}.items() if value is not None}

    def token(self, kid: str | None = None, *, header: Mapping[str, Any] | None = None, **claims: Any) -> str:
        """A token that is signed with the key `kid`, by default the first."""
        kid = kid or next(iter(self.keys))
        algorithm, key = self.keys[kid]
        return signed({"alg": algorithm, "typ": "JWT", "kid": kid, **(header or {})}, self.claims(**claims), key)

    def section(self, *rules: str, **issuer: Any) -> str:
        """The section `identity` of a file that trusts it, with these `rules` in YAML."""
        settings = {"issuer": self.url, "audience": AUDIENCE, **issuer}
        lines = "".join(f"\n    - {rule}" for rule in rules)
        return f"identity:\n  issuers: {{corp: {json.dumps(settings)}}}\n  rules:{lines}\n"

    async def _discovery(self, _: web.Request) -> web.Response:
        if self.fails:
            return web.Response(status=503)
        return web.json_response(self.discovery or {"issuer": self.url, "jwks_uri": f"{self.url}/keys"})

    async def _keys(self, _: web.Request) -> web.Response:
        self.fetches += 1
        if self.fails:
            return web.Response(status=503)
        keys = [jwk_of(key, kid=kid, use="sig", alg=alg) for kid, (alg, key) in self.keys.items()]
        return web.json_response(self.document if self.document is not None else {"keys": keys})


@asynccontextmanager
async def a_local_issuer(*algorithms: str) -> AsyncIterator[LocalIssuer]:
    """A running issuer, with a key k0, k1, ... for each of `algorithms`."""
    issuer, app = LocalIssuer(), web.Application()
    for number, algorithm in enumerate(algorithms or ("RS256",)):
        issuer.add(f"k{number}", algorithm, number)
    app.router.add_get("/.well-known/openid-configuration", issuer._discovery)
    app.router.add_get("/keys", issuer._keys)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    issuer.url = f"http://{host}:{port}"
    try:
        yield issuer
    finally:
        await runner.cleanup()

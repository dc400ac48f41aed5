"""The headers of a webhook, signed as Standard Webhooks 1.0.0 does."""

from __future__ import annotations

import base64
import hashlib
import hmac


def webhook_headers(id: str, body: bytes, secret: str | None, now: int) -> dict[str, str]:  # noqa: A002 - the webhook's
    """The headers of the webhook `id` with this `body` at the Unix time `now`; signed, if there is a `secret`."""
    headers = {"Content-Type": "application/json", "webhook-id": id, "webhook-timestamp": str(now)}
    if secret is not None:
        signed = f"{id}.{now}.".encode() + body
        digest = hmac.new(_key_of(secret), signed, hashlib.sha256).digest()
        headers["webhook-signature"] = f"v1,{base64.b64encode(digest).decode()}"
    return headers


def _key_of(secret: str) -> bytes:
    """The bytes of a secret: base64 behind `whsec_`, as Standard Webhooks writes them, or the text itself."""
    if secret.startswith("whsec_"):
        try:
            return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except ValueError:
            pass
    return secret.encode()

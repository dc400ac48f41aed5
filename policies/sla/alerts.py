"""The section `alerts`: where operators are told of budgets that are near their end."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from urllib.parse import urlsplit

from policies.quantities import quoted
from policies.shapes import Key, Scalar, Table
from policies.sla.fields import Field
from policies.sla.secrets import Outside


@dataclass(frozen=True, slots=True)
class AlertSettings:
    """Where operators are told of budgets that are near their end: an http or https URL. `secret` signs."""

    webhook: str = dataclasses.field(repr=False)
    secret: str | None = dataclasses.field(default=None, repr=False)


_TEXT = Scalar(str, {"type": "string", "minLength": 1})

ALERTS = Table(
    {
        "webhook": Key(_TEXT, "an http or https URL, or ${env:NAME} if it is a secret", required=True),
        "secret": Key(_TEXT, "${env:NAME} or ${file:path}: signs each alert; default: no signature"),
    }
)


def read_alerts(field: Field | None, *, outside: Outside) -> AlertSettings | None:
    """Where alerts go; None without the section."""
    if field is None:
        return None
    section = field.section(ALERTS)
    given, signing = section.get("webhook"), section.get("secret")
    webhook = None if given is None else given.read(lambda text: read_webhook(text, outside))
    secret = None if signing is None else signing.read(outside.secret)
    return None if webhook is None else AlertSettings(webhook, secret)


def read_webhook(text: str, outside: Outside) -> str:
    """The URL in `text`, or that it refers to. Raises ValueError with a sentence."""
    url = outside.resolve(text.strip(), lambda name: f"https://{name}.invalid")
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url:
        raise ValueError(f"must be a URL such as https://hooks.example.com/path, not {quoted(url.split('://')[0])}...")
    return url

"""All calls of files and batches."""

from __future__ import annotations

from router.batches.api.anthropic import add_anthropic_batches
from router.batches.api.asker import Desk
from router.batches.api.files import add_files
from router.batches.api.openai import add_openai_batches
from router.batches.batches import Batches
from router.call.gateway import Gateway
from router.protocols.http.routes import Routes


def add_batches(routes: Routes, gateway: Gateway, batches: Batches | None) -> None:
    """Add the calls to `routes`; without `batches` each says that there are none."""
    desk = Desk(gateway, batches)
    add_files(routes, desk)
    add_openai_batches(routes, desk)
    add_anthropic_batches(routes, desk)

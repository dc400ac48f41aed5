"""All calls of files and batches."""

from __future__ import annotations

from collections.abc import Callable

from policies.sla.config import Config
from router.batches.api.anthropic import add_anthropic_batches
from router.batches.api.asker import Desk
from router.batches.api.files import add_files
from router.batches.api.openai import add_openai_batches
from router.batches.batches import Batches
from router.call.identify import Identities
from router.protocols.http.routes import Routes


def add_batches(
    routes: Routes, identities: Identities, in_force: Callable[[], Config], batches: Batches | None
) -> None:
    """Add the calls to `routes`; without `batches` each says that there are none."""
    desk = Desk(identities, in_force, batches)
    add_files(routes, desk)
    add_openai_batches(routes, desk)
    add_anthropic_batches(routes, desk)

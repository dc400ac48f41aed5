"""Counts the tokens of a prompt, chat template included, for every protocol with such a call."""

from __future__ import annotations

from policies.errors import Unsupported
from policies.nouns import Tenant
from policies.sla.config import Config
from router.ask import Ask
from router.call.models import Models
from router.call.prompts import Prompts
from router.text.documents import written


async def count_tokens(ask: Ask, tenant: Tenant, config: Config, models: Models, prompts: Prompts) -> int:
    """The tokens of the one prompt of `ask`. Raises UnknownModel, and Unsupported without its tokenizer."""
    model = models.find(ask.model, tenant, config)
    (tokens,) = await prompts.tokens(written(ask), model, tenant, config, is_asked=True)
    if not tokens.token_ids:
        hint = "operators can give its pool a `tokenizer`"
        message = f"the router has no tokenizer of '{model.name}', and no backend counts for it"
        raise Unsupported(message, hint=hint, param="model")
    return tokens.count

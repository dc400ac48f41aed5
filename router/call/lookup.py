"""What backends hold of a prompt, before a call and after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from policies.learning.text_length import TextLengths
from policies.nouns import BackendView
from policies.sla.config import Config
from router.call.observer import Observer
from router.call.prompts import Prepared, keyed_name
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.flights import Flight
from router.fleet.prompt_keys import ChunkKeys, PromptKeys
from router.text.tokenize import Tokens
from shards.kv.keys import root_key


class LookedUp(NamedTuple):
    """One prompt as tokens, the keys that it is looked up by, the tokens of it that each backend was believed to hold,
    and its tokens that no backend which may serve it held.
    """

    tokens: Tokens
    keys: PromptKeys
    held: Mapping[str, int]
    uncached_tokens: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """Looks prompts up in `beliefs` of the backends of `cluster`, and learns from the ends of their flights."""

    cluster: Cluster
    beliefs: Beliefs
    text_lengths: TextLengths
    observer: Observer
    clock: Callable[[], float]

    def of(
        self,
        tokens: Tokens,
        body: Mapping[str, Any] | None,
        common: Prepared,
        *,
        chunks: tuple[ChunkKeys, ...] = (),
    ) -> LookedUp:
        """What backends of a model hold now in a cache domain, which the call has in `common` with others, of this
        prompt, which came in `body`, and of the `chunks` of its documents."""
        keys = PromptKeys(
            tokens.keys,
            common.name,
            is_exact=tokens.least is None,
            token_ids=tokens.token_ids,
            shared_root=common.shared_root,
            compares=not (body and body.get("truncate_prompt_tokens")),
            key_tokens=tokens.key_tokens,
            chunks=chunks,
        )
        if not tokens.keys:
            # shorter than what caches hold
            return LookedUp(tokens, keys, {}, tokens.count)
        held = self.believed(tokens, keys)
        return LookedUp(tokens, keys, held, tokens.count - self.cluster.most_held(common.model.name, held))

    def believed(self, tokens: Tokens, prompt: PromptKeys) -> dict[str, int]:
        """Backend -> tokens of this prompt's beginning that it is expected to hold: how many, times how likely that is;
        and of its documents, where they may be reused.
        """
        held: dict[str, int] = {}
        for name, match in self.beliefs.longest(prompt).items():
            held[name] = min(round(match.expected_blocks * prompt.key_tokens), tokens.count)
        return self.beliefs.with_chunks(held, prompt) if prompt.chunks else held

    def learn(self, prompt: LookedUp, model: str, flight: Flight, where: BackendView) -> None:
        """Learn from the end of the last flight of `prompt` what `where` holds now, and how long such prompts are.

        `model` is its name for clients.
        """
        self.beliefs.ended(prompt.keys, flight, where)
        tokens, usage = prompt.tokens, flight.usage
        if tokens.measured is None or usage is None or usage.is_guess or not usage.prompt_tokens:
            return
        self.observer.estimated(model, abs(tokens.count / usage.prompt_tokens - 1.0))
        self.text_lengths.learn(prompt.keys.model, tokens.measured, usage.prompt_tokens, now=self.clock())

    def roots_of(self, domain: str, config: Config) -> frozenset[int]:
        """The keys that all block keys of cache `domain` come from, one for each model that is served."""
        models = self.cluster.models().values()
        return frozenset(root_key(keyed_name(model, config), domain) for model in models)

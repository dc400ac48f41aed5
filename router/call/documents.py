"""The documents of a call: their order where the client left it open, and the memory for their text."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from policies.documents import best_order
from policies.errors import InvalidRequest
from policies.learning.cost import Latency
from policies.learning.document_uses import DocumentUses
from policies.nouns import Tenant, Usage
from policies.quantities import PRICE_PARTS
from policies.quota.prices import Prices
from policies.sla.config import Config
from router.ask import Ask, AskDocument, Chat, DocumentSpans
from router.call.bodies import Held
from router.call.prompts import Prompts, keyed_name
from router.fleet.beliefs import Beliefs
from router.fleet.cluster.cluster import Cluster
from router.fleet.cluster.served_model import ServedModel
from router.fleet.prompt_keys import ChunkKeys
from router.shared.documents.document_set import Uses
from router.shared.documents.sets import DocumentSets
from router.text.cuts import UncuttableError
from router.text.documents import COPIES, HEADING, MARK, START, text_of, written
from router.text.estimates import keyed_bytes
from router.text.tokenize import Tokens
from shards.kv.chunks import LEAST_TOKENS, DocumentChunk
from shards.kv.keys import TOKEN_BYTES, root_key

EXACT = 1.0
"""The budget with which no KV is approximate."""


class Documents:
    """Writes documents into prompts: those of `sets` too, in the order of which a backend of `cluster` holds most by
    `beliefs`, as sessions used them before (`uses`)."""

    def __init__(
        self,
        prompts: Prompts,
        cluster: Cluster,
        beliefs: Beliefs,
        sets: DocumentSets,
        uses: DocumentUses,
        clock: Callable[[], float],
    ) -> None:
        self._prompts, self._cluster, self._beliefs = prompts, cluster, beliefs
        self._sets, self._uses, self._clock = sets, uses, clock

    async def written(self, ask: Ask, model: ServedModel, tenant: Tenant, config: Config, held: Held) -> Ask:
        """`ask` with its documents as text in its prompt: in the client's order, or if that is free, each once and in
        the order of which a backend holds most.

        Documents of a document set get their texts. Raises InvalidRequest, UnknownDocument, RequestTooLarge and
        Overloaded.
        """
        documents = ask.documents
        if documents is None:
            return ask
        named: frozenset[str] | None = None
        if documents.of_set:
            given = {document.id for document in documents.each if document.text}
            documents = await self._sets.resolved(documents, tenant.name)
            named = frozenset(document.id for document in documents.each if document.id not in given)
            ask = replace(ask, documents=documents)
        each: Sequence[AskDocument] = documents.each
        size = COPIES * sum([sys.getsizeof(document.text) for document in each])
        await held.take(size, "the text of its documents", "send fewer or shorter documents")
        if documents.is_free:
            each = await self._ordered(ask, tuple(dict.fromkeys(each)), model, tenant, config)
        filled = written(ask, each)
        filled = replace(filled, document_spans=await self._token_spans(ask, each, model, tenant, config))
        return filled if named is None else replace(filled, spans=_spans(ask, each, named))

    def chunks_of(
        self, ask: Ask, tokens: Tokens, model: ServedModel, tenant: Tenant, config: Config
    ) -> tuple[ChunkKeys, ...]:
        """The chunks of the documents of `ask`, if the client or its tenant permits reuse; rules are not known yet."""
        budget = tenant.reuse_budget if ask.reuse_budget is None else ask.reuse_budget
        if not ask.document_spans or budget is None or budget == EXACT:
            return ()
        name, found = keyed_name(model, config), list[ChunkKeys]()
        for start, stop in ask.document_spans:
            if stop - start >= LEAST_TOKENS and stop <= tokens.count:
                keys = DocumentChunk(tokens.token_ids, start, stop).keys(name, tenant.domain)
                found.append(ChunkKeys(keys, start, stop, 1 - budget))
        return tuple(found)

    async def _token_spans(
        self, ask: Ask, documents: Sequence[AskDocument], model: ServedModel, tenant: Tenant, config: Config
    ) -> tuple[tuple[int, int], ...]:
        """The first token of each document in the prompt, and that behind its last; none unless they may be reused."""
        assert ask.documents is not None, "only a request with documents has places of them"
        budgets = (ask.documents.reuse_budget, tenant.reuse_budget, *(rule.reuse_budget for rule in config.rules))
        if all(budget in (None, EXACT) for budget in budgets) or ask.documents.reuse_budget == EXACT:
            return ()
        data, is_exact = await self._keyed(ask, [*map(text_of, documents)], model, tenant, config)
        if not is_exact or not data:
            return ()
        ends = [*accumulate(len(ids) // TOKEN_BYTES for ids in data)]
        return tuple(pairwise(ends))

    async def _ordered(
        self, ask: Ask, documents: Sequence[AskDocument], model: ServedModel, tenant: Tenant, config: Config
    ) -> list[AskDocument]:
        """`documents` in the order of which a backend holds most; the session and the cache domain remember it."""
        name, texts = keyed_name(model, config), [*map(text_of, documents)]
        hashes = [xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) for text in texts]
        root = root_key(name, tenant.domain)
        data, is_exact = await self._keyed(ask, texts, model, tenant, config)
        now = self._clock()
        # nothing is awaited from here on: caches and uses stay as they are until the order is known
        assert ask.documents is not None, "there is nothing to order"
        places, fixed = self._uses.preferred(root, hashes, ask.session, now, leading=ask.documents.leading)
        if data:
            start, *each = data
            found = best_order(
                start,
                [each[place] for place in places],
                root=root,
                holders=self._beliefs.held(name, is_exact=is_exact, underway=self._cluster.computing),
                fixed=fixed,
            )
            places = tuple(places[place] for place in found.places)
        self._uses.used(root, [hashes[place] for place in places], ask.session, now)
        return [documents[place] for place in places]

    async def _keyed(
        self, ask: Ask, texts: Sequence[str], model: ServedModel, tenant: Tenant, config: Config
    ) -> tuple[list[bytes], bool]:
        """The bytes that keys are made of: of the prompt before its documents, and of each document; are they token
        ids?

        Empty if keys of a document depend on what stands before it, so that no order can be looked up.
        """
        (given,) = ask.inputs
        assert isinstance(given, Chat), "only chats have documents"
        given = replace(given, starts=START)
        text = await self._prompts.text_of(ask, model)
        if text is not None:
            how = self._prompts.how(ask, model, tenant, config)
            try:
                ids = await self._prompts.tokenizers.apart(
                    given, text, how, tenant.name, mark=MARK, texts=[HEADING, *texts]
                )
            except (InvalidRequest, UncuttableError):
                # the whole prompt is read next: what is wrong with it is reported there
                ids = None
            return ids or [], True
        if self._prompts.readers_for(ask, model, tenant, config):
            return [], True
        start, found, _ = keyed_bytes(given).partition(MARK.encode())
        data = [start + HEADING.encode(), *(text.encode("utf-8", "surrogatepass") for text in texts)]
        return data if found else [], False


def uses_of(spans: DocumentSpans, usage: Usage, latency: Latency, prices: Prices, now: float) -> dict[str, Uses]:
    """What each document of `spans` was used for in a request with this `usage`; a token counts by its characters.

    `latency` predicts the seconds that its cached tokens saved, `prices` have the cost. `now` is Unix time.
    """
    tokens_of_character = usage.prompt_tokens / max(1, spans.size)
    uses = dict[str, Uses]()
    for name, (begin, end) in zip(spans.ids, spans.each, strict=True):
        first, last = begin * tokens_of_character, min(end * tokens_of_character, usage.cached_tokens)
        cached = max(0, round(last - first))
        saved_s = latency.prefill_s(cached, round(first)) - latency.fixed_s if cached else 0.0
        saved_cost = cached * (prices.uncached - prices.cached) // PRICE_PARTS
        uses[name] = Uses(1, cached, max(0.0, saved_s), max(0, saved_cost), now)
    return uses


def _spans(ask: Ask, documents: Sequence[AskDocument], named: frozenset[str]) -> DocumentSpans:
    """Where those documents of `ask`, in this order, stand in its prompt that are `named` in its document set."""
    assert ask.documents is not None, "it has documents"
    (given,) = ask.inputs
    assert isinstance(given, Chat), "only chats have documents"
    texts = [str(message.get("content") or "") for message in given.messages]
    start, _, rest = "".join(texts).partition(MARK)
    at, spans = len(start) + len(HEADING), dict[str, tuple[int, int]]()
    for document in documents:
        end = at + len(text_of(document))
        if document.id in named:
            spans.setdefault(document.id, (at, end))
        at = end
    return DocumentSpans(ask.documents.of_set, tuple(spans), tuple(spans.values()), at + len(rest))

"""The documents of a call: their order where the client left it open, and the memory for their text."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from msgspec.structs import replace
from xxhash import xxh3_64_intdigest

from policies.documents import best_order
from policies.errors import InvalidRequest
from policies.nouns import Tenant
from router.ask import Ask, AskDocument, Chat
from router.call.bodies import Held
from router.call.gateway import Gateway
from router.call.prepare import how_read, keyed_name, readers_for, text_of_model
from router.fleet.cluster.served_model import ServedModel
from router.text.cuts import UncuttableError
from router.text.documents import COPIES, HEADING, MARK, START, text_of, written
from router.text.estimates import keyed_bytes
from shards.kv.keys import root_key


async def with_documents(ask: Ask, model: ServedModel, tenant: Tenant, gateway: Gateway, held: Held) -> Ask:
    """`ask` with its documents as text in its prompt: in the client's order, or if that is free, each once and in the
    order of which a backend holds most.

    Raises InvalidRequest, RequestTooLarge, Overloaded.
    """
    if ask.documents is None:
        return ask
    size = COPIES * sum(sys.getsizeof(document.text) for document in ask.documents.each)
    await held.take(size, "the text of its documents", "send fewer or shorter documents")
    if not ask.documents.is_free:
        return written(ask)
    return written(ask, await _ordered(ask, tuple(dict.fromkeys(ask.documents.each)), model, tenant, gateway))


async def _ordered(
    ask: Ask, documents: Sequence[AskDocument], model: ServedModel, tenant: Tenant, gateway: Gateway
) -> list[AskDocument]:
    """`documents` in the order of which a backend holds most; the session and the cache domain remember it."""
    name, texts = keyed_name(model, gateway.config), [*map(text_of, documents)]
    hashes = [xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) for text in texts]
    root = root_key(name, tenant.domain)
    data, is_exact = await _keyed(ask, texts, model, tenant, gateway)
    now = gateway.clock()
    # nothing is awaited from here on: caches and uses stay as they are until the order is known
    assert ask.documents is not None, "there is nothing to order"
    places, fixed = gateway.documents.preferred(root, hashes, ask.session, now, leading=ask.documents.leading)
    if data:
        start, *each = data
        found = best_order(
            start,
            [each[place] for place in places],
            root=root,
            holders=gateway.beliefs.held(name, is_exact=is_exact, underway=gateway.cluster.computing),
            fixed=fixed,
        )
        places = tuple(places[place] for place in found.places)
    gateway.documents.used(root, [hashes[place] for place in places], ask.session, now)
    return [documents[place] for place in places]


async def _keyed(
    ask: Ask, texts: Sequence[str], model: ServedModel, tenant: Tenant, gateway: Gateway
) -> tuple[list[bytes], bool]:
    """The bytes that keys are made of: of the prompt before its documents, and of each document; are they token ids?

    Empty if keys of a document depend on what stands before it, so that no order can be looked up.
    """
    (given,) = ask.inputs
    assert isinstance(given, Chat), "only chats have documents"
    given = replace(given, starts=START)
    text = await text_of_model(ask, model, gateway)
    if text is not None:
        how = how_read(ask, model, tenant, gateway)
        try:
            ids = await gateway.tokenizers.apart(given, text, how, tenant.name, mark=MARK, texts=[HEADING, *texts])
        except (InvalidRequest, UncuttableError):
            # the whole prompt is read next: what is wrong with it is reported there
            ids = None
        return ids or [], True
    if readers_for(ask, model, tenant, gateway):
        return [], True
    start, found, _ = keyed_bytes(given).partition(MARK.encode())
    data = [start + HEADING.encode(), *(text.encode("utf-8", "surrogatepass") for text in texts)]
    return data if found else [], False

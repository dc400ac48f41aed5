"""The documents of a call: their order, and the memory for their text."""

from __future__ import annotations

import sys

from router.ask import Ask
from router.call.bodies import Held
from router.text.documents import COPIES, written


async def with_documents(ask: Ask, held: Held) -> Ask:
    """`ask` with its documents as text in its prompt, in the client's order, each once if that order is free.

    Raises RequestTooLarge, Overloaded.
    """
    if ask.documents is None:
        return ask
    size = COPIES * sum(sys.getsizeof(document.text) for document in ask.documents.each)
    await held.take(size, "the text of its documents", "send fewer or shorter documents")
    documents = ask.documents.each
    return written(ask, tuple(dict.fromkeys(documents)) if ask.documents.is_free else documents)

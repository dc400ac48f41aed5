"""The load of a day: short chats of every dialect, long prompts, documents by name, and clients that leave early."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

from shards.bundled.documents import document, facts_within
from tests.chaos.load import Load, Request

SUBJECTS = 40
"""Different short questions: each is asked many times, and its answer must always be the same."""

LONG_EVERY = 60
"""Of so many requests one has a long prompt."""

LONG_TOKENS = 1_800
LEAVING_SHARE, DOCUMENTS_SHARE = 0.1, 0.15
LEAVES_WITHIN_S = 0.4
SET = "papers"
"""The set of documents of each tenant, with those of DOCUMENTS."""

DOCUMENTS = [{"id": f"d{at}", "text": document(random.Random(at), facts_within(200)).text} for at in range(3)]


@dataclass
class MixedLoad(Load):
    """Draws each request with `rng`, which the number of the request does not determine."""

    rng: random.Random = field(default_factory=random.Random)

    def request(self, number: int, kind: str, tenant: str, router: int) -> Request:
        """See Load."""
        dice = self.rng
        subject = number // len(self.shape.kinds) % SUBJECTS
        made = Request(number, kind, tenant, router, time.monotonic(), question=f"Question {subject}")
        made.fields["temperature"] = 0
        if not kind.startswith("messages"):
            # what the shards write down of a request
            made.fields["seed"] = number
        if number % LONG_EVERY == LONG_EVERY - 1:
            text = document(random.Random(number), facts_within(LONG_TOKENS)).text
            made.question = f"{text}\n\nQuestion: what is number {number}?"
        elif kind.startswith("chat") and dice.random() < DOCUMENTS_SHARE * 4:
            made.fields |= {"document_set": SET, "documents": [{"id": dice.choice(DOCUMENTS)["id"]}]}
        if dice.random() < LEAVING_SHARE:
            made.leaves_after_s = dice.uniform(0.01, LEAVES_WITHIN_S)
        return made

    @staticmethod
    def same(request: Request) -> tuple[str, ...]:
        """Requests with the same of this have the same answer."""
        prompt = "completion" if request.kind.startswith("completion") else "chat"
        named = [each["id"] for each in request.fields.get("documents", ())]
        return (prompt, request.question, *named)

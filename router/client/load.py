"""Load for a server, in a closed or an open loop, and what each request took."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from policies.errors import ExpectedError
from router.client.chats import Reply

Ask = Callable[[str], Awaitable[Reply]]
"""Sends one prompt, and returns its answer. Raises ExpectedError."""

_WORDS = (
    *(
        "river",
        "stone",
        "keeper",
        "mill",
        "harbour",
        "winter",
        "letter",
        "bridge",
        "copper",
        "garden",
        "signal",
        "north",
    ),
    *(
        "lantern",
        "market",
        "orchard",
        "paper",
        "quarry",
        "rope",
        "silver",
        "tower",
        "valley",
        "window",
        "yard",
        "anchor",
    ),
)


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` prompts of `words` words, of which the first `shared_words` are the same in all.

    `rate`: open loop, so many requests per second on average (Poisson), answered or not. None: closed loop, of
    `concurrency` clients that each send the next request when the last one is answered.
    """

    requests: int
    concurrency: int = 8
    rate: float | None = None
    words: int = 500
    shared_words: int = 250
    seed: int = 0

    def prompt(self, number: int) -> str:
        """The prompt of request `number`, the same for the same seed."""
        shared = min(self.shared_words, self.words)
        beginning = _text(random.Random(f"{self.seed}"), shared)
        rest = _text(random.Random(f"{self.seed} {number}"), self.words - shared)
        return f"{beginning} {rest} Write a long story with these words.".strip()

    def arrivals(self) -> Iterator[float]:
        """Seconds from the beginning to each request of the open loop, in order."""
        assert self.rate is not None
        rng, at_s = random.Random(self.seed), 0.0
        for _ in range(self.requests):
            yield at_s
            at_s += rng.expovariate(self.rate)


@dataclass(frozen=True, slots=True)
class Timed:
    """One request: `due_s` and `sent_s` after the beginning, and its reply, or the reason of its failure.

    All times are counted from when it was due: a server that delays a request's sending is not spared that time.
    """

    due_s: float
    sent_s: float
    reply: Reply | None = None
    failure: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token; None if it failed."""
        return None if self.reply is None else self.sent_s - self.due_s + self.reply.first_s

    @property
    def end_s(self) -> float | None:
        """Seconds to the last token; None if it failed."""
        return None if self.reply is None else self.sent_s - self.due_s + self.reply.end_s


async def put_load(load: Load, ask: Ask, clock: Callable[[], float], on_end: Callable[[Timed], None]) -> list[Timed]:
    """Send all requests of `load` by `ask`; returns them in the order of their ends. `on_end` gets each at its end."""
    done: list[Timed] = []
    began = clock()

    async def send(number: int, due_s: float) -> None:
        sent_s = clock() - began
        try:
            timed = Timed(due_s, sent_s, reply=await ask(load.prompt(number)))
        except ExpectedError as error:
            timed = Timed(due_s, sent_s, failure=str(error))
        done.append(timed)
        on_end(timed)

    numbers = iter(range(load.requests))

    async def client() -> None:
        for number in numbers:
            await send(number, clock() - began)

    async with asyncio.TaskGroup() as tasks:
        if load.rate is None:
            for _ in range(min(load.concurrency, load.requests)):
                tasks.create_task(client())
        else:
            for number, due_s in enumerate(load.arrivals()):
                await asyncio.sleep(max(0.0, began + due_s - clock()))
                tasks.create_task(send(number, due_s))
    return done


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))

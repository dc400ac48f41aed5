"""Synthetic documents full of facts, with questions and the answers that are right.

Nothing here needs torch: the demonstration, the tests and the trainer all read the same generator. A document
comes back from a seeded `random.Random`, so the same seed always gives the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "held-out"]

NAMES = tuple(
    "Amber Anchor Aspen Badger Barley Beacon Birch Bramble Canyon Cedar Cinder Clover Cobalt Copper Coral Crane "
    "Curlew Dahlia Dune Ebony Ember Falcon Fern Flint Garnet Ginger Hazel Heron Hollow Indigo Iris Ivory Jasper "
    "Juniper Kestrel Lantern Laurel Linden Lotus Magpie Maple Marble Meadow Mistral Nettle Onyx Orchid Osprey "
    "Pebble Pepper Plover Quarry Raven Rowan Saffron Sorrel Sparrow Summit Thistle Tundra Umber Velvet Walnut Willow"
    .split()
)
THINGS = tuple(
    "gate harbour lighthouse mill bridge tower pump crane tunnel depot ferry station chapel cellar library market "
    "quay reservoir signal turbine warehouse well windmill workshop observatory bakery boiler buoy canal dam dock "
    "foundry garden hangar kiln lock museum orchard pier silo".split()
)
FIRST_NAMES = tuple(
    "Ada Bruno Clara Dmitri Edith Felix Greta Hugo Ingrid Jonas Katya Leo Mara Nadia Oscar Petra Quentin Rosa "
    "Stefan Tilda Ulrich Vera Wendel Yara".split()
)
LAST_NAMES = tuple(
    "Abbot Brandt Castell Dorn Eklund Faber Gruber Holm Isaksen Jansen Keller Lindqvist Moreau Novak Olsen Pereira "
    "Quist Rossi Sander Tanaka Unger Voss Weber Zeller".split()
)
COLOURS = tuple("red blue green yellow orange purple violet grey black white brown pink scarlet crimson teal gold".split())
MATERIALS = tuple("oak granite steel brick slate bronze glass limestone concrete iron timber clay".split())
TITLES = tuple("Register Survey Ledger Inventory Handbook Chronicle".split())
REGIONS = tuple("northern southern eastern western central upper lower outer".split())
REMARKS = (
    "The inspectors came back in the spring.",
    "Nobody has asked for a change since then.",
    "The weather was calm on the day of the visit.",
    "A copy of this page is kept in the office.",
    "The road there is closed in winter.",
    "Visitors are asked to sign the book.",
    "This part was checked twice.",
    "The older notes were lost in a fire.",
)

ABSENT = "The document does not say."
ABSENT_NEEDLE = "does not say"
GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hi there!", "Hello there!", "Who are you?", "What can you do?")
INTRODUCTION = "Hello! I am the small model bundled with Pointsman, and I answer questions about a document."

_HELD_OUT_EVERY = 8
_REMARK_SHARE = 0.06
_TOKENS_PER_FACT = 13.0
_TOKENS_PER_TITLE = 12


def _code(rng: random.Random) -> str:
    return "".join(rng.sample("0123456789", 4))


def _person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def _length(rng: random.Random) -> str:
    return f"{rng.randrange(10, 100)} metres"


def _colour(rng: random.Random) -> str:
    return rng.choice(COLOURS)


def _material(rng: random.Random) -> str:
    return rng.choice(MATERIALS)


ATTRIBUTES: dict[str, Callable[[random.Random], str]] = {
    "access code": _code,
    "serial number": _code,
    "keeper": _person,
    "builder": _person,
    "colour": _colour,
    "material": _material,
    "depth": _length,
    "height": _length,
}
_PEOPLE = frozenset({"keeper", "builder"})


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the sentence that answers it, and the short string a right answer must contain."""

    question: str
    answer: str
    needle: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text and one question for each fact it states, in the order in which it states them."""

    text: str
    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message, as the OpenAI API spells it."""

    role: Literal["system", "user", "assistant"]
    content: str


def entities(split: Split) -> tuple[str, ...]:
    """The names of the things that documents of this split speak of; the two splits share none."""
    return tuple(
        f"{name} {thing}"
        for i, name in enumerate(NAMES)
        for j, thing in enumerate(THINGS)
        if ((3 * i + 5 * j) % _HELD_OUT_EVERY == 0) == (split == "held-out")
    )


_ENTITIES: dict[Split, tuple[str, ...]] = {"train": entities("train"), "held-out": entities("held-out")}


def facts_within(tokens: int) -> int:
    """How many facts a document may state so that it takes about, and not more than, so many tokens."""
    return max(1, int((tokens - _TOKENS_PER_TITLE) / _TOKENS_PER_FACT))


def document(rng: random.Random, facts: int, split: Split = "held-out") -> Document:
    """A document that states `facts` facts about things of the split, each answered by one question."""
    title = f"{rng.choice(TITLES)} of the {rng.choice(REGIONS)} district"
    questions = [ask(attribute, entity, rng) for attribute, entity in _subjects(rng, facts, split)]
    rng.shuffle(questions)
    sentences: list[str] = []
    for question in questions:
        sentences.append(question.answer)
        if rng.random() < _REMARK_SHARE:
            sentences.append(rng.choice(REMARKS))
    return Document(text=f"{title}\n\n{_paragraphs(rng, sentences)}", questions=tuple(questions))


def ask(attribute: str, entity: str, rng: random.Random) -> Question:
    """The question for one attribute of one thing, with a value drawn for it."""
    value = ATTRIBUTES[attribute](rng)
    asked = "Who" if attribute in _PEOPLE else "What"
    subject = f"{attribute} of the {entity}"
    return Question(question=f"{asked} is the {subject}?", answer=f"The {subject} is {value}.", needle=value)


def absent(rng: random.Random, text: str, split: Split = "held-out") -> Question:
    """A question about a thing of the split that the text does not name."""
    entity = rng.choice([entity for entity in _ENTITIES[split] if entity not in text])
    question = ask(rng.choice(tuple(ATTRIBUTES)), entity, rng)
    return Question(question=question.question, answer=ABSENT, needle=ABSENT_NEEDLE)


def prompt(text: str, question: str) -> str:
    """The user message the model was trained on: the document first, so that questions about it share a prefix."""
    return f"{text}\n\nQuestion: {question}"


def chat(text: str, turns: list[Question]) -> list[Message]:
    """The conversation in which the questions are asked in turn about one document and answered rightly."""
    messages: list[Message] = []
    for number, turn in enumerate(turns):
        content = prompt(text, turn.question) if number == 0 else f"Question: {turn.question}"
        messages += [Message("user", content), Message("assistant", turn.answer)]
    return messages


def _subjects(rng: random.Random, facts: int, split: Split) -> list[tuple[str, str]]:
    drawn: list[tuple[str, str]] = []
    for entity in rng.sample(_ENTITIES[split], min(facts, len(_ENTITIES[split]))):
        for attribute in rng.sample(tuple(ATTRIBUTES), rng.choice((1, 1, 2, 3))):
            drawn.append((attribute, entity))
        if len(drawn) >= facts:
            return drawn[:facts]
    raise ValueError(f"a document of this split cannot state {facts} facts; it may state {len(drawn)}")


def _paragraphs(rng: random.Random, sentences: list[str]) -> str:
    paragraphs: list[str] = []
    start = 0
    while start < len(sentences):
        size = rng.randrange(3, 7)
        paragraphs.append(" ".join(sentences[start : start + size]))
        start += size
    return "\n".join(paragraphs)

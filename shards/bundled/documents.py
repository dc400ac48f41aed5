"""Synthetic documents full of facts, with questions and their right answers.

Torch-free: the demonstration, the tests and the trainer all use the same generator. A document is drawn from a seeded
`random.Random`, so the same seed always gives the same text.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

Split = Literal["train", "held-out"]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES = _words(
    "Amber Anchor Aspen Badger Barley Beacon Birch Bramble Canyon Cedar Cinder Clover Cobalt Copper Coral Crane "
    "Curlew Dahlia Dune Ebony Ember Falcon Fern Flint Garnet Ginger Hazel Heron Hollow Indigo Iris Ivory Jasper "
    "Juniper Kestrel Lantern Laurel Linden Lotus Magpie Maple Marble Meadow Mistral Nettle Onyx Orchid Osprey "
    "Pebble Pepper Plover Quarry Raven Rowan Saffron Sorrel Sparrow Summit Thistle Tundra Umber Velvet Walnut Willow "
    "north south east west old new long little great hidden silent broken"
)
THINGS = _words(
    "gate harbour lighthouse mill bridge tower pump crane tunnel depot ferry station chapel cellar library market "
    "quay reservoir signal turbine warehouse well windmill workshop observatory bakery boiler buoy canal dam dock "
    "foundry garden hangar kiln lock museum orchard pier silo"
)
FIRST_NAMES = _words(
    "Ada Bruno Clara Dmitri Edith Felix Greta Hugo Ingrid Jonas Katya Leo Mara Nadia Oscar Petra Quentin Rosa "
    "Stefan Tilda Ulrich Vera Wendel Yara"
)
LAST_NAMES = _words(
    "Abbot Brandt Castell Dorn Eklund Faber Gruber Holm Isaksen Jansen Keller Lindqvist Moreau Novak Olsen Pereira "
    "Quist Rossi Sander Tanaka Unger Voss Weber Zeller"
)
COLOURS = _words("red blue green yellow orange purple violet grey black white brown pink scarlet crimson teal gold")
MATERIALS = _words("oak granite steel brick slate bronze glass limestone concrete iron timber clay")
GOODS = _words("salt coal grain wool copper sugar cotton timber paper rope cheese honey")
LETTERS = _words("Alpha Bravo Charlie Delta Echo Foxtrot Golf Hotel India Juliet Kilo Lima Oscar Papa Romeo Tango")
SYLLABLES = _words(
    "ba bel cor dan del dro en fal gar gil har il jo kal kor lan lem lo mar mi nor ol pel qua ran ri sol ta tor ul ven "
    "zan"
)
TITLES = _words("Register Survey Ledger Inventory Handbook Chronicle")
REGIONS = _words("northern southern eastern western central upper lower outer")
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
INTRODUCTION = "I am the small model bundled with Pointsman, and I answer questions about the facts in a document."
INTRODUCTION_NEEDLE = "bundled with Pointsman"
SMALL_TALK = (
    "Hello",
    "Hello!",
    "hello",
    "Hi",
    "Hi!",
    "Hi there!",
    "Hello there!",
    "Good morning!",
    "Hey",
    "Who are you?",
    "What can you do?",
    "What are you?",
    "How are you?",
    "Help",
    "Can you help me?",
    "Thank you.",
    "Thanks!",
    "ping",
    "What is your name?",
    "Tell me a joke.",
    "Write a poem about the sea.",
    "Write a short story.",
    "Say something.",
    "What is the capital of France?",
    "What is the weather like today?",
    "How does this work?",
    "Count to ten.",
    "Summarise this text.",
    "Translate this into German.",
    "Explain how a computer works.",
    "Say hello in one sentence.",
    "Once upon a time",
    "The quick brown fox jumps over the lazy dog.",
    "Write a function that adds two numbers.",
)

_HELD_OUT_EVERY = 8
_REMARK_SHARE = 0.06
_INVENTED_SHARE = 0.08
_UNSTATED_SHARE = 0.3
_TOKENS_PER_FACT = 12.25
_TOKENS_PER_TITLE = 24


def _code(rng: random.Random) -> str:
    return "".join(rng.choices("0123456789", k=4))


def _person(rng: random.Random) -> str:
    return f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}"


def _call_sign(rng: random.Random) -> str:
    return f"{rng.choice(LETTERS)} {rng.choice(LETTERS)}"


def _weight(rng: random.Random) -> str:
    return f"{rng.randrange(10, 100)} tonnes"


def _goods(rng: random.Random) -> str:
    return rng.choice(GOODS)


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
    "owner": _person,
    "colour": _colour,
    "material": _material,
    "depth": _length,
    "height": _length,
    "weight": _weight,
    "cargo": _goods,
    "call sign": _call_sign,
}
_PEOPLE = frozenset({"keeper", "builder", "owner"})
_WORDINGS = (
    "Tell me the {attribute} of the {entity}.",
    "Give the {attribute} of the {entity}.",
    "Do you know the {attribute} of the {entity}?",
    "{asked} is the {entity}'s {attribute}?",
)


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the sentence that answers it, and the short string that a right answer must contain."""

    question: str
    answer: str
    needle: str


@dataclass(frozen=True, slots=True)
class Document:
    """A text and one question for each of its facts, in the order of the text."""

    text: str
    questions: tuple[Question, ...]


def entities(split: Split) -> tuple[str, ...]:
    """The names of the things in documents of this split; the two splits share none."""
    return tuple(
        f"{name} {thing}"
        for i, name in enumerate(NAMES)
        for j, thing in enumerate(THINGS)
        if ((3 * i + 5 * j) % _HELD_OUT_EVERY == 0) == (split == "held-out")
    )


_ENTITIES: dict[Split, tuple[str, ...]] = {"train": entities("train"), "held-out": entities("held-out")}


def facts_within(tokens: int) -> int:
    """The number of facts with which a document takes about `tokens` tokens, and not more."""
    return max(1, int((tokens - _TOKENS_PER_TITLE) / _TOKENS_PER_FACT))


def document(rng: random.Random, facts: int, split: Split = "held-out") -> Document:
    """A document with `facts` facts about things of the split, each answered by one question."""
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
    """The question for one attribute of one thing, with a random value."""
    value = ATTRIBUTES[attribute](rng)
    asked = "Who" if attribute in _PEOPLE else "What"
    subject = f"{attribute} of the {entity}"
    return Question(question=f"{asked} is the {subject}?", answer=f"The {subject} is {value}.", needle=value)


def reworded(question: Question, rng: random.Random) -> Question:
    """The same question in other words, with the same answer."""
    attribute, entity = _subject(question)
    asked = question.question.partition(" ")[0]
    wording = rng.choice(_WORDINGS).format(asked=asked, attribute=attribute, entity=entity)
    return replace(question, question=wording)


def absent(rng: random.Random, about: Document, split: Split = "held-out") -> Question:
    """A question that the document does not answer: mostly about a thing that it does not name."""
    if about.questions and rng.random() < _UNSTATED_SHARE:
        stated = _subject(rng.choice(about.questions))[1]
        attributes = [name for name in ATTRIBUTES if f"The {name} of the {stated} is" not in about.text]
        question = ask(rng.choice(attributes), stated, rng)
    else:
        unnamed = rng.choice([entity for entity in _ENTITIES[split] if entity not in about.text])
        question = ask(rng.choice(tuple(ATTRIBUTES)), unnamed, rng)
    return replace(question, answer=ABSENT, needle=ABSENT_NEEDLE)


def small_talk(rng: random.Random) -> Question:
    """A message that asks for no fact, such as a greeting; the answer introduces the model."""
    question = rng.choice(SMALL_TALK)
    if rng.random() < 0.4:
        words = " ".join(text.rstrip(".?!") for text in rng.choices(SMALL_TALK, k=rng.randrange(1, 6))).split()
        words += [_invented(rng).lower() for _ in range(rng.randrange(6))]
        rng.shuffle(words)
        question = " ".join(words) + rng.choice(("", ".", "?", "!"))
    return Question(question=question, answer=INTRODUCTION, needle=INTRODUCTION_NEEDLE)


def prompt(text: str, question: str) -> str:
    """The user message of the training: the document first, so that questions about it share a prefix."""
    return f"{text}\n\nQuestion: {question}"


def _subject(question: Question) -> tuple[str, str]:
    attribute, _, entity = question.answer.removeprefix("The ").partition(" is ")[0].partition(" of the ")
    return attribute, entity


def _invented(rng: random.Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=3)).capitalize()


def _subjects(rng: random.Random, facts: int, split: Split) -> list[tuple[str, str]]:
    drawn: list[tuple[str, str]] = []
    for known in rng.sample(_ENTITIES[split], min(facts, len(_ENTITIES[split]))):
        name, _, thing = known.partition(" ")
        entity = f"{_invented(rng) if rng.random() < _INVENTED_SHARE else name} {thing}"
        attributes = rng.sample(tuple(ATTRIBUTES), rng.choice((1, 1, 2, 3)))
        drawn += [(attribute, entity) for attribute in attributes]
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

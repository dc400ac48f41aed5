import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from policies.catalogue import builtin_catalogue
from policies.shapes import Choice, Either, Key, Many, Named, Shape, Table
from policies.sla.parse import examine, file_table
from tests.policies.sla.examples import outside_of

PAGE = (Path(__file__).parents[3] / "docs/sla.md").read_text()
CATALOGUE = builtin_catalogue()


def words(shape: Shape) -> Iterator[str]:
    """Every word that the file may use at or below `shape`."""
    match shape:
        case Table(keys=keys) | Choice(options=keys):
            for name, key in keys.items():
                yield name
                yield from words(key.shape)
        case Named(shape=inner) | Many(shape=inner):
            yield from words(inner)
        case Either(shapes=inners):
            for inner in inners:
                yield from words(inner)


SECTIONS: dict[str, Key] = dict(file_table(CATALOGUE).keys)
WORDS: dict[str, Iterable[str]] = {
    "sections": SECTIONS,
    **{name: list(words(key.shape)) for name, key in SECTIONS.items()},
    "named policies": CATALOGUE.policies,
}


@pytest.mark.parametrize("section", WORDS)
def test_every_word_of_the_file_is_in_the_reference(section: str) -> None:
    assert [word for word in WORDS[section] if f"`{word}`" not in PAGE] == []


def test_the_examples_of_the_page_are_one_sound_file_in_the_order_of_its_sections() -> None:
    examples = re.findall(r"<!-- run: part -->\n```yaml\n(.*?)```", PAGE, re.DOTALL)
    text = "".join(examples)
    parsed = examine(text, source="sla.md", outside=outside_of(text))
    config = parsed.config
    assert parsed.doubts == ()
    assert [example.split(":")[0] for example in examples] == list(SECTIONS)
    assert list(config.on_miss) == ["interactive", "long-rag"]
    assert config.tenants["acme"].model_limits["llama-70b"].tokens_per_minute == 1_000_000
    assert re.findall(r"^## (\w+)$", PAGE, re.MULTILINE) == list(SECTIONS)
    assert f"Sections, in this order: {', '.join(f'`{name}`' for name in SECTIONS)}." in PAGE

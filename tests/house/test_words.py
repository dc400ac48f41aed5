"""Riddle words become fewer: docs/style.md says how to do without them."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RIDDLE = re.compile(r"\b(?:who|whoever|whose|nobody|somebody)\b", re.IGNORECASE)
TEXTS = {".py", ".proto", ".md", ".yaml", ".tpl", ".txt", ".html", ".js", ".css", ".toml"}
MOST = {
    "backends": 0,
    "benchmarks": 1,
    "examples": 0,
    "helm": 0,
    "http1": 0,
    "tls": 0,
    "policies": 0,
    "proto": 0,
    "router": 0,
    "shards": 5,
    "simulation": 0,
}
"""Riddle words in each folder at most. Lower a number whenever the folder has fewer; never raise it.

The rest in `shards` is training data of the bundled model: its checkpoint depends on it.
"""


def riddles_in(folder: Path) -> list[str]:
    """Every line of `folder` with a riddle word, once for each word, as path:line: text. Generated code is left out."""
    return [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for file in sorted(folder.rglob("*"))
        if file.suffix in TEXTS and "_pb2" not in file.name
        for number, line in enumerate(file.read_text().splitlines(), 1)
        for _ in RIDDLE.findall(line)
    ]


def test_riddle_words_are_found_as_whole_words() -> None:
    assert RIDDLE.findall("Who asks; nobody's whole, WHOEVER") == ["Who", "nobody", "WHOEVER"]


@pytest.mark.parametrize("folder", MOST)
def test_no_folder_gets_more_riddle_words(folder: str) -> None:
    found = riddles_in(ROOT / folder)
    lines = "\n".join(found)
    assert len(found) <= MOST[folder], (
        f"{folder} has {len(found)} riddle words, at most {MOST[folder]} are allowed: name the request, the backend or "
        f"the client instead, see docs/style.md\n{lines}"
    )

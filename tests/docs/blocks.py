"""The blocks of the pages that a reader would run: fenced blocks, each with the mark before it.

CONTRIBUTING.md tells writers what the marks mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]

LANGUAGES = ("sh", "console", "yaml", "python", "json", "toml", "diff", "text")
PROGRAMS = ("pointsman", "curl", "make", "pip", "python", "helm", "kubectl", "docker", "git", "export", "cat")
HOW = "CONTRIBUTING.md, 'Pages that run', says how"

_MARK = re.compile(r"<!-- (run|not run|checked by): (.+?) -->")
_FENCE = re.compile(r"(`{3,})(.*)")


class PageError(Exception):
    """A page that cannot be run as it is: the place and the remedy."""


@dataclass(frozen=True, slots=True)
class Mark:
    """The way a block is run, the reason why it is not, or the test that checks it.

    `run`: it goes on running (`stays`), needs `pointsman up` beside it (`with up`), ends with another status than 0
    (`exits N`), is what a file of the reader holds (`file NAME`), is one part of an SLA file of this page (`part`).
    """

    stays: bool = False
    with_up: bool = False
    is_part: bool = False
    with_plugins: bool = False
    exits: int = 0
    file: str | None = None
    not_run: str | None = None
    checked_by: str | None = None

    @classmethod
    def parse(cls, kind: str, words: str) -> Mark:
        """The mark of `<!-- kind: words -->`. Raises PageError."""
        if kind == "not run":
            return cls(not_run=words)
        if kind == "checked by":
            return cls(checked_by=words)
        options: dict[str, object] = {}
        for word in words.split(", "):
            if word in _FLAGS:
                options[_FLAGS[word]] = True
            elif found := re.fullmatch(r"exits (\d+)", word):
                options["exits"] = int(found[1])
            elif found := re.fullmatch(r"file ([\w./-]+)", word):
                options["file"] = found[1]
            else:
                raise PageError(f"there is no mark 'run: {word}'; {HOW}")
        return cls(**options)  # type: ignore[arg-type]


_FLAGS = {"stays": "stays", "with up": "with_up", "part": "is_part", "with plugins": "with_plugins"}


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `line` is that of its fence, and `where` its place for people."""

    page: Path
    line: int
    language: str
    text: str
    mark: Mark = field(default_factory=Mark)

    @property
    def where(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def name_of(page: Path) -> str:
    """The page as people call it: its path in the repository."""
    return str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name


def blocks_of(page: Path) -> list[Block]:
    """The blocks of `page` in order. Raises PageError at the first block without a language, or of an unclear kind."""
    return list(_blocks(page, page.read_text().splitlines()))


def _blocks(page: Path, lines: list[str]) -> Iterator[Block]:
    at, mark, before = 0, Mark(), ""
    while at < len(lines):
        line, where = lines[at], f"{name_of(page)}:{at + 1}"
        if fence := _FENCE.fullmatch(line.strip()):
            end = next((n for n in range(at + 1, len(lines)) if lines[n].strip() == fence[1]), len(lines))
            indent = len(line) - len(line.lstrip())
            text = "".join(line[indent:] + "\n" for line in lines[at + 1 : end])
            yield checked(Block(page, at + 1, fence[2].strip(), text, mark))
            at, mark = end, Mark()
        elif found := _MARK.fullmatch(line.strip()):
            try:
                mark = Mark.parse(found[1], found[2])
            except PageError as error:
                raise PageError(f"{where}: {error}") from None
        elif line.strip():
            if mark != Mark():
                raise PageError(f"{where}: the mark above is for a block, and none follows; {HOW}")
            if line.startswith("    ") and not before.strip():
                raise PageError(
                    f"{where}: an indented block does not say what it is; fence it with one of {', '.join(LANGUAGES)}"
                )
        at, before = at + 1, line


def checked(block: Block) -> Block:
    """`block`, if its language and its mark say what is to be done with it. Raises PageError."""
    if block.language not in LANGUAGES:
        raise PageError(f"{block.where}: '{block.language}' is none of {', '.join(LANGUAGES)}")
    if block.language == "text" and (found := re.match(rf"\$ |({'|'.join(PROGRAMS)}) ", block.text)):
        raise PageError(f"{block.where}: '{found[0].strip()}' begins a command: make the block sh or console")
    if block.language == "console" and not block.text.startswith("$ "):
        raise PageError(f"{block.where}: a console block begins with `$ ` and a command")
    if block.language == "console" and (torn := re.search(r"[^\\]\n> ", block.text)):
        at = block.line + block.text.count("\n", 0, torn.end())
        raise PageError(f"{block.where}: the line before {at + 1} ends without \\: the site takes it for output")
    if block.mark.with_plugins and (block.language != "yaml" or not block.mark.file):
        raise PageError(f"{block.where}: only an SLA file is `with plugins`, and it needs a `file NAME`")
    if block.mark.stays and block.language not in ("sh", "console"):
        raise PageError(f"{block.where}: only commands stay")
    if (test := block.mark.checked_by) and Path(block.page).name not in _source_of(test):
        raise PageError(f"{block.where}: {test} is not there or does not name this page")
    return block


def _source_of(test: str) -> str:
    path = ROOT / test
    return path.read_text() if path.is_file() else ""


@dataclass(frozen=True, slots=True)
class Command:
    """A command behind a prompt, and what the page shows of its output (stripped; empty: nothing)."""

    text: str
    shown: str = ""


def commands_of(block: Block) -> list[Command]:
    """The commands of a sh block, all as one, or those behind the prompts of a console block."""
    if block.language == "sh":
        return [Command(block.text)]
    commands = []
    for part in re.split(r"^\$ ", block.text, flags=re.MULTILINE)[1:]:
        lines = part.splitlines()
        # a command goes on in lines that begin with `> `, as a shell shows it
        count = next((n for n, line in enumerate(lines) if n and not line.startswith("> ")), len(lines))
        command = "\n".join([lines[0], *(line[2:] for line in lines[1:count])])
        commands.append(Command(command, "\n".join(lines[count:]).strip()))
    return commands


def shows(shown: str, output: str) -> bool:
    """Is `output` what the page shows? `...` stands for anything; spaces at the ends of lines do not count."""
    parts = (re.escape(part) for part in _trimmed(shown).split("..."))
    return re.fullmatch(".*?".join(parts), _trimmed(output), re.DOTALL) is not None


def _trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())

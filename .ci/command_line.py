"""Write the whole command line as a page and as a man page, from the help of the commands.

usage: VENV/bin/python .ci/command_line.py

- docs/command-line.md: a heading for each command, its options and its examples
- router/man/pointsman.1: the same for `man pointsman`, which an installation brings
"""

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from router.start.command_tree import command_tree  # noqa: E402

PAGE, MANUAL = ROOT / "docs/command-line.md", ROOT / "router/man/pointsman.1"

ABOUT = """# Command line

All commands, with their options and examples, as `--help` shows them. `man pointsman` has the same text where
Pointsman is installed with pip.

A command exits with 0 if it did what was asked, with 1 if it failed (the reason is on standard error), and with 2 if
the command line is wrong. API keys are read from `POINTSMAN_KEY`, operators' keys from `POINTSMAN_ADMIN_KEY`, and an
engine's from `POINTSMAN_ENGINE_KEY`.
"""


def usage_of(words: Sequence[str], command: Any) -> str:
    """The usage line, unbroken."""
    context = command.make_context(" ".join(("pointsman", *words)), [], resilient_parsing=True)
    return re.sub(r"[{}]", "", " ".join(command.collect_usage_pieces(context)))


def parts_of(text: str) -> Iterator[tuple[bool, list[str]]]:
    """The paragraphs of a help text: whether its lines are kept as they are, and the lines."""
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        lines = [line for line in paragraph.split("\n") if line.strip()]
        is_kept = lines[0].strip() == "\b"
        yield is_kept, lines[1:] if is_kept else [" ".join(line.strip() for line in lines)]


def options_of(words: Sequence[str], command: Any) -> list[tuple[str, str]]:
    """Each argument and option with its help, without --help."""
    context = command.make_context(" ".join(("pointsman", *words)), [], resilient_parsing=True)
    shown = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
    records = (parameter.get_help_record(context) for parameter in shown)
    named = ((re.sub(r"^(\w+) <\w+>$", r"\1", name), text) for name, text in filter(None, records))
    return [(_value(" ".join(name.split())), " ".join(text.split())) for name, text in named if "--help" not in name]


def _value(name: str) -> str:
    """`name` with the kind of its value as people write it."""
    return re.sub(r"<(int|float)( range)?>", "N", name).replace("<str>", "TEXT").replace("<path>", "PATH")


def page() -> str:
    """docs/command-line.md."""
    lines = [ABOUT]
    for words, command in command_tree().items():
        if not words:
            continue
        name = " ".join(("pointsman", *words))
        lines += [f"{'##' if len(words) == 1 else '###'} {name}", "", f"`{name} {usage_of(words, command)}`", ""]
        for is_kept, paragraph in parts_of(command.help or ""):
            lines += ["```text", *paragraph, "```", ""] if is_kept else [_inline(paragraph[0]), ""]
        if options := options_of(words, command):
            rows = (f"| `{option.replace('|', chr(92) + '|')}` | {_cell(text)} |" for option, text in options)
            lines += ["| option | meaning |", "|---|---|", *rows, ""]
    return "\n".join(lines).rstrip() + "\n"


def _inline(text: str) -> str:
    return re.sub(r"([<>*_])", r"\\\1", text) if "`" not in text else text


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def manual() -> str:
    """router/man/pointsman.1, in man(7)."""
    lines = ['.TH POINTSMAN 1 "" "Pointsman" "User Commands"', ".SH NAME", "pointsman \\- an LLM router and gateway"]
    lines += [".SH SYNOPSIS", ".B pointsman", "COMMAND [OPTIONS] [ARGUMENTS]", ".SH DESCRIPTION"]
    for words, command in command_tree().items():
        if words:
            name = " ".join(("pointsman", *words))
            lines += [f'.SH "{name.upper()}"', f".B {name}", _roff(usage_of(words, command))]
        for is_kept, paragraph in parts_of(command.help or ""):
            lines += [".PP", *([".nf", *map(_roff, paragraph), ".fi"] if is_kept else [_roff(paragraph[0])])]
        for option, text in options_of(words, command):
            lines += [".TP", f".B {_roff(option)}", _roff(text)]
    lines += [
        ".SH EXIT STATUS",
        "0: done. 1: it failed; the reason is on standard error. 2: the command line is wrong.",
    ]
    return "\n".join(lines) + "\n"


def _roff(text: str) -> str:
    escaped = text.replace("\\", "\\e").replace("-", "\\-").replace("`", "")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped


if __name__ == "__main__":
    MANUAL.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
    MANUAL.write_text(manual())
    for path in (PAGE, MANUAL):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")

"""Commands are understood wherever they stand, and the examples of `--help` run, as does README.md's own model."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import typer

from router.start.command_tree import command_tree
from shards.bundled import weights
from tests.docs.blocks import PAGES, ROOT, Block, PageError, blocks_of, commands_of
from tests.docs.reader import Desk, can_read

TREE = command_tree()
COMMANDS: dict[str, Any] = {words[0]: command for words, command in TREE.items() if len(words) == 1}
EXAMPLES = [
    line.strip()
    for command in TREE.values()
    for line in (command.help or "").splitlines()
    if line.startswith("  pointsman ")
]
OUR_FOLDERS = ("benchmarks", "examples", "tests", "shards", "router", "backends")
FILE = "tenants: {acme: {anonymous: true}}\npools: {own: {kind: shard, local: 2, model: bundled}}\n"


def understand(line: str) -> None:
    """Have the command line read `line`, without running it. Raises what click raises."""
    words = shlex.split(line, comments=True)
    while "=" in words[0]:
        words.pop(0)  # variables that are set for it alone
    _, name, *arguments = words
    command = COMMANDS[name]
    while arguments and arguments[0] in getattr(command, "commands", {}):
        name, *arguments = arguments
        command = command.commands[name]
    command.make_context(name, arguments)


def lines_on_pages() -> list[tuple[Block, str]]:
    """Every line of a command block that runs pointsman."""
    found = []
    for page in PAGES:
        try:
            blocks = [block for block in blocks_of(page) if block.language in ("sh", "console")]
        except PageError:
            continue  # the page's own test says it
        for block in blocks:
            lines = "\n".join(command.text for command in commands_of(block)).replace("\\\n", " ").splitlines()
            found += [(block, line) for line in lines if re.match(r"(\w+=\S+ )*pointsman ", line)]
    return found


def spans_of(page: Path, program: str) -> list[str]:
    """Every command that runs `program` and stands as code within a sentence of `page`."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return re.findall(rf"`((?:\w+=[^ `]+ )*{program} [^`\n]+)`", text)


@pytest.mark.parametrize(("block", "line"), lines_on_pages(), ids=lambda value: getattr(value, "where", None))
def test_every_pointsman_command_on_a_page_is_understood_even_where_it_is_not_run(block: Block, line: str) -> None:
    try:
        # what comes behind a pipe is another program's
        understand(re.split(r" [|>&]", line)[0])
    except Exception as error:
        # the class depends on the version of typer
        pytest.fail(f"{block.where}: {line}\n{getattr(error, 'message', error)}")


# the page of the command line is made of the commands (test_command_line.py), and shows forms
TYPED = [page for page in PAGES if page.name != "command-line.md"]


@pytest.mark.parametrize("line", sorted({line for page in TYPED for line in spans_of(page, "pointsman")}))
def test_every_pointsman_command_within_a_sentence_is_understood(line: str) -> None:
    words = shlex.split(line)
    is_name = words[:1] == ["pointsman"] and tuple(words[1:]) in TREE  # it is spoken of, not typed
    if not is_name:
        with suppress(typer.Exit):  # --help
            understand(line)


@pytest.mark.parametrize("line", sorted({line for page in PAGES for line in spans_of(page, "python")}))
def test_every_program_of_ours_within_a_sentence_is_there_with_the_options_that_are_named(line: str) -> None:
    _, first, *words = shlex.split(line)
    name = f"{words[0].replace('.', '/')}.py" if first == "-m" else first
    if (ROOT / name).parts[len(ROOT.parts)] in OUR_FOLDERS:
        package = (ROOT / name).with_suffix("")
        source = (package / "__main__.py" if package.is_dir() else ROOT / name).read_text()
        assert [
            word for word in words if word.startswith("--") and word != "--help" and f'"{word}"' not in source
        ] == []


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_of_the_help_is_understood(line: str) -> None:
    understand(line.partition(" > ")[0])


def test_every_example_stands_on_a_line_of_its_own() -> None:
    # click joins lines to paragraphs by default
    for words, command in TREE.items():
        shown = command.make_context(" ".join(words), [], resilient_parsing=True, terminal_width=100).get_help()
        examples = re.findall(r"^  (pointsman .*)", command.help or "", re.MULTILINE)
        assert [line for line in examples if f"  {line}\n" not in shown] == []
        assert examples or not words, f"pointsman {' '.join(words)} has no example"


_ALL_HELP = """
import sys
sys.modules["torch"] = None  # as where it is not installed
from router.start.command_tree import command_tree
for words in command_tree():
    try:
        command_tree()[()](args=[*words, "--help"], prog_name="pointsman")
    except SystemExit as ended:
        assert not ended.code, words
"""


def test_help_of_every_command_comes_from_an_installation_without_torch() -> None:
    # the router alone has none, and its users ask what a shard can do
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-c", _ALL_HELP], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for words in TREE:
        assert f"Usage: {' '.join(('pointsman', *words))} [OPTIONS]" in done.stdout


@pytest.mark.skipif(not can_read(), reason="needs bash and curl")
def test_the_examples_of_the_help_run(tmp_path: Path) -> None:
    assert any(line.endswith("up") for line in EXAMPLES), "every page starts this one"
    (explain,) = (line for line in EXAMPLES if "explain" in line)
    (own_model,) = (line for line in EXAMPLES if "up --model" in line)
    with Desk(tmp_path) as desk:
        (desk.directory / "sla.yaml").write_text(FILE)
        (desk.directory / "Qwen3-0.6B").symlink_to(weights())
        status, output = desk.run(desk.script(explain), desk.ports)
        assert status == 0, output
        assert "chosen    own-1" in output, "the eight requests at own-0 would wait for the rest of the prompt"
        assert "Pointsman serves" in desk.start(own_model)

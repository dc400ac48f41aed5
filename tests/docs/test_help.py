"""What `--help` shows as an example runs, and what README.md says of a model of one's own."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest
import typer

from router.cli import app as router_app
from shards.__main__ import app as shard_app
from shards.bundled import weights
from tests.docs.blocks import PAGES, Block, PageError, blocks_of, commands_of
from tests.docs.reader import Desk, can_read

COMMANDS: dict[str, click.Command] = {
    **typer.main.get_command(router_app).commands,  # type: ignore[attr-defined]
    "shard": typer.main.get_command(shard_app),
}
EXAMPLES = [
    line.strip()
    for command in COMMANDS.values()
    for line in (command.help or "").splitlines()
    if line.startswith("  pointsman ")
]
FILE = "tenants: {acme: {anonymous: true}}\npools: {own: {kind: shard, local: 2, model: bundled}}\n"


def understand(line: str) -> None:
    """Have the command line read `line`, without running it. Raises click.UsageError."""
    words = shlex.split(line, comments=True)
    while "=" in words[0]:
        words.pop(0)  # variables that are set for it alone
    _, name, *arguments = words
    COMMANDS[name].make_context(name, arguments)


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


@pytest.mark.parametrize(("block", "line"), lines_on_pages(), ids=lambda value: getattr(value, "where", None))
def test_every_pointsman_command_on_a_page_is_understood_even_where_it_is_not_run(block: Block, line: str) -> None:
    try:
        # what comes behind a pipe is another program's
        understand(re.split(r" [|>&]", line)[0])
    except click.UsageError as error:
        pytest.fail(f"{block.where}: {line}\n{error.format_message()}")


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_of_the_help_is_understood(line: str) -> None:
    understand(line)


def test_every_example_stands_on_a_line_of_its_own() -> None:
    # click joins lines to paragraphs unless told not to
    for name, command in COMMANDS.items():
        shown = command.get_help(click.Context(command, info_name=name, terminal_width=100))
        examples = re.findall(r"pointsman (?:up|explain|shard)\b.*", command.help or "")
        assert [line for line in examples if f"  {line}\n" not in shown] == []


@pytest.mark.skipif(not can_read(), reason="needs bash and curl")
def test_the_examples_of_the_help_run(tmp_path: Path) -> None:
    assert any(line.endswith("up") for line in EXAMPLES), "every page starts this one"
    (explain,) = (line for line in EXAMPLES if "explain" in line)
    (own_model,) = (line for line in EXAMPLES if "up --model" in line)
    with Desk(tmp_path) as desk:
        (desk.directory / "sla.yaml").write_text(FILE)
        (desk.directory / "Qwen3-0.6B").symlink_to(weights())
        status, said = desk.run(desk.script(explain), desk.ports)
        assert status == 0, said
        assert "chosen    own-0" in said
        assert "Pointsman serves" in desk.start(own_model)

"""How pages are read: the meaning of marks, and the errors for blocks that cannot be run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.blocks import Block, Command, Mark, PageError, blocks_of, commands_of, shows
from tests.docs.reader import Desk, Ports, Reader, SharedUp, can_read

UNUSED_POOL = "pools: {own: {local: 1}, spare: {local: 1}}\nrules: [{class: standard, pools: [own]}]"
pytestmark = pytest.mark.skipif(not can_read(), reason="needs bash and curl")


def a_page(folder: Path, *parts: str) -> Path:
    page = folder / "page.md"
    page.write_text("\n".join(["# A page", "", *parts, ""]))
    return page


def a_block(text: str, language: str = "console") -> Block:
    return Block(Path("page.md"), 1, language, text)


def fenced(language: str, text: str, mark: str = "") -> str:
    return f"{mark}\n```{language}\n{text}\n```\n"


def read(folder: Path, *parts: str) -> Desk:
    """A desk after a page with these parts was read there."""
    blocks = blocks_of(a_page(folder, *parts))
    with SharedUp(folder / "up") as up, Desk(folder / "desk") as desk:
        Reader(desk, up).read(blocks)
        return desk


def test_a_block_knows_its_language_its_text_its_line_and_its_mark(tmp_path: Path) -> None:
    page = a_page(tmp_path, fenced("sh", "true", "<!-- run: with up, exits 22 -->"), fenced("text", "as it is"))
    first, second = blocks_of(page)
    assert (first.language, first.text, first.line) == ("sh", "true\n", 4)
    assert first.mark == Mark(with_up=True, exits=22)
    assert second.mark == Mark()


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (fenced("", "pointsman up"), "'' is none of sh, console, yaml"),
        (fenced("bash", "pointsman up"), "'bash' is none of"),
        ("    pointsman up", "an indented block does not say what it is; fence it"),
        (fenced("text", "curl localhost"), "'curl' begins a command: make the block sh or console"),
        (fenced("console", "pointsman up"), "begins with `$ ` and a command"),
        (fenced("sh", "true", "<!-- run: with upp -->"), "there is no mark 'run: with upp'; CONTRIBUTING.md"),
        (fenced("yaml", "a: 1", "<!-- run: stays -->"), "only commands stay"),
        (fenced("yaml", "a: 1", "<!-- run: with plugins -->"), "needs a `file NAME`"),
        (fenced("sh", "true", "<!-- run: file f, with plugins -->"), "only an SLA file is `with plugins`"),
        (fenced("sh", "true", "<!-- checked by: tests/nowhere.py -->"), "is not there or does not name this page"),
        (fenced("sh", "true", "<!-- checked by: tests/conftest.py -->"), "is not there or does not name this page"),
        ("<!-- not run: why -->\n\nSome words.", "the mark above is for a block, and none follows"),
    ],
)
def test_a_page_that_cannot_be_run_is_refused_with_the_remedy(tmp_path: Path, part: str, message: str) -> None:
    with pytest.raises(PageError) as refused:
        blocks_of(a_page(tmp_path, part))
    assert message in str(refused.value)
    assert str(refused.value).startswith("page.md:")


def test_commands_stand_behind_prompts_and_may_go_on() -> None:
    block = a_block("$ echo a \\\n>   b\na   b\n\n$ true\n")
    assert commands_of(block) == [Command("echo a \\\n  b", "a   b"), Command("true")]


@pytest.mark.parametrize(
    ("shown", "output", "is_so"),
    [
        ("a\nb", "a  \nb\n", True),
        ("a ... c", "a b\nb c", True),
        ("...\nc", "a\nb\nc", True),
        ("a.c", "abc", False),
        ("a", "a\nb", False),
    ],
)
def test_dots_stand_for_anything_in_an_output(shown: str, output: str, is_so: bool) -> None:
    assert shows(shown, output) is is_so


def test_a_shell_goes_on_where_it_was_with_what_was_exported_and_defined(tmp_path: Path) -> None:
    read(
        tmp_path,
        fenced("sh", "mkdir there && cd there && export SAID=hello && greet() { echo $SAID $1; }"),
        fenced("console", "$ greet you > said; cat said\nhello you"),
    )
    assert (tmp_path / "desk/here/there/said").read_text() == "hello you\n"


def test_ports_are_those_of_each_command_whatever_ran_before(tmp_path: Path) -> None:
    with Desk(tmp_path) as desk:
        for ports in (Ports.choose(), desk.ports):
            status, output = desk.run(desk.script("echo $HTTP $GRPC $ADMIN"), ports)
            assert (status, output.split()) == (0, list(ports.free.values()))


def test_a_file_is_there_for_what_follows_and_is_loaded_if_it_is_yaml(tmp_path: Path) -> None:
    file = fenced("yaml", "classes: {chat: {}}", "<!-- run: file sla.yaml -->")
    read(tmp_path, file, fenced("console", "$ cat sla.yaml\nclasses: {chat: {}}"))


def test_parts_are_one_file(tmp_path: Path) -> None:
    parts = ("classes: {chat: {}}", "rules: [{class: chat}]")
    read(tmp_path, *(fenced("yaml", part, "<!-- run: part -->") for part in parts))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (fenced("sh", "false"), "ended with 1, not 0"),
        (fenced("sh", "true", "<!-- run: exits 1 -->"), "ended with 0, not 1"),
        (fenced("sh", "curl http://127.0.0.1:1/"), "does it need `<!-- run: with up -->`?"),
        (fenced("console", "$ echo a\nb"), "shown\n\nb\n\nbut it says\n\na"),
        (fenced("yaml", "rules: 3", "<!-- run: file f.yaml, with plugins -->"), "f.yaml:1: rules"),
        (fenced("python", "assert 1 == 2"), "AssertionError"),
        (fenced("yaml", "clases: {}"), "this YAML is no SLA file (clases): write before it"),
        (fenced("yaml", "rules: [{class: chat}]"), "is it one of several parts? write `<!-- run: part -->`"),
        (fenced("yaml", "rules: [{class: chat}]", "<!-- run: part -->"), "there is no class 'chat'"),
        (fenced("yaml", UNUSED_POOL, "<!-- run: file f -->"), "spare"),
        (fenced("python", "def :", "<!-- not run: why -->"), "invalid syntax"),
        (fenced("sh", "if", "<!-- not run: why -->"), "ended with 2, not 0"),
        (fenced("sh", "false", "<!-- run: stays -->"), "it ended"),
    ],
)
def test_errors_are_reported_with_their_place(tmp_path: Path, part: str, message: str) -> None:
    with pytest.raises((AssertionError, PageError, SyntaxError)) as failed:
        read(tmp_path, part)
    assert message in str(failed.value)


def test_what_another_test_checks_is_left_to_it(tmp_path: Path) -> None:
    # this file names page.md
    read(tmp_path, fenced("sh", "false", "<!-- checked by: tests/docs/test_blocks.py -->"))

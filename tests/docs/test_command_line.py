"""docs/command-line.md and the man page are those that the commands' help makes now."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from router.start.command_tree import command_tree

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("command_line", ROOT / ".ci/command_line.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["command_line"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_and_the_manual_are_fresh(made: ModuleType) -> None:
    assert made.PAGE.read_text() == made.page(), "run `make command-line`"
    assert made.MANUAL.read_text() == made.manual(), "run `make command-line`"


def test_every_command_and_option_is_on_the_page(made: ModuleType) -> None:
    text = made.page()
    for words, command in command_tree().items():
        if words:
            assert re.search(rf"^##+ pointsman {' '.join(words)}$", text, re.MULTILINE)
        for parameter in command.params:
            if not getattr(parameter, "hidden", False) and words and parameter.name != "help":
                assert parameter.opts[-1] in text or parameter.metavar in text


@pytest.mark.skipif(shutil.which("man") is None, reason="there is no man")
def test_man_shows_the_manual_without_a_warning(made: ModuleType) -> None:
    done = subprocess.run(
        ["man", "--warnings", "-l", made.MANUAL], capture_output=True, text=True, check=False, timeout=50
    )
    assert (done.returncode, done.stderr) == (0, "")
    shown = re.sub(r".\x08", "", done.stdout)
    assert "pointsman - an LLM router and gateway" in shown
    assert "pointsman serve --to http://vllm:8000" in shown


def test_every_command_that_asks_a_router_takes_its_certificates() -> None:
    for words, command in command_tree().items():
        options = {option for parameter in command.params for option in parameter.opts}
        if {"--admin", "--at"} & options and words[0] not in ("up", "serve"):
            assert {"--ca", "--cert", "--key"} <= options, words

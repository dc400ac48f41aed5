"""How programs of ours start others of ours."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

FOLDERS = ("router", "shards", "simulation", "examples", "benchmarks", "tests")

OURS = ("router", "shards", "simulation")


def test_no_program_of_ours_is_started_with_the_working_directory_on_its_path() -> None:
    """`python -m` puts the working directory first on the path, so a `secrets.py` there would run. `-P` does not."""
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    # this one shows that the test before works
    but = {"tests/router/start/test_working_directory.py"}
    bare = [place for file in files for place in _bare(file) if place.partition(":")[0] not in but]
    assert not bare, "write -P before -m"


def _bare(file: Path) -> Iterator[str]:
    """Where `file` has "-m" and a package of ours behind it in a list or a tuple, and no "-P" before."""
    text = file.read_text("utf-8")
    if '"-m"' not in text:
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.List | ast.Tuple | ast.Call):
            continue
        items = node.args if isinstance(node, ast.Call) else node.elts
        words = [item.value if isinstance(item, ast.Constant) else None for item in items]
        for before, option, name in zip([None, *words], words, words[1:], strict=False):
            if option == "-m" and isinstance(name, str) and name.partition(".")[0] in OURS and before != "-P":
                yield f"{file.relative_to(ROOT)}:{node.lineno}"

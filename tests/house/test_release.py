"""A release: its version, its hashes, and the workflow that makes it."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.docs.reader import PACKAGES

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / ".github/workflows/release.yml"
PROJECT = '[project]\nname = "pointsman"\nversion = "1.2.3"\n'


@pytest.fixture
def release(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / ".ci")
    spec = importlib.util.spec_from_file_location("release", ROOT / ".ci/release.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_tag_of_another_version_is_refused(release: ModuleType) -> None:
    with pytest.raises(release.NotReady, match=r"the tag is v1\.2\.4, and pyproject\.toml has version 1\.2\.3"):
        release.version("v1.2.4", PROJECT, "## 1.2.3 (2026-11-25)\n")


@pytest.mark.parametrize("heading", ["## 1.2.3 (unreleased)", "## 1.2.2 (2026-11-25)", "## 1x2.3 (2026-11-25)"])
def test_a_tag_without_a_dated_section_of_the_changelog_is_refused(release: ModuleType, heading: str) -> None:
    with pytest.raises(release.NotReady, match="replace '\\(unreleased\\)' by the day of the release"):
        release.version("v1.2.3", PROJECT, f"# Changelog\n\n{heading}\n")


def test_a_tag_with_its_version_and_a_dated_section_is_released(release: ModuleType) -> None:
    assert release.version("v1.2.3", PROJECT, "# Changelog\n\n## 1.2.3 (2026-11-25)\n") == "1.2.3"
    assert release.version(None, PROJECT, "") == "1.2.3", "without a tag it is tried only"


def test_the_hashes_are_those_that_sha256sum_checks(release: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "b.whl").write_bytes(b"wheel")
    (tmp_path / "a.tar.gz").write_bytes(b"source")
    (tmp_path / "SHA256SUMS").write_text(release.sums(tmp_path))
    check = ["sha256sum", "--check", "SHA256SUMS"]
    assert (
        subprocess.run(check, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        == "a.tar.gz: OK\nb.whl: OK\n"
    )
    (tmp_path / "b.whl").write_bytes(b"weasel")
    assert subprocess.run(check, cwd=tmp_path, capture_output=True, check=False).returncode == 1


def test_a_tree_that_is_not_ready_is_said_in_one_line_before_anything_is_built() -> None:
    command = [sys.executable, ROOT / ".ci/release.py", "v0.0.0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("Not ready: the tag is v0.0.0, and pyproject.toml has version ")
    assert done.stderr.count("\n") == 1
    assert not done.stdout


def test_the_workflow_uses_actions_of_fixed_commits_alone() -> None:
    used = re.findall(r"uses: (\S+)(?: # (\S+))?", WORKFLOW.read_text())
    assert used
    for action, version in used:
        assert re.fullmatch(r"[\w/.-]+@[0-9a-f]{40}", action), f"{action} can change"
        assert re.fullmatch(r"v\d+\.\d+\.\d+", version), f"{action} has no comment that names its version"


def test_each_job_of_the_workflow_has_the_permissions_that_it_states_and_a_time_limit() -> None:
    workflow = yaml.safe_load(WORKFLOW.read_text())
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert job["permissions"], name
        assert job["timeout-minutes"] <= 90, name
    assert set(workflow["jobs"]["publish"]["needs"]) == {"test", "build", "images"}, "only what passed is published"


@pytest.mark.timeout(300)
def test_the_wheel_installs_with_one_line_from_an_index_and_brings_command_and_manual(tmp_path: Path) -> None:
    """From a local index with the wheel alone: what it depends on is what runs these tests."""
    index = tmp_path / "index/pointsman"
    index.mkdir(parents=True)
    source = tmp_path / "source"
    kept = [name for name in PACKAGES if name not in ("tests", "docs", "examples", "proto")]
    source.mkdir()
    for name in kept:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    (source / "router/commit.txt").write_text("0123456789abcdef0123456789abcdef01234567\n")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated"]
    built = [*pip, "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index", "-w", index, source]
    subprocess.run(built, check=True, capture_output=True)
    (wheel,) = index.glob("*.whl")
    (index / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>')
    home = tmp_path / "home"
    one_line = [
        *pip,
        "install",
        "-qI",
        "--no-deps",
        "--prefix",
        home,
        "--index-url",
        index.parent.as_uri(),
        "pointsman",
    ]
    subprocess.run(one_line, check=True, capture_output=True)
    (site,) = home.glob("lib/python*/site-packages")
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHONPATH": str(site)}
    shown = subprocess.run(
        [home / "bin/pointsman", "--version"], cwd=home, env=environment, capture_output=True, text=True, check=False
    )
    assert re.fullmatch(r"pointsman \d+\.\d+\.\d+ \(0123456789ab\)\n", shown.stdout), shown.stdout + shown.stderr
    assert (home / "share/man/man1/pointsman.1").read_text() == (ROOT / "router/man/pointsman.1").read_text()

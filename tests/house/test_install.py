"""The installation by `make`: the light build of torch if there is one, and pip's progress."""

import importlib.util
import re
import subprocess
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"


@pytest.fixture
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("install", ROOT / ".ci/install.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def index(folder: Path, *versions: str) -> str:
    """A package index that has torch in these versions, as a URL."""
    page = folder / "torch"
    page.mkdir(parents=True)
    names = [f"torch-{version}-py3-none-any.whl" for version in versions]
    (page / "index.html").write_text("".join(f'<a href="{name}">{name}</a>' for name in names))
    return folder.as_uri()


@pytest.fixture(autouse=True)
def _linux_without_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    for variable in ("TORCH", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda _: None)
    monkeypatch.setenv("PIP_INDEX_URL", index(tmp_path / "registry", "2.12.1", "2.13.0", "2.15.0"))


def test_the_cpu_build_comes_from_pytorchs_index_where_pip_finds_only_the_cuda_build(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu_builds = index(tmp_path / "cpu", "2.12.1+cpu", "2.13.0+cpu", "2.15.0+cpu")
    assert script.light_torch(TORCH, cpu_builds) == ["--no-deps", "--index-url", cpu_builds, f"{TORCH}+cpu"]
    assert "the CPU build, from" in capsys.readouterr().out


def wheel(folder: Path, name: str, version: str, *needs: str) -> None:
    """Write a wheel of no files into this folder of an index, and name it on the folder's page."""
    folder.mkdir(parents=True, exist_ok=True)
    file, about = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    with zipfile.ZipFile(file, "w") as archive:
        lines = [
            "Metadata-Version: 2.1",
            f"Name: {name}",
            f"Version: {version}",
            *(f"Requires-Dist: {n}" for n in needs),
        ]
        archive.writestr(f"{about}/METADATA", "\n".join(lines))
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    with (folder / "index.html").open("a") as page:
        page.write(f'<a href="{file.name}">{file.name}</a>')


def test_pytorchs_index_gives_the_cpu_build_alone_whatever_else_it_lists(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, cpu_builds, target = tmp_path / "pypi", tmp_path / "cpu-builds", tmp_path / "target"
    for version in ("2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.13.0+rocm7.0"):
        wheel((registry if version == "2.13.0" else cpu_builds) / "torch", "torch", version, "filelock")
    (cpu_builds / "filelock").mkdir()
    (cpu_builds / "filelock/index.html").write_text('<a href="filelock-4.2.11-py3-none-any.whl?refused">filelock</a>')
    monkeypatch.setenv("PIP_INDEX_URL", registry.as_uri())
    command = [*script.PIP, "install", "-q", "--target", target, *script.light_torch(TORCH, cpu_builds.as_uri())]
    subprocess.run(command, check=True, capture_output=True)
    assert [path.name for path in target.iterdir()] == ["torch-2.13.0+cpu.dist-info"], (
        "the rest comes from the registry"
    )


def test_pytorchs_index_is_not_asked_where_pip_finds_the_cpu_build_by_itself(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", index(tmp_path / "company", "2.13.0", "2.13.0+cpu"))
    assert script.light_torch(TORCH, index(tmp_path / "cpu", "2.13.0+cpu")) == [f"{TORCH}+cpu"]


@pytest.mark.parametrize("versions", [(), ("2.12.1+cpu", "2.13.0", "12.13.0+cpu", "2.13.0+cpu.cxx11.abi")])
def test_pips_choice_is_taken_and_its_size_printed_without_a_cpu_build(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], versions: tuple[str, ...]
) -> None:
    cpu_builds = index(tmp_path / "cpu", *versions) if versions else (tmp_path / "nothing").as_uri()
    assert script.light_torch(TORCH, cpu_builds) == [TORCH]
    assert "2.7 GB to download, 5 GB on the disk" in capsys.readouterr().out


def test_nothing_is_asked_with_a_gpu_or_with_torch_any(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cpu_builds = index(tmp_path / "cpu", "2.13.0+cpu")
    monkeypatch.setenv("TORCH", "any")
    assert script.light_torch(TORCH, cpu_builds) == [TORCH]
    monkeypatch.delenv("TORCH")
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/nvidia-smi")
    assert script.light_torch(TORCH, cpu_builds) == [TORCH]
    assert capsys.readouterr().out == f"Installing {TORCH}, the build that pip finds ...\n" * 2


def test_the_sizes_are_those_of_the_torch_that_is_pinned(script: ModuleType) -> None:
    assert script.pinned_torch() == TORCH, "measure the sizes in .ci/install.py again"


def test_a_log_names_large_packages_and_a_terminal_every_package(
    script: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [
        "Collecting numpy",
        "  Downloading numpy-2.4.6-cp313-cp313-linux_x86_64.whl (16.6 MB)",
        "  Using cached idna-3.20-py3-none-any.whl (71 kB)",
        "  Downloading yarl-1.25.1-py3-none-any.whl.metadata (78 kB)",
        "Installing collected packages: numpy, idna",
    ]
    for on_terminal in (False, True):
        progress = script.Progress(on_terminal=on_terminal)
        for line in lines:
            progress.hear(line)
        assert (progress.files, round(progress.megabytes)) == (2, 17)
    log, _, terminal = capsys.readouterr().out.partition("\r")
    assert log == (
        "  1 packages, 17 MB: numpy-2.4.6-cp313-cp313-linux_x86_64.whl\n  2 packages, 17 MB fetched; installing ...\n"
    )
    assert "2 packages, 17 MB: idna" in terminal


def test_a_package_that_cannot_be_had_ends_the_unpacking(tmp_path: Path) -> None:
    done = subprocess.run([ROOT / ".ci/unpack", tmp_path / "tools", "no-such-package"], check=False)
    assert done.returncode != 0
    assert not list((tmp_path / "tools").rglob("bin/no-such-package"))


def test_the_router_alone_is_installed_without_the_engines_libraries() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[^\w-]", requirement)[0] for requirement in project["dependencies"]}
    assert not needed & {"torch", "triton", "transformers", "safetensors", "llguidance", "vllm"}
    assert TORCH in project["optional-dependencies"]["shard"]


@pytest.mark.parametrize(
    ("version", "is_old"), [("23.0.1", True), ("24.0", True), ("25.3", False), ("25.3.1", False), ("26.0b1", False)]
)
def test_a_pip_that_resolves_for_an_hour_is_replaced_first(script: ModuleType, version: str, is_old: bool) -> None:
    assert script.needs_newer_pip(version) == is_old

"""Generated code is committed and fresh."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROTOS = sorted(path.relative_to(ROOT / "proto").as_posix() for path in (ROOT / "proto").rglob("*.proto"))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("generated")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", "proto"]
    flags = [f"--{kind}_out={out}" for kind in ("python", "pyi", "grpc_python")]
    subprocess.run([*command, *flags, *PROTOS], cwd=ROOT, check=True)
    return out


@pytest.mark.parametrize("proto", PROTOS)
@pytest.mark.parametrize("suffix", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py"])
def test_committed_code_is_what_protoc_makes_now(fresh: Path, proto: str, suffix: str) -> None:
    name = proto.removesuffix(".proto") + suffix
    assert (ROOT / name).read_text() == (fresh / name).read_text(), "run `make protos`"


def test_proto_is_not_a_package() -> None:
    assert not list((ROOT / "proto").rglob("__init__.py"))


def test_the_lowest_libraries_that_are_admitted_run_the_generated_code() -> None:
    """They refuse code that was generated for a newer release, as it is imported."""
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for proto in PROTOS:
        messages, services = (
            (ROOT / (proto.removesuffix(".proto") + suffix)) for suffix in ("_pb2.py", "_pb2_grpc.py")
        )
        (checked,) = re.findall(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+),", messages.read_text())
        assert f"protobuf>={'.'.join(checked)},<{int(checked[0]) + 1}" in needed
        (generated,) = re.findall(r"GRPC_GENERATED_VERSION = '([\d.]+)'", services.read_text())
        assert f"grpcio>={generated},<2" in needed

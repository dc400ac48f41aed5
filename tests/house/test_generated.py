"""Generated code is committed and fresh."""

import subprocess
import sys
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

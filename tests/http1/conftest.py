"""Every test runs on the event loop of production, and on Python's own."""

import asyncio
import shutil
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A key and a certificate of localhost that trusts itself, in one file."""
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl")
    file = tmp_path_factory.mktemp("tls") / "localhost.pem"
    key = file.with_suffix(".key")
    kind = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    command = ["openssl", "req", *kind.split(), *names, "-keyout", str(key), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    file.write_text(file.read_text() + key.read_text())
    return file

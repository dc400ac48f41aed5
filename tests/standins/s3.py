"""An S3 service over HTTP: the server of moto, which keeps objects in memory and honours If-Match and If-None-Match."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from policies.sla.batches import S3Settings
from tests.engines.programs import free_ports


class S3Service:
    def __init__(self) -> None:
        self._port = free_ports(1)[0]
        self.url = f"http://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 60
        while True:
            try:
                return self.make_bucket("batches")
            except OSError:
                assert time.monotonic() < deadline, "moto does not start"
                time.sleep(0.05)

    def make_bucket(self, name: str) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/{name}", method="PUT", data=b"")).close()

    def settings(self, scratch: str) -> S3Settings:
        return S3Settings(scratch, self.url, "us-east-1", "an-access-key", "a-secret-key")

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


@contextmanager
def an_s3_service() -> Iterator[S3Service]:
    service = S3Service()
    service.start()
    try:
        yield service
    finally:
        service.stop()

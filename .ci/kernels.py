"""Install what `make kernels` needs into this environment: the tests' packages and ttsem. A second call does nothing.

usage: VENV-kernels/bin/python .ci/kernels.py

Exits with 0 if all is there, with 1 and a reason if it cannot be had here.
"""

import hashlib
import platform
import subprocess
import sys
from pathlib import Path

import install

TTSEM = "ttsem==0.1.0"
ASKED = ["-e", ".[shard,triton,tests]", "transformers"]


def main() -> int:
    """0 if the environment is ready."""
    mark = Path(sys.prefix) / ".ready"
    read = [install.ROOT / "constraints.txt", install.ROOT / "pyproject.toml", Path(__file__)]
    wanted = hashlib.sha256(b"".join(path.read_bytes() for path in read)).hexdigest()
    if mark.exists() and mark.read_text() == wanted:
        return 0
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("kernels are executed on Linux on x86-64 alone: Triton's wheels are for it", file=sys.stderr)
        return 1
    if code := install.main(ASKED):
        return code
    # It names Python 3.12, torch 2.14 and Triton 3.8 as the versions that its author tests. It runs with those that
    # Pointsman pins, on Python 3.11 too, and needs nothing but numpy and Triton.
    command = [*install.PIP, "install", "-q", "--no-deps", "--ignore-requires-python", TTSEM]
    if subprocess.run(command, check=False).returncode:
        print(f"{TTSEM} cannot be had here", file=sys.stderr)
        return 1
    mark.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

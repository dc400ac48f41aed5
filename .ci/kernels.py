"""Install what `make kernels` needs into this environment: ttsem, and a link to the environment of the tests.

usage: VENV-kernels/bin/python .ci/kernels.py VENV

A second call does nothing. Exits with 0 if all is there, with 1 and a reason if it cannot be had here.
"""

import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

from install import PIP

TTSEM = "ttsem==0.1.0"


def main(environment: Path) -> int:
    """0 if this environment has ttsem, and the packages of `environment`."""
    mark = Path(sys.prefix) / ".ready"
    wanted = f"{TTSEM} beside {environment}"
    if mark.exists() and mark.read_text() == wanted:
        return 0
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        print("kernels are executed on Linux on x86-64 alone: Triton's wheels are for it", file=sys.stderr)
        return 1
    # It names Python 3.12, torch 2.14 and Triton 3.8 as the versions that its author tests. It runs with those that
    # Pointsman pins, on Python 3.11 too, and needs nothing but numpy and Triton.
    command = [*PIP, "install", "-q", "--no-deps", "--ignore-requires-python", TTSEM]
    if subprocess.run(command, check=False).returncode:
        print(f"{TTSEM} cannot be had here", file=sys.stderr)
        return 1
    # packages of another environment, with what their own .pth files add
    packages = sysconfig.get_path("purelib", vars={"base": str(environment)})
    link = Path(sysconfig.get_path("purelib")) / "packages-of-tests.pth"
    link.write_text(f"import site; site.addsitedir({packages!r})\n")
    mark.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))

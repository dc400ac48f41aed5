"""Exit with 1, and say what to do, if pip would fetch gigabytes of CUDA packages on a machine without a GPU.

On Linux on x86-64, the registry's torch is the CUDA build. The CPU build of the same version carries a `+cpu` tag, and
pip prefers it wherever it finds one.
"""

import json
import os
import platform
import shutil
import subprocess
import sys

TORCH = "torch==2.13.0"


def main() -> int:
    """0 if the torch that pip would take suits this machine."""
    cuda_by_default = sys.platform == "linux" and platform.machine() == "x86_64"
    if not cuda_by_default or shutil.which("nvidia-smi") or os.environ.get("TORCH") == "any":
        return 0
    command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--no-deps", "--ignore-installed"]
    done = subprocess.run([*command, "--report", "-", TORCH], capture_output=True, text=True, check=False)
    if done.returncode:
        print(done.stderr, file=sys.stderr)
        return 1
    version = json.loads(done.stdout)["install"][0]["metadata"]["version"]
    if version.endswith("+cpu"):
        return 0
    print(
        f"pip would install {TORCH} for CUDA: several GB, and there is no NVIDIA GPU here.\n"
        "  Let pip see PyTorch's CPU builds first: pytorch.org/get-started names their index (Linux, Pip, CPU);\n"
        "  pass it as PIP_EXTRA_INDEX_URL=... make ...\n"
        "  Or take the CUDA build all the same: TORCH=any make ...",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())

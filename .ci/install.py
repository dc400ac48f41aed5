"""Install what the command line names into this environment, with pip, at the versions of constraints.txt.

usage: VENV/bin/python .ci/install.py REQUIREMENT... (as for `pip install`)

Where an extra needs torch (`shard`), torch comes first. On Linux the package registry has torch's CUDA build, which is
large and of no use without an NVIDIA GPU, so pip also looks at PyTorch's index of CPU builds. If that index cannot be
reached, pip installs what it finds. TORCH=any never asks that index.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PIP_FROM = (25, 3)  # older ones, such as Debian 12's 23.0.1, look for versions that fit for an hour
CPU_BUILDS = "https://download.pytorch.org/whl/cpu"
CUDA_GB, CUDA_DISK_GB, CPU_GB = 2.7, 5, 0.2  # of torch 2.13.0 and what it depends on
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
CONSTRAINTS = ["-c", str(ROOT / "constraints.txt")]
TAKEN = re.compile(
    r"\s*(?:Downloading|Using cached) (?P<file>\S+(?<!\.metadata))(?: \((?P<size>[\d.]+) (?P<unit>[kMG]?B)\))?$"
)
MEGABYTES = {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}


def pinned_torch() -> str:
    """The requirement that the extra `shard` states, like torch==2.13.0."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return str(next(requirement for requirement in extras["shard"] if requirement.startswith("torch==")))


def installed(package: str) -> str | None:
    """The package's version in this environment, without a tag like +cpu; None if it is not there."""
    try:
        return metadata.version(package).partition("+")[0]
    except metadata.PackageNotFoundError:
        return None


def offers(wanted: str, *options: str) -> bool:
    """Whether pip finds this exact version of torch, like 2.13.0+cpu, for this Python and machine."""
    found = subprocess.run(
        [*PIP, "index", "versions", "torch", *options], capture_output=True, text=True, timeout=120, check=False
    )
    versions = re.search(r"^Available versions: (.*)", found.stdout, re.MULTILINE)
    return versions is not None and wanted in versions[1].split(", ")


def light_torch(requirement: str, cpu_builds: str = CPU_BUILDS) -> list[str]:
    """What `pip install` gets to install the lightest build of this torch. Prints which one, and its size.

    PyTorch's index gives torch alone, and by its exact version: it may list builds for GPUs too, which pip takes for
    newer, and libraries that it refuses to send.
    """
    if sys.platform != "linux" or shutil.which("nvidia-smi") or os.environ.get("TORCH") == "any":
        print(f"Installing {requirement}, the build that pip finds ...", flush=True)
        return [requirement]
    cpu_build = requirement.removeprefix("torch==") + "+cpu"
    if offers(cpu_build):
        print(f"Installing {requirement}, the CPU build: {CPU_GB} GB ...", flush=True)
        return [f"torch=={cpu_build}"]
    if offers(cpu_build, "--index-url", cpu_builds, "--timeout", "5", "--retries", "0"):
        print(f"Installing {requirement}, the CPU build, from {cpu_builds}: {CPU_GB} GB ...", flush=True)
        return ["--no-deps", "--index-url", cpu_builds, f"torch=={cpu_build}"]
    print(
        f"Installing {requirement} for CUDA: {CUDA_GB} GB to download, {CUDA_DISK_GB} GB on the disk.\n"
        f"  This machine has no NVIDIA GPU, but the CPU build ({CPU_GB} GB) cannot be fetched from {cpu_builds}.",
        flush=True,
    )
    return [requirement]


class Progress:
    """How far pip is, by the lines that it prints: on a terminal one line that is written again, in a log few lines."""

    def __init__(self, on_terminal: bool) -> None:
        self.on_terminal = on_terminal
        self.files = 0
        self.megabytes = 0.0

    def hear(self, line: str) -> None:
        """One line of pip's."""
        if taken := TAKEN.match(line):
            megabytes = float(taken["size"] or 0) * MEGABYTES[taken["unit"] or "B"]
            self.files += 1
            self.megabytes += megabytes
            self.show(f"  {self.files} packages, {self.megabytes:.0f} MB: {taken['file']}", log=megabytes >= 5)
        elif line.startswith("Installing collected packages"):
            self.show(f"  {self.files} packages, {self.megabytes:.0f} MB fetched; installing ...", log=True)

    def show(self, text: str, *, log: bool) -> None:
        """Show this on a terminal; elsewhere only if it is worth a line in a log."""
        if self.on_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{text[:width]:{width}}\r", end="", flush=True)
        elif log:
            print(text, flush=True)


def install(requirements: list[str]) -> int:
    """Install these and show how far pip is. Returns pip's exit status; pip's warnings and errors pass through."""
    command = [*PIP, "install", "--progress-bar", "off", *CONSTRAINTS, *requirements]
    progress = Progress(on_terminal=sys.stdout.isatty())
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as pip:
        for line in pip.stdout or ():
            progress.hear(line)
    progress.show("", log=False)
    return pip.returncode


def needs_newer_pip(version: str) -> bool:
    """Whether this version of pip is older than PIP_FROM."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < PIP_FROM


def main(requirements: list[str]) -> int:
    """Returns the exit status of pip, of the first step that failed."""
    if needs_newer_pip(metadata.version("pip")):
        wanted = "pip>=" + ".".join(map(str, PIP_FROM))
        done = subprocess.run([*PIP, "install", "--quiet", "--upgrade", wanted], check=False)
        if done.returncode:
            return done.returncode
    if any(re.search(r"\[(\w+,)*shard\b", requirement) for requirement in requirements):
        torch = pinned_torch()
        if installed("torch") != torch.removeprefix("torch=="):
            done = subprocess.run([*PIP, "install", *CONSTRAINTS, *light_torch(torch)], cwd=ROOT, check=False)
            if done.returncode:
                return done.returncode
    return install(requirements)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

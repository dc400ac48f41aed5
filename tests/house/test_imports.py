"""The architecture is a test: imports point one way, and the router stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCHEDULER = (
    "shards.exec.request",
    "shards.exec.sequence",
    "shards.kv.pool",
    "shards.kv.table",
    "shards.nouns",
    "shards.options",
    "shards.sched",
    "shards.scheduler",
)

MAY_IMPORT = {
    "http1": (),
    "tls": (),
    "policies": ("tls.settings",),
    "shards": ("tls",),
    "backends": ("http1", "tls", "policies.nouns", "policies.errors", "shards.wire", "shards.nouns", "shards.kv.keys"),
    "router": (
        *("http1", "tls", "policies", "backends", "simulation.command"),
        *(
            "shards.wire",
            "shards.kv.keys",
            "shards.kv.chunks",
            "shards.bundled",
            "shards.collector",
            "shards.logs",
            "shards.__main__",
        ),
    ),
    # it runs the scheduler of the engine, of which nothing knows torch
    "simulation": ("policies", "backends", "router", "shards.kv.keys", *SCHEDULER),
}

OVER_HTTP = ("backends.base", "backends.detokenize", "backends.http", "backends.messages", "backends.openai")

THE_DECISION = tuple(f"policies.{file.stem}" for file in sorted((ROOT / "policies").glob("[!_]*.py")))

INSIDE = {
    "policies.learning": (),
    "policies.prefix": (),
    "policies.fairness": ("policies.nouns",),
    "policies.quota": ("policies.errors", "policies.nouns", "policies.quantities"),
    "policies.sla": (*THE_DECISION, "policies.quota.prices"),
    "backends.http": ("backends.base", "backends.nesting"),
    "backends.messages": ("backends.http",),
    "backends.openai": ("backends.base", "backends.http", "backends.messages", "backends.nesting"),
    "backends.anthropic": (*OVER_HTTP, "backends.nesting"),
    "backends.fastchat": OVER_HTTP,
    "backends.llama_cpp": (*OVER_HTTP, "backends.nesting"),
    "backends.ollama": (*OVER_HTTP, "backends.nesting"),
    "backends.tgi": OVER_HTTP,
    "backends.triton": ("backends.protobuf", *OVER_HTTP, "backends.kserve"),
    "backends.shard": ("backends.base", "backends.detokenize", "backends.nesting", "backends.reconnect"),
    "backends.events": ("backends.nesting",),
    # the trunk: each folder may import those above it, and `operate` imports the rest without being imported
    "router.text": ("router.ask", "router.regular_file", "router.waiters"),
    "router.fleet": ("router.later", "router.supervise"),
    "router.identity": ("router.regular_file", "router.supervise"),
    "router.shared": (
        *("router.ask", "router.private_files", "router.regular_file", "router.supervise", "router.waiters"),
        "router.fleet",
    ),
    "router.call": (
        *("router.ask", "router.later", "router.waiters"),
        *("router.text", "router.fleet", "router.identity", "router.shared"),
    ),
    "router.protocols": ("router.ask", "router.text", "router.fleet", "router.shared", "router.call"),
    "router.batches": (
        *("router.ask", "router.private_files", "router.supervise", "router.waiters"),
        *("router.text.turns", "router.call", "router.protocols"),
    ),
    "router.operate": (
        "router.ask",
        "router.direct",
        "router.later",
        "router.inert",
        "router.private_files",
        "router.terminal",
        "router.fleet",
        "router.shared",
        "router.call",
        "router.protocols",
        "router.batches",
    ),
    # as any other client: it knows nothing of the router
    "router.client": ("router.direct", "router.inert", "router.private_files", "router.terminal"),
    "router.start": ("router",),
}
"""Modules of its own package that each layer may import, beside itself."""

LARGE = {"torch", "transformers", "triton", "sqlalchemy"}
"""Packages that only some routers need."""

PURE = {"socket", "asyncio", "time", "random", "os", "threading", "subprocess", "grpc", "aiohttp", "redis", "torch"}


def imports_of(file: Path, *, at_run_time_only: bool = False) -> list[str]:
    """Dotted names that `file` imports, each `from a import b` as a.b."""
    return [name for name, is_at_run_time in found_imports(file) if is_at_run_time or not at_run_time_only]


@cache
def found_imports(file: Path) -> list[tuple[str, bool]]:
    """Each name that `file` imports, and whether that is at run time: not below `if TYPE_CHECKING:`."""
    found: list[tuple[str, bool]] = []
    below: list[tuple[ast.AST, bool]] = [(ast.parse(file.read_text()), True)]
    while below:
        node, is_at_run_time = below.pop()
        if isinstance(node, ast.Import):
            found += [(alias.name, is_at_run_time) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            found += [(f"{node.module}.{alias.name}", is_at_run_time) for alias in node.names]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            below += [(child, False) for child in node.body]
            below += [(child, is_at_run_time) for child in node.orelse]
        elif not isinstance(node, ast.expr):
            # no expression has an import below it
            below += [(child, is_at_run_time) for child in ast.iter_child_nodes(node)]
    return found


@cache
def files_of(package: str) -> list[Path]:
    return sorted(file for file in (ROOT / package).rglob("*.py") if "_pb2" not in file.name)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_between_packages_point_one_way(package: str) -> None:
    for file in files_of(package):
        for name in imports_of(file):
            other = name.split(".")[0]
            if other in MAY_IMPORT and other != package:
                assert name.startswith(MAY_IMPORT[package]), f"{file.relative_to(ROOT)}: may not import {name}"


@pytest.mark.parametrize("folder", INSIDE)
def test_imports_between_the_folders_of_a_package_point_one_way(folder: str) -> None:
    package = folder.partition(".")[0]
    files = files_of(folder.replace(".", "/"))
    assert files, f"there is no {folder}"
    for file in files:
        for name in imports_of(file):
            if name.startswith(f"{package}."):
                allowed = name.startswith(tuple(f"{other}." for other in (folder, *INSIDE[folder])))
                assert allowed, f"{file.relative_to(ROOT)}: may not import {name}"


def test_what_decides_does_not_know_the_file_that_it_follows() -> None:
    for file in files_of("policies"):
        if not file.is_relative_to(ROOT / "policies/sla"):
            names = {name for name in imports_of(file) if name.startswith("policies.sla")}
            assert not names, f"{file.relative_to(ROOT)} imports {names}"


def test_only_the_command_line_knows_the_simulation() -> None:
    for file in files_of("router"):
        names = {name for name in imports_of(file) if name.startswith("simulation")}
        assert not names or file.name == "cli.py", f"{file.relative_to(ROOT)} imports {names}"


def test_every_folder_of_the_router_has_a_rule() -> None:
    folders = {f"router.{folder.parent.name}" for folder in (ROOT / "router").glob("*/__init__.py")}
    assert folders == {name for name in INSIDE if name.startswith("router.")}


def test_policies_do_no_io_and_have_no_clock() -> None:
    for file in files_of("policies"):
        touched = {name.split(".")[0] for name in imports_of(file, at_run_time_only=True)}
        assert not touched & (PURE - {"random"}), f"{file.relative_to(ROOT)} imports {touched & PURE}"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_modules_form_no_cycle(package: str) -> None:
    names = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in files_of(package)}
    # a name that is needed for a type alone is a dependency too
    edges = {name: set(targets(imports_of(file), names)) - {name} for name, file in names.items()}
    while True:
        leaves = {name for name, needs in edges.items() if not needs & edges.keys()}
        if not leaves:
            break
        edges = {name: needs for name, needs in edges.items() if name not in leaves}
    assert not edges, f"import cycle among {sorted(edges)}"


def targets(imported: list[str], names: dict[str, Path]) -> Iterator[str]:
    for name in imported:
        for candidate in (name, name.rpartition(".")[0]):
            if candidate in names:
                yield candidate


def test_the_scheduler_does_not_know_torch() -> None:
    for file in files_of("shards/sched"):
        assert not any(name.split(".")[0] == "torch" for name in imports_of(file)), file


def test_importing_the_router_imports_nothing_large_that_it_may_not_need() -> None:
    modules = "router.start.app, router.start.cli, simulation.command"
    script = f"import sys, {modules}; print(sorted({LARGE} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""How the house is built: calls go down only, one module one idea, the public names are the public names."""

from __future__ import annotations

import ast
from pathlib import Path

import kvpager

SOURCE = Path(__file__).parents[2] / "src/kvpager"

# From the bottom up: a module may import what stands before it (and its own folder), never what stands behind.
FLOORS = [
    "errors",
    "counts",
    "_native",
    "attention",
    "config",
    "extra_keys",
    "hashing",
    "request",
    "events",
    "stats",
    "pool",
    "blocks",
    "coordinator",
    "manager",
    "check",
    "block_table",
    "scheduler",
    "planner",
    "replay",
    "engine",
    "integrations",
    "cli",
]


def floor(module: str) -> int:
    return FLOORS.index(module.split(".")[0])


def imports_of(path: Path) -> set[str]:
    """The kvpager modules that a file imports when it is imported or run, by their first name."""
    relative = path.relative_to(SOURCE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            if node.level:
                base = relative[: len(relative) - node.level]
                target = (*base, *(node.module.split(".") if node.module else ()))
                names = [target] if target else [(alias.name,) for alias in node.names]
            elif node.module and node.module.split(".")[0] == "kvpager":
                names = [tuple(node.module.split(".")[1:])] if "." in node.module else [(a.name,) for a in node.names]
            else:
                continue
            found |= {name[0] for name in names if name}
    return found


def test_every_import_goes_down() -> None:
    checked = 0
    for path in sorted(SOURCE.rglob("*.py")):
        own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if own == "__init__":
            continue
        for imported in imports_of(path) - {own}:
            assert floor(imported) < floor(own), f"{path.relative_to(SOURCE)} imports {imported}, which stands above it"
            checked += 1
    assert checked > 40


def test_the_core_needs_only_numpy_and_msgspec() -> None:
    standard = set(__import__("sys").stdlib_module_names) | {"numpy", "msgspec"}
    core = [path for path in SOURCE.glob("*.py") if path.name != "cli.py"] + list((SOURCE / "attention").glob("*.py"))
    for path in core:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            else:
                continue
            assert {name.split(".")[0] for name in names} <= standard, path


def test_all_names_are_there_sorted_and_nothing_else_is_public() -> None:
    assert sorted(kvpager.__all__, key=str) == sorted(set(kvpager.__all__))
    modules = {path.stem for path in SOURCE.iterdir()}
    public = {name for name in vars(kvpager) if not name.startswith("_")} - modules
    assert public == set(kvpager.__all__)


def test_every_error_is_a_kvpager_error() -> None:
    from kvpager import errors

    for name in errors.__all__:
        assert issubclass(getattr(errors, name), kvpager.KVPagerError)
    assert issubclass(kvpager.ConfigError, ValueError)
    assert issubclass(kvpager.InvalidRequestError, ValueError)
    assert issubclass(kvpager.UnknownRequestError, KeyError)
    assert issubclass(kvpager.UnknownBlockError, IndexError)

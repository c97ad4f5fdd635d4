"""The compiled module and its stub name the same things with the same parameters.

`mypy.stubtest` checks that too, but it doesn't take nanobind's functions for functions.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvpager
from kvpager import _native

STUB = next(Path(folder) / "_native.pyi" for folder in kvpager.__path__ if (Path(folder) / "_native.pyi").exists())


def _stubbed(body: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _stubbed(node.body, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef) and not any(map(_is_property, node.decorator_list)):
            yield prefix + node.name, node


def _is_property(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "property"


def _compiled(owner: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in vars(owner).items():
        kind = type(value).__name__
        if kind in ("nb_func", "nb_method"):
            yield prefix + name, value
        elif kind.startswith("nb_type"):
            yield from _compiled(value, f"{name}.")


FUNCTIONS = dict(_stubbed(ast.parse(STUB.read_text()).body))
COMPILED = dict(_compiled(_native))


def test_same_functions() -> None:
    assert set(COMPILED) == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_parameters(name: str) -> None:
    stubbed = FUNCTIONS[name].args
    arguments = [*stubbed.posonlyargs, *stubbed.args, *stubbed.kwonlyargs]
    signature = re.sub(r"\[[^]]*\]", "", COMPILED[name].__nb_signature__[-1][0])
    assert re.findall(r"(\w+): ", signature) == [argument.arg for argument in arguments if argument.arg != "self"]

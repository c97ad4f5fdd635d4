"""The compiled module and its stub name the same things with the same parameters.

`mypy.stubtest` checks that too, but it doesn't take nanobind's module functions for functions.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvpager
from kvpager import _native

STUB = next(Path(folder) / "_native.pyi" for folder in kvpager.__path__ if (Path(folder) / "_native.pyi").exists())
FUNCTIONS = {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_same_functions() -> None:
    assert {name for name in dir(_native) if type(getattr(_native, name)).__name__ == "nb_func"} == set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_same_parameters(name: str) -> None:
    signature = getattr(_native, name).__nb_signature__[0][0]
    parameters = [argument.arg for argument in FUNCTIONS[name].args.args]
    assert re.findall(r"(\w+): ", signature) == parameters

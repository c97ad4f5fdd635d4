"""Runs at the start of every Python process of the vLLM environment, child processes included.

PyPI's torchvision is built for CUDA: beside a CPU build of torch it does not import, since two of its operators are
registered by the part that is missing. They are declared just before it is imported; nobody calls them.
"""

from __future__ import annotations

import importlib.abc
import sys


class _DeclareOperators(importlib.abc.MetaPathFinder):
    done = False

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if fullname == "torchvision" and not self.done:
            self.done = True
            import torch

            for name in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
        return None


sys.meta_path.insert(0, _DeclareOperators())

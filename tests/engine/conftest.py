"""The engine's tests need ``kvpager[engine]``; without it they are skipped, each file with that reason."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

MISSING = [name for name in ("torch", "transformers", "gguf") if importlib.util.find_spec(name) is None]
HERE = Path(__file__).parent

if MISSING:

    class _Skipped(pytest.File):
        def collect(self) -> list[pytest.Item]:
            pytest.skip(f"{', '.join(MISSING)} not installed: pip install kvpager[engine]", allow_module_level=True)

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Collector:
        return _Skipped.from_parent(parent, path=module_path)

else:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What other packages warn about is not ours to fix."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("default"))

"""Applies each fault in turn to a copy of the sources and runs the tests on it: every one must fail.

python -m tests.mutants [TEXT]      only faults whose file or description contains TEXT

A fault in C++ is compiled into an extension of its own, in a folder whose build knows what it can leave as it is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import nanobind
from rich.console import Console
from rich.progress import Progress

import kvpager._native

from .faults import FAULTS, Fault

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
TESTS = [  # the quickest first, but for those that seldom notice anything
    "tests/contract/test_went_wrong.py",
    "tests/unit/test_bad_input.py",
    "tests/unit/test_stats_and_events.py",
    "tests/unit/test_native_steps.py",
    "tests/unit/test_native_pool.py",
    "tests/unit/test_scheduler.py",
    "tests/unit/test_attention.py",
    "tests/contract/test_stateful.py",
    "tests/contract/test_decode_lockstep.py",
    "tests/contract/test_scheduler_progress.py",
]
LIMITS_TIME = "tests/unit/test_native_pool.py::test_a_big_pool_starts_at_once"
"""A busy machine would fail it: that is no fault noticed."""
HANGS = 600
"""Seconds after which the tests of a faulty package count as failed: they take a third of that on a good one."""
IMPORTED_EARLY = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
# An editable install would be found before the copy: its finder goes first.
RUN = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in type(finder).__name__
                    and "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, sys.argv.pop(1))
import hypothesis, kvpager._native, pytest
# A failure is enough; the smallest one would take minutes. No fault is noticed by luck.
hypothesis.settings.register_profile(
    "mutants", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate), derandomize=True, database=None)
hypothesis.settings.load_profile("mutants")
assert kvpager._native.__file__.startswith(sys.path[0]), kvpager._native.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    faults = [fault for fault in FAULTS if wanted in fault.file or wanted in fault.what]
    for fault in faults:
        fault.applied_to((ROOT / "src" / fault.file).read_text())
    console = Console()
    survivors = 0
    with (
        Progress(console=Console(stderr=True), transient=True) as bar,
        Workshops() as shops,
        ThreadPoolExecutor(os.cpu_count()) as pool,
    ):
        task = bar.add_task("mutants", total=len(faults) + 1)
        results = pool.map(lambda fault: run(fault, shops), [None, *faults])
        if failed := next(results):
            console.print(f"the tests fail without a fault: {failed}")
            pool.shutdown(cancel_futures=True)
            return 1
        bar.advance(task)
        for fault, failed in zip(faults, results, strict=True):
            survivors += not failed
            console.print(
                f"{'killed  ' if failed else 'SURVIVED'} {fault.file}: {fault.what}  [{failed}]",
                markup=False,
                soft_wrap=True,
            )
            bar.advance(task)
    console.print(f"{len(faults) - survivors} of {len(faults)} faults were noticed")
    return int(survivors > 0)


class Workshop:
    """A copy of the C++ sources and its build folder: each fault compiles only what includes the changed file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.build = folder / "build"
        shutil.copytree(ROOT / "src/native", folder / "src/native")
        shutil.copy(ROOT / "CMakeLists.txt", folder)
        self._cmake(
            *("-S", folder, "-B", self.build, "-G", "Ninja"),
            *("-DSKBUILD_PROJECT_NAME=kvpager", "-DSKBUILD_PROJECT_VERSION=0"),
            *("-DCMAKE_BUILD_TYPE=None", "-DCMAKE_CXX_FLAGS=-O1 -w"),
            *(f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_DIR={nanobind.cmake_dir()}"),
        )

    def extension(self, fault: Fault | None) -> Path:
        """Where the extension with this fault lies, until the next one is built."""
        if fault is None:
            self._cmake("--build", self.build, "-j1")
        else:
            path = self.folder / "src" / fault.file
            text = path.read_text()
            path.write_text(fault.applied_to(text))
            try:
                self._cmake("--build", self.build, "-j1")
            finally:
                path.write_text(text)
        (built,) = self.build.glob("_native*")
        return built

    @staticmethod
    def _cmake(*arguments: str | Path) -> None:
        tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["cmake", *arguments], env={**os.environ, "PATH": tools}, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"this does not build:\n{done.stdout[-3000:]}{done.stderr[-1000:]}")


class Workshops:
    """As many as are in use at once."""

    def __enter__(self) -> Workshops:
        self._folder = tempfile.TemporaryDirectory()
        self._numbers = count()
        self._idle: SimpleQueue[Workshop] = SimpleQueue()
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    @contextmanager
    def one(self) -> Iterator[Workshop]:
        try:
            shop = self._idle.get_nowait()
        except Empty:
            shop = Workshop(Path(self._folder.name) / str(next(self._numbers)))
        yield shop
        self._idle.put(shop)


def run(fault: Fault | None, shops: Workshops) -> str:
    """The first test that fails on a package with this fault; empty if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "kvpager"
        shutil.copytree(ROOT / "src/kvpager", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        if fault is None or fault.file.startswith("native/"):
            with shops.one() as shop:
                shutil.copy(shop.extension(fault), package)
        else:
            shutil.copy(kvpager._native.__file__, package)
            path = Path(folder) / fault.file
            path.write_text(fault.applied_to(path.read_text()))
        arguments = [
            "-x",
            "-q",
            "--no-header",
            "-p",
            "no:cacheprovider",
            "-W",
            IMPORTED_EARLY,
            *TESTS,
            "--deselect",
            LIMITS_TIME,
        ]
        command = [sys.executable, "-c", RUN, folder, *arguments]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANGS)
        except subprocess.TimeoutExpired:
            return f"it hangs: no end after {HANGS} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        return failed[0].split(" - ")[0]
    return "" if done.returncode == 0 else f"it ends with {done.returncode}: {done.stderr[-300:]}"


if __name__ == "__main__":
    sys.exit(main())

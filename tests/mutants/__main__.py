"""Applies each fault in turn to a copy of the package and runs the tests on it: every one must fail.

python -m tests.mutants [TEXT]      only faults whose file or description contains TEXT
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import kvpager._native

from .faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
TESTS = [
    "tests/unit/test_attention.py",
    "tests/unit/test_bad_input.py",
    "tests/unit/test_stats_and_events.py",
    "tests/contract/test_went_wrong.py",
    "tests/unit/test_scheduler.py",
    "tests/contract/test_decode_lockstep.py",
    "tests/contract/test_stateful.py",
    "tests/contract/test_scheduler_progress.py",
]
HANGS = 240
"""Seconds after which the tests of a faulty package count as failed: they take a third of that on a good one."""
IMPORTED_EARLY = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
# An editable install would be found before the copy: its finder goes first.
RUN = """
import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "Editable" not in type(finder).__name__
                    and "ScikitBuild" not in type(finder).__name__]
sys.path.insert(0, sys.argv.pop(1))
import hypothesis, kvpager, pytest
# A failure is enough; the smallest one would take minutes.
hypothesis.settings.register_profile("mutants", phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate))
hypothesis.settings.load_profile("mutants")
assert kvpager.__file__.startswith(sys.path[0]), kvpager.__file__
sys.exit(pytest.main(sys.argv[1:]))
"""


def main() -> int:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    faults = [fault for fault in FAULTS if wanted in fault.file or wanted in fault.what]
    console = Console()
    survivors = 0
    with Progress(console=Console(stderr=True), transient=True) as bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        task = bar.add_task("mutants", total=len(faults) + 1)
        if failed := run(None):
            console.print(f"the tests fail without a fault: {failed}")
            return 1
        bar.advance(task)
        for fault, failed in zip(faults, pool.map(run, faults), strict=True):
            survivors += not failed
            console.print(
                f"{'killed  ' if failed else 'SURVIVED'} {fault.file}: {fault.what}  [{failed}]", markup=False
            )
            bar.advance(task)
    console.print(f"{len(faults) - survivors} of {len(faults)} faults were noticed")
    return int(survivors > 0)


def run(fault: Fault | None) -> str:
    """The first test that fails on a package with this fault; empty if all pass."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / "kvpager"
        shutil.copytree(ROOT / "src/kvpager", package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        shutil.copy(kvpager._native.__file__, package)
        if fault is not None:
            path = package / fault.file
            text = path.read_text()
            if text.count(fault.line) != 1:
                raise SystemExit(f"{fault.file}: {fault.line!r} stands there {text.count(fault.line)} times, not once")
            path.write_text(text.replace(fault.line, fault.fault))
        arguments = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-W", IMPORTED_EARLY, *TESTS]
        command = [sys.executable, "-c", RUN, folder, *arguments]
        try:
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=HANGS)
        except subprocess.TimeoutExpired:
            return f"it hangs: no end after {HANGS} s"
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else ("" if done.returncode == 0 else done.stderr[-300:] or "no summary")


if __name__ == "__main__":
    sys.exit(main())

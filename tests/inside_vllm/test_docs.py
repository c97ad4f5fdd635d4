"""docs/vllm.md: its Python runs as it stands, with a model filled in; what it says of variables is true."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from .harness import REPOSITORY

PAGE = REPOSITORY / "docs/vllm.md"
INTEGRATION = REPOSITORY / "src/kvpager/integrations/vllm"


def test_the_page_runs(models: dict[str, str], tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    shows = "\nhost = llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager\nprint(type(host).__module__)\n"
    script = tmp_path / "page.py"
    script.write_text(f"MODEL = {models['smollm2']!r}\n{block}{shows}host.check()\n")
    environment = os.environ | {"KVPAGER_VLLM_PROBE": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if re.match(r"\d+ \[|kvpager", line)]
    cached = [int(line.split()[0]) for line in lines[:2]]
    assert cached[0] == 0 and cached[1] > 200
    assert lines[2] == "kvpager.integrations.vllm.v0_25_1"


def test_every_variable_is_on_the_page_and_no_other() -> None:
    code = "".join(path.read_text() for path in INTEGRATION.glob("*.py"))
    read = set(re.findall(r'os\.environ\.get\("(KVPAGER_\w+)"', code))
    assert read == set(re.findall(r"^\| `(KVPAGER_\w+)`", PAGE.read_text(), flags=re.MULTILINE))


def test_every_version_is_on_the_page() -> None:
    from kvpager.integrations.vllm import VERSIONS

    for version, module in VERSIONS.items():
        assert f"**{version}**" in PAGE.read_text() and (INTEGRATION / f"{module}.py").is_file()


def test_the_benchmark_runs_and_both_managers_decide_the_same(tmp_path: Path) -> None:
    result = tmp_path / "result.json"
    command = [sys.executable, "-m", "benchmarks.vllm_scheduler", "--steps", "20", "--only", "small pool"]
    environment = os.environ | {"KVPAGER_VLLM_PROBE": "", "KVPAGER_VLLM_EVICTION": "recency"}
    done = subprocess.run(
        [*command, "--json", str(result)], capture_output=True, text=True, env=environment, cwd=REPOSITORY
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (row,) = json.loads(result.read_text())
    assert row["manager_ratio"] > 1 and row["steps"] == 20

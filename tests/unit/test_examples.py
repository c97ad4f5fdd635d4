"""The examples run, and give what the documents say."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from kvpager import BlockHasher, CacheConfig, FullAttention, KVCacheManager, Request, check_manager

ROOT = Path(__file__).parents[2]


def test_the_40_line_scheduler_serves_everybody_in_a_cache_that_holds_two() -> None:
    serve = runpy.run_path(str(ROOT / "examples/scheduler.py"))["serve"]
    config = CacheConfig.uniform(num_blocks=16, specs=[FullAttention(block_size=4)])
    manager = KVCacheManager(config, max_model_len=56, max_num_batched_tokens=16, log_stats=True)
    hasher = BlockHasher.for_config(config)
    requests = [Request(f"r{i}", [7] * 9 + [i] * 9, block_hasher=hasher, max_tokens=12) for i in range(8)]
    ran: list[tuple[str, int, int]] = []

    def run(step: list[tuple[Request, int, int]]) -> dict[str, int]:
        check_manager(manager)
        ran.extend((request.request_id, start, num_tokens) for request, start, num_tokens in step)
        return {request.request_id: 1 for request, _, _ in step}

    serve(manager, requests, run, budget=16)
    assert all(list(request.output_token_ids) == [1] * 12 for request in requests)
    assert manager.block_pool.num_held == 0
    stats = manager.make_prefix_cache_stats()
    assert stats is not None
    assert stats.hits >= 7 * 8  # each but the first shares two blocks of the system prompt
    assert stats.preempted_requests > 0
    check_manager(manager)


def test_the_scheduler_that_the_document_shows_is_the_one_in_examples() -> None:
    shown = (ROOT / "docs/embedding.md").read_text()
    code = (ROOT / "examples/scheduler.py").read_text()
    assert code[code.index("def serve(") :].strip() in shown


@pytest.mark.parametrize("name", ["run_scheduler.py"])
def test_the_example_prints_what_the_document_says(name: str) -> None:
    done = subprocess.run([sys.executable, ROOT / "examples" / name], capture_output=True, text=True, check=True)
    assert done.stdout.strip()
    assert done.stdout.strip() in (ROOT / "docs/embedding.md").read_text()


@pytest.mark.parametrize("page", ["README.md", "docs/embedding.md"])
def test_the_python_of_the_page_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    runnable = [block for block in blocks if "import" in block]
    assert runnable
    for block in runnable:
        exec(compile(block, page, "exec"), {})
    if page == "README.md":
        assert "num_hit_tokens=96" in capsys.readouterr().out


def test_the_pages_link_to_files_that_are_there() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_make_targets_that_the_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        named = set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), re.MULTILINE))
        assert named <= targets, f"{page.name}: {named - targets}"

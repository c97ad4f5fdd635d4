#!/bin/sh
# kvpager inside vLLM: see run.py. ORACLE: where the environment with vLLM is, or shall be made.
set -eu
cd "$(dirname "$0")/../.."
KVPAGER_ORACLE="${ORACLE:-$HOME/.cache/kvpager/oracle}" exec .venv/bin/python tests/inside_vllm/run.py "$@"

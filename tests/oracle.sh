#!/bin/sh
# Runs Python of the environment with vLLM 0.25.1, kvpager as built from here on its path (nothing is installed in it).
#   ORACLE=DIR tests/oracle.sh ARGUMENTS…
# The environment is made elsewhere (CONTRIBUTING.md says how); without it nothing runs, and that is said.
set -eu
cd "$(dirname "$0")/.."
: "${ORACLE:=$HOME/.cache/kvpager/oracle}"
if [ ! -x "$ORACLE/bin/python" ]; then
  echo "skipped: no environment with vLLM 0.25.1 at $ORACLE (ORACLE=DIR names another; see CONTRIBUTING.md)"
  exit 0
fi
# shellcheck disable=SC1091
. "$ORACLE/env.sh"
# A build folder of its own: other builds of this checkout may run at the same time.
"$ORACLE/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/oracle \
  --config-settings=build-dir=build/oracle-cmake . 2>/dev/null
# The sitecustomize in `path` lets torchvision import beside a CPU build of torch.
export PYTHONPATH="$PWD/build/oracle:$PWD/tests/inside_vllm/path${PYTHONPATH:+:$PYTHONPATH}"
exec "$ORACLE/bin/python" "$@"

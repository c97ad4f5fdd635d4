#!/bin/sh
# Builds a wheel, installs it into an empty environment and uses it there.
#   tests/wheel.sh PYTHON
set -eu
python=$1
rm -rf dist build/wheel-env
"$python" -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
"$python" -m venv build/wheel-env
build/wheel-env/bin/python -m pip install --quiet --disable-pip-version-check "$(ls dist/*.whl)[cli]"
cd build  # away from the sources
wheel-env/bin/python -c 'import kvpager, kvpager._native; print("installed:", kvpager.__file__)'
wheel-env/bin/kvpager replay --limit 20 --json

#!/bin/sh
# The core's own tests, its random lives and the extension's tests under AddressSanitizer and UndefinedBehaviorSanitizer.
#   tests/sanitize.sh PYTHON SITE     PYTHON has the build tools; the instrumented package goes to SITE
set -eu
python=$1 site=$2
PATH="$(cd "$(dirname "$(command -v "$python")")" && pwd):$PATH" sh tests/native/run.sh sanitize
rm -rf "$site"
"$python" -m pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps -C build-dir=build/sanitize \
  -C cmake.define.KVPAGER_SANITIZE=ON -C cmake.build-type=Debug --target "$site" .
packages=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
base=$("$python" -c 'import sys; print(sys._base_executable)')
# The base interpreter: the environment's own would find the editable install first.
LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libubsan.so)" \
ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$site:$packages" HYPOTHESIS_PROFILE=sanitize \
  "$base" -s -m pytest -q --capture=sys -p no:cacheprovider tests/unit/test_native_hashing.py tests/unit/test_native_pool.py \
  tests/unit/test_native_steps.py tests/unit/test_one_way.py tests/contract/test_decode_lockstep.py

#!/bin/sh
# Builds and runs the core's own tests.
#   tests/native/run.sh             optimized
#   tests/native/run.sh sanitize    under AddressSanitizer and UBSan, and the fuzzer's random calls too
# KVPAGER_SEED repeats a run; KVPAGER_FUZZ_RUNS says how many inputs the fuzzer makes up.
set -eu
cd "$(dirname "$0")/../.."
build=build/native sanitize=OFF
if [ "${1:-}" = sanitize ]; then
  build=build/native-sanitize sanitize=ON
fi
mkdir -p build
seed=${KVPAGER_SEED:-$(od -An -N4 -tu4 /dev/urandom | tr -d ' ')}

cmake -S tests/native -B "$build" -G Ninja -DKVPAGER_SANITIZE=$sanitize >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
cmake --build "$build" >"$build.log" 2>&1 || { cat "$build.log" >&2; exit 1; }
KVPAGER_SEED=$seed "$build/core_tests"
if [ $sanitize = ON ]; then
  "$build/core_fuzz" --runs "${KVPAGER_FUZZ_RUNS:-15000}" --seed "$seed"
fi

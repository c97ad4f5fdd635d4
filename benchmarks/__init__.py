"""Benchmarks: kvpager beside vLLM 0.25.1's manager, in one run. ``python -m benchmarks --help``."""

"""Differential tests: kvpager and vLLM 0.25.1's manager through the same operations."""

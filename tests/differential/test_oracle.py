"""Whether there is an oracle at all."""

from __future__ import annotations

import pytest

from .conftest import MISSING


def test_oracle_is_here() -> None:
    if MISSING:
        pytest.skip(MISSING)

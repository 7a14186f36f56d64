"""The share of similar cases that `make test` runs; `make conformance` runs the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def every_other(names: Iterable[Any]) -> list[Any]:
    """The cases `names` for parametrize, of which every second one is slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (i % 2)) for i, name in enumerate(names)]

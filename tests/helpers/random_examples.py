"""How many random examples a test tries, by hypothesis's profile: `dev` a tenth of its number, `ci` that, `deep` ten
times as many. conftest.py registers the three."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

PERCENT = {"dev": 10, "ci": 100, "deep": 1000}


def register_profiles() -> None:
    """hypothesis itself tries 100 examples where a test says nothing, so a profile's number is a percentage."""
    for name, percent in PERCENT.items():
        settings.register_profile(name, max_examples=percent, deadline=None, print_blob=True)
    settings.load_profile("ci")


def examples(number: int, **others: Any) -> settings:
    """`@examples(400)`: settings with 400 examples in `ci`."""
    return settings(max_examples=max(1, number * settings.default.max_examples // 100), deadline=None, **others)

"""The number of random examples of a test, by hypothesis's profile: `dev` has a tenth of the test's number, `ci` that
number, `deep` ten times as many. conftest.py registers the profiles."""

from __future__ import annotations

from typing import Any

from hypothesis import settings

PERCENT = {"dev": 10, "ci": 100, "deep": 1000}


def register_profiles() -> None:
    """A test without a number has 100 examples in hypothesis, so a profile's number is a percentage."""
    for name, percent in PERCENT.items():
        settings.register_profile(name, max_examples=percent, deadline=None, print_blob=True)
    settings.load_profile("ci")


def examples(number: int, **others: Any) -> settings:
    """`@examples(400)`: settings with 400 examples in `ci`."""
    return settings(max_examples=max(1, number * settings.default.max_examples // 100), deadline=None, **others)

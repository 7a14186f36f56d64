"""Closed choices that people write as strings."""

from __future__ import annotations

from enum import StrEnum


class Choice(StrEnum):
    """An enum that equals the string a person writes, and prints as that string."""

    def __repr__(self) -> str:
        return repr(self.value)

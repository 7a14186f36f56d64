"""Sizes and times for people: in the unit that suits, with three digits."""

from __future__ import annotations


def human(size: float) -> str:
    """Bytes: `1.5 MB` (1 MB = 1,000,000 bytes)."""
    return _in_units(round(size) if abs(size) < 1000 else size, ("B", "kB", "MB", "GB", "TB"))


def lasting(seconds: float) -> str:
    """A time: `1.5 ms`."""
    return _in_units(seconds * 1e6, ("us", "ms", "s"))


def _in_units(amount: float, units: tuple[str, ...]) -> str:
    """`amount` of the first unit, in the largest unit of which there is one; each is 1000 of the one before."""
    for unit in units:
        amount = float(f"{amount:.3g}")
        if abs(amount) < 1000 or unit == units[-1]:
            return f"{amount:.0f} {unit}" if abs(amount) >= 100 else f"{amount:.3g} {unit}"
        amount /= 1000
    raise AssertionError(units)

"""Sizes and times as text: in a suitable unit, with three digits or a given number of them.

(`rich.filesize.decimal` rounds to tenths and writes "512 bytes"; only its choice of a unit is used.)
"""

from __future__ import annotations

import math


def human(size: float, digits: int = 3) -> str:
    """Bytes: `1.5 MB` (1 MB = 1,000,000 bytes)."""
    return _in_units(round(size) if abs(size) < 1000 else size, ("B", "kB", "MB", "GB", "TB"), digits)


def lasting(seconds: float) -> str:
    """A time: `1.5 ms`."""
    return _in_units(seconds * 1e6, ("us", "ms", "s"))


def _in_units(amount: float, units: tuple[str, ...], digits: int = 3) -> str:
    """`amount`, given in the first of `units`, in the most suitable one; each unit is 1000 of the one before."""
    from rich.filesize import pick_unit_and_suffix  # errors are imported with the package, which stays light

    if not math.isfinite(amount):  # a sum of figures in an edited file
        return f"{amount} {units[-1]}"
    amount = float(f"{amount:.{digits}g}")
    size, unit = pick_unit_and_suffix(int(abs(amount)), list(units), 1000)
    amount /= size
    return f"{amount:.0f} {unit}" if abs(amount) >= 10 ** (digits - 1) else f"{amount:.{digits}g} {unit}"

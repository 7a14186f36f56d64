"""Packages that only some modules of this package need: the extra `data`."""

from __future__ import annotations

from importlib.util import find_spec

from partway.strategy import RuntimeStateError
from partway.strategy.basics import install_extra


def need(package: str, what: str) -> None:
    """Raise RuntimeStateError unless `package`, which `what` needs, is installed."""
    if find_spec(package) is None:
        raise RuntimeStateError(f"{what} needs {package}; install it with: {install_extra('data')}")

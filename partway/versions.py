"""The versions of PyTorch with which Partway is tested.

Imported before the rest of the package: if a new version of PyTorch has changed something that Partway relies on, the
warning comes before the error.
"""

from __future__ import annotations

import warnings
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from partway.strategy.errors import UntestedTorchWarning

OLDEST, NEWEST = (2, 11), (2, 15)  # tests/test_torch_internals.py passes with these, and all tests with 2.13


def installed_torch() -> str | None:
    """The version of PyTorch, without importing it, which `partway --help` does not need. None if it is not installed,
    as in the Kubernetes operator."""
    try:
        return version("torch")
    except PackageNotFoundError:  # it may be on the path without being installed
        if find_spec("torch") is None:
            return None
        import torch

        return torch.__version__


def warn_if_untested(installed: str | None) -> None:
    """Warn if Partway is not tested with `installed`, a version such as "2.13.0+cpu"."""
    if installed is None:
        return
    major, minor = (int(part) for part in installed.split(".")[:2])
    if OLDEST <= (major, minor) <= NEWEST:
        return
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    age = "newer" if (major, minor) > NEWEST else "older"
    warnings.warn(
        f"PyTorch {installed} is {age} than the versions that Partway is tested with, {oldest} to {newest}; if "
        f"something fails that should not, install one of these, for example with pip install 'torch=={newest}.*'",
        UntestedTorchWarning,
        stacklevel=2,
    )


warn_if_untested(installed_torch())

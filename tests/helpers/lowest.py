"""Prints the constraints for `make oldest`: those of constraints.txt, with the lowest version of each dependency that
pyproject.toml allows. It runs before anything is installed."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The exact versions of these are incompatible with the lowest ones of others: import-linter needs rich 14, SciPy NumPy
# 2, and PyTorch 2.11 an older setuptools. fastapi and kubernetes have their lowest versions too, since their newest
# ones need pydantic 2.9 and 2.14.
FREE = ("import-linter", "scipy", "setuptools")
LOWEST_TOO = ("fastapi", "kubernetes")


def lowest(project: dict[str, Any]) -> dict[str, str]:
    """The lowest allowed version of every dependency that the package or its extras `data` and `ssl` import."""
    bounds = {}
    optional = project["optional-dependencies"]
    others = [each for extra in optional.values() for each in extra if each.startswith(LOWEST_TOO) and ">=" in each]
    for requirement in [*project["dependencies"], *optional["data"], *optional["ssl"], *others]:
        name, found, bound = requirement.partition(">=")
        if not found:
            raise SystemExit(f"{name} has no lower bound in pyproject.toml; write {name}>= the lowest that works")
        bounds[name] = bound
    return bounds


def constraints(project: dict[str, Any], exact: str) -> Iterator[str]:
    """The lines of constraints.txt for other packages, and the lowest versions."""
    bounds = lowest(project)
    for line in exact.splitlines():
        name, found, _ = line.partition("==")
        if found and name not in (*FREE, *bounds):
            yield line
    yield from (f"{name}=={bound}" for name, bound in bounds.items())


if __name__ == "__main__":
    root = Path(__file__).parents[2]
    pyproject = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    for each in constraints(pyproject["project"], (root / "constraints.txt").read_text(encoding="utf-8")):
        print(each)  # noqa: T201 - the Makefile reads it

"""The sources of the installed package, by their paths in a checkout."""

from __future__ import annotations

import functools
import os
from importlib.util import find_spec
from pathlib import Path

STAGES = ("strategy", "propagation", "fusion", "runtime")


@functools.cache
def sources() -> dict[str, Path]:
    """Every module: `partway/sharding.py`, `propagation/search/exact.py`. (A wheel has the stages inside of `partway/`,
    a checkout links to them from there.)"""
    spec = find_spec("partway")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    files = {}
    for folder, _, names in sorted(os.walk(root, followlinks=True)):
        inside = Path(folder).relative_to(root)
        within = inside if inside.parts and inside.parts[0] in STAGES else "partway" / inside
        files |= {(within / name).as_posix(): Path(folder, name) for name in sorted(names) if name.endswith(".py")}
    return files


def layer_of(module: str) -> str:
    """The stage of a module, or "partway"."""
    return module.partition("/")[0]


def package_of(module: str) -> str:
    """The package that a module is in, as Python names it."""
    parts = module.split("/")[:-1]
    return ".".join(parts if parts[0] == "partway" else ["partway", *parts])

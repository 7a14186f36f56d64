"""The sources of the installed package, by their paths in a checkout.

In a checkout the stages and the kits are beside `partway/`, which links to them; in a wheel they are inside it.
"""

from __future__ import annotations

import ast
import functools
import os
from importlib.util import find_spec
from pathlib import Path

STAGES = ("strategy", "propagation", "fusion", "runtime")
KITS = ("checking", "checkpoints", "data", "doctor", "integrations", "measure", "operator", "ps", "show")


@functools.cache
def sources() -> dict[str, Path]:
    """Every module: `partway/sharding.py`, `propagation/search/exact.py`, `kits/data/part.py`."""
    spec = find_spec("partway")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    files = {}
    for folder, _, names in sorted(os.walk(root, followlinks=True)):
        inside = Path(folder).relative_to(root)
        top = inside.parts[0] if inside.parts else ""
        within = inside if top in STAGES else ("kits" if top in KITS else "partway") / inside
        files |= {(within / name).as_posix(): Path(folder, name) for name in sorted(names) if name.endswith(".py")}
    return files


@functools.cache
def tree_of(source: Path) -> ast.Module:
    """The syntax tree of a file, which must not be modified."""
    return ast.parse(source.read_text(encoding="utf-8"))


def functions_of(source: Path) -> frozenset[str]:
    """The names of the functions of a file, such as its tests."""
    return frozenset(node.name for node in tree_of(source).body if isinstance(node, ast.FunctionDef))


def layer_of(module: str) -> str:
    """The stage of a module, "partway" or "kits"."""
    return module.partition("/")[0]


def package_of(module: str) -> str:
    """The package of a module, by its name in Python."""
    first, *inner = module.split("/")[:-1]
    return ".".join(["partway", *([first] if first in STAGES else []), *inner])

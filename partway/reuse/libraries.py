"""The Python modules and types of libraries, inside which nothing is watched.

The state that a library's code reads is its own, and contains no numbers of a model.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from typing import Any

_TOOLS = (
    "IPython", "PIL", "_pytest", "accelerate", "deepspeed", "einops", "einx", "filelock", "frozendict",
    "huggingface_hub", "hypothesis", "jinja2", "lightning", "loguru", "matplotlib", "mlflow", "mpmath", "networkx",
    "numpy", "packaging", "pandas", "partway", "pluggy", "psutil", "pydantic", "pytest", "pytorch_lightning",
    "requests", "rich", "safetensors", "scipy", "sklearn", "sympy", "tokenizers", "torch", "tqdm", "typer",
    "typing_extensions", "wandb", "yaml",
)  # fmt: skip
_STANDARD = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib"))
OF_PYTHON = 1 << 9  # the flag of a type that a class statement or `type()` made (Py_TPFLAGS_HEAPTYPE)


def is_closed(module: Any) -> bool:
    """Whether the Python module of this name is a library's. (The `__module__` of C code may not be a string.)"""
    return not isinstance(module, str) or _is_library(module.partition(".")[0])


@functools.lru_cache(maxsize=4096)
def _is_library(name: str) -> bool:
    """Whether this is the name of a library. (A user's module `code` is not that of the standard library.)"""
    if name not in sys.stdlib_module_names:
        return name in _TOOLS
    place = getattr(sys.modules.get(name), "__file__", None)  # None: it is part of Python itself
    return place is None or (place.startswith(_STANDARD) and "-packages" not in place)


def is_installed(path: str) -> bool:
    """Whether the file at `path` belongs to an installed package, or to Python."""
    return "-packages" in path or path.startswith(_STANDARD)


def is_closed_type(kind: type) -> bool:
    """Whether a type is a library's. Its module must have it as well: a type that `type()` or make_dataclass creates
    may name the module that created it."""
    if not is_closed(kind.__module__):
        return False
    place = sys.modules.get(kind.__module__)
    made_here = place is None or hasattr(place, kind.__qualname__.partition(".")[0])
    return made_here or not kind.__flags__ & OF_PYTHON

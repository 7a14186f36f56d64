"""Names that a package exports without importing their modules: each module is imported at the first use of a name."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def at_first_use(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`, which imports the module of a name and makes the name an attribute.

    names   for each module of the package, by its name there, the names that it defines, with blanks between them;
            "" if the module itself is exported

    No name is that of a module, whose import would put the module in the name's place. Raises AttributeError for other
    names.
    """
    homes = {name: module for module, listed in names.items() for name in listed.split() or [module]}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package])
        module = importlib.import_module(f"{package}.{homes[name]}")
        if homes[name] == name:
            return module
        value = getattr(module, name)
        setattr(sys.modules[package], name, value)
        return value

    return get

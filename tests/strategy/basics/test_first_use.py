"""A name of a package is imported when it is first used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType

import pytest
from sources import package_of, sources, tree_of

from partway.strategy.basics import at_first_use

PACKAGES = {
    package_of(module).replace("partway.kits", "partway"): source
    for module, source in sources().items()
    if module.endswith("__init__.py") and "__all__ = [" in source.read_text(encoding="utf-8")
}


def typed(source: Path, package: str) -> dict[str, str]:
    """The module of each name that a package imports for type checkers alone."""
    blocks = [
        node for node in tree_of(source).body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return {
        alias.name: resolve_name("." * node.level + (node.module or ""), package)
        for block in blocks
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_exports_what_type_checkers_find_there(package: str) -> None:
    exporting = importlib.import_module(package)
    assert all(hasattr(exporting, name) for name in exporting.__all__)
    names, folder = typed(PACKAGES[package], package), PACKAGES[package].parent
    assert names.keys() <= set(exporting.__all__)
    for name, module in names.items():
        found = getattr(exporting, name)
        assert found is getattr(importlib.import_module(module), name)
        is_module = (folder / f"{name}.py").exists() or (folder / name).is_dir()
        assert isinstance(found, ModuleType) == is_module  # a module of its name would take its place when imported


def test_only_the_module_of_the_name_is_imported(tmp_path: Path) -> None:
    package = tmp_path / "made"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from partway.strategy.basics import at_first_use\n"
        "__getattr__ = at_first_use(__name__, {'one': 'A B', 'two': 'C', 'three': ''})\n",
        encoding="utf-8",
    )
    for module, text in {"one": "A, B = 1, 2", "two": "C = 3", "three": ""}.items():
        (package / f"{module}.py").write_text(text, encoding="utf-8")
    program = """
import sys, made
def loaded(): return sorted(name for name in sys.modules if name.startswith("made."))
assert loaded() == []
assert made.B == 2 and loaded() == ["made.one"] and "B" in vars(made)
assert made.three.__name__ == "made.three" and loaded() == ["made.one", "made.three"]
from made import C
assert C == 3
"""
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
    done = subprocess.run([sys.executable, "-c", path + program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_unknown_name_is_an_error_of_the_package() -> None:
    get = at_first_use("partway.strategy", {"mesh": "Mesh"})
    with pytest.raises(AttributeError, match=r"module 'partway\.strategy' has no attribute 'Mush'") as error:
        get("Mush")
    assert (error.value.name, error.value.obj) == ("Mush", sys.modules["partway.strategy"])

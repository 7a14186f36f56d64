"""Layers go one way: strategy < propagation < fusion < runtime < the modules of partway/.

Import-linter checks the four stages (pyproject.toml). Here the sources themselves are read, so that a new
module of partway/ is covered without being listed anywhere.
"""

from __future__ import annotations

import ast
import functools
import importlib
from collections.abc import Iterator
from importlib.util import resolve_name
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from sources import KITS, STAGES, layer_of, package_of, sources, tree_of
from torch.distributed.tensor import DTensor

from partway.strategy.basics.kits import Door


def modules(layer: str) -> dict[str, Path]:
    """The files of a stage, or of partway/."""
    return {name: path for name, path in sources().items() if layer_of(name) == layer}


def imports(source: Path, package: str) -> Iterator[tuple[int, str, bool]]:
    """Each import as (line, the dotted name it binds, whether it was written as a relative one)."""
    for node in ast.walk(tree_of(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, False) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = resolve_name("." * node.level + (node.module or ""), package)
            yield from ((node.lineno, f"{module}.{alias.name}", node.level > 0) for alias in node.names)


def breaks(layer: str) -> list[str]:
    """Every import of `layer` that the layers forbid, with its place."""
    allowed = STAGES[: STAGES.index(layer) + 1]
    found = []
    for module, source in modules(layer).items():
        for line, name, relative in imports(source, package_of(module)):
            first, _, rest = name.partition(".")
            place = f"{module}:{line} imports {name}"
            if first in STAGES:
                found.append(f"{place}: a second copy of the same classes")
            elif first == "partway" and rest.partition(".")[0] not in allowed:
                found.append(f"{place}: {layer} may import {', '.join(allowed)}")
            elif first == "partway" and not relative:
                found.append(f"{place}: write a relative import inside a stage")
    return found


def private_torch_names(source: Path, package: str) -> set[str]:
    """The names under torch with a private part that a file imports or reaches through `torch.`

    Operators are no internals, whatever their names: `torch.ops.aten._unsafe_view` stands in captured graphs.
    """
    tree = tree_of(source)
    names = {name for _, name, _ in imports(source, package)}
    names |= {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    names = {name for name in names if name.startswith("torch.") and not name.startswith("torch.ops.")}
    return {name for name in names if any(map(is_private, name.split(".")))}


# Private names that belong to Python's own library.
OF_PYTHON = {"_exit", "_getframe", "_current_frames", "_fields", "_replace", "_asdict"}


def bound_names(layer_sources: list[Path]) -> set[str]:
    """The private names that these files define: functions, classes, variables, attributes that are set."""
    names: set[str] = set()
    for source in layer_sources:
        for node in ast.walk(tree_of(source)):
            match node:
                case (
                    ast.FunctionDef(name=name)
                    | ast.AsyncFunctionDef(name=name)
                    | ast.ClassDef(name=name)
                    | ast.arg(arg=name)
                    | ast.alias(name=name)
                ):
                    names.add(name)
                case ast.Attribute(attr=name, ctx=ast.Store()) | ast.Name(id=name, ctx=ast.Store()):
                    names.add(name)
    return {name for name in names if is_private(name)}


@functools.cache
def ours() -> set[str]:
    """The private names that the package defines."""
    return bound_names(list(sources().values()))


@functools.cache
def of_torch() -> set[str]:
    """The private names of the objects of PyTorch that the package handles."""
    objects = (
        torch.Tensor, torch.nn.Module(), torch.nn.Parameter, torch.nn.BatchNorm1d(1), DTensor, torch.UntypedStorage,
        torch.ops.aten.add.Tensor, torch.ops.aten.add, torch.fx.Node, torch.fx.Graph, torch.fx.GraphModule,
        torch.export.ExportedProgram, torch.distributions.Distribution, torch.optim.Optimizer, torch.Generator,
        dist.ProcessGroup, torch.autograd.graph.Node, torch.cuda,
    )  # fmt: skip
    return {name for thing in objects for name in dir(thing) if is_private(name)}


def private_attributes(source: Path, own: set[str], torchs: set[str]) -> set[str]:
    """The private attributes that a file reads or writes of objects that are not ours, by name or by a text.

    An attribute of `self` or `cls` is ours where some class sets it; one of an operator (`torch.ops.aten._softmax`) is
    no internal.
    """
    uses = set()
    for node in ast.walk(tree_of(source)):
        match node:
            case ast.Attribute(value=value, attr=name) if is_private(name):
                base = ast.unparse(value)
                operator = base.startswith(("torch.ops", "aten", "_aten", "higher", "prims"))
                defined = name in own and (base.split(".")[-1] in ("self", "cls") or name not in torchs)
                if not operator and not defined and name not in OF_PYTHON:
                    uses.add(f"{base}.{name}")
            case ast.Constant(value=str(text)) if is_private(text) and text in torchs and text not in own:
                uses.add(repr(text))
    return uses


def is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


@pytest.mark.parametrize("layer", STAGES)
def test_a_stage_imports_only_the_stages_before_it(layer: str) -> None:
    assert not breaks(layer), "\n".join(breaks(layer))


def test_the_core_imports_no_kit() -> None:
    """Only the public names and the command line lead to kits; what else the core asks of one is a Door."""
    found = [
        f"{module}:{line} imports {name}"
        for module, source in modules("partway").items()
        if module not in ("partway/__init__.py", "partway/commands/cli.py")
        for line, name, _ in imports(source, package_of(module))
        if name.split(".")[:1] == ["partway"] and name.split(".")[1:2] in [[kit] for kit in KITS]
    ]
    assert found == []


def exported(module: str) -> frozenset[str]:
    """The names that a kit may import from a module: those that a package exports, and all of `partway.versions`, which
    is in no room."""
    found = importlib.import_module(module)
    names = vars(found) if module == "partway.versions" else getattr(found, "__all__", ()) * hasattr(found, "__path__")
    return frozenset(name for name in names if not is_private(name))


def deep_imports(source: Path, package: str) -> list[str]:
    """The imports of a kit's file that no package exports. A kit may import its own modules, and of another kit only
    from its `__init__`."""
    found = []
    for line, name, _ in imports(source, package):
        module, _, last = name.rpartition(".")
        first, *rest = module.split(".")
        own = rest[:1] == package.split(".")[1:2]
        of_another = rest[:1] != rest and rest[:1] in [[kit] for kit in KITS]
        if first == "partway" and not own and (of_another or last not in exported(module)):
            found.append(f"{line} imports {last} from {module}, which does not export it to kits")
    return found


def test_kits_import_only_what_packages_export() -> None:
    found = [
        f"{module}:{deep}"
        for module, source in modules("kits").items()
        for deep in deep_imports(source, package_of(module).replace("partway.kits", "partway"))
    ]
    assert found == []


@pytest.mark.parametrize(
    ("written", "module"),
    [
        ("from partway.strategy.errors import StrategyError", "partway.strategy.errors"),
        ("def f():\n    from partway.runtime.launching.process import get_rank", "partway.runtime.launching.process"),
        ("from partway.runtime.launching import door", "partway.runtime.launching"),
        ("import partway.strategy.mesh", "partway.strategy"),
        ("from partway.checkpoints.contents import packed", "partway.checkpoints.contents"),
        ("from partway.ps.service import cluster", "partway.ps.service"),
        ("from partway.strategy import StrategyError", None),
        ("from partway import Plan, data", None),
        ("import partway as pw", None),
        ("from partway.checkpoints import packed", None),
        ("from partway.show.page.markup import safe", None),
        ("from torch import nn", None),
    ],
)
def test_a_deep_import_of_a_kit_is_found(tmp_path: Path, written: str, module: str | None) -> None:
    (tmp_path / "made.py").write_text(written, encoding="utf-8")
    found = deep_imports(tmp_path / "made.py", "partway.show")
    assert len(found) == (module is not None)
    assert module is None or f" from {module}, " in found[0]


@pytest.mark.parametrize("door", Door)
def test_each_door_leads_to_a_function_of_a_kit(door: Door) -> None:
    module, _, name = door.value.partition(":")
    assert module.split(".")[0] in KITS
    assert callable(getattr(importlib.import_module(f"partway.{module}"), name))


@pytest.mark.parametrize("layer", [*STAGES, "partway", "kits"])
def test_only_the_torch_internals_of_a_layer_use_private_names_of_torch(layer: str) -> None:
    uses = {
        name: private_torch_names(source, package_of(name)) | private_attributes(source, ours(), of_torch())
        for name, source in modules(layer).items()
    }
    uses = {name: private for name, private in uses.items() if private and not name.endswith("torch_internals.py")}
    assert not uses, f"use torch's internals by the torch_internals of a stage: {uses}"


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        ("from ..propagation import rules", "strategy may import strategy"),
        ("from .. import shard", "strategy may import strategy"),
        ("from ..context import get", "strategy may import strategy"),
        ("import partway", "strategy may import strategy"),
        ("from partway.strategy import mesh", "relative import"),
        ("import fusion", "second copy"),
        ("from strategy.mesh import Mesh", "second copy"),
        ("from .mesh import Mesh", None),
        ("from torch import nn", None),
    ],
)
def test_a_forbidden_import_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, written: str, complaint: str | None
) -> None:
    (tmp_path / "made.py").write_text(written, encoding="utf-8")
    monkeypatch.setitem(globals(), "sources", lambda: {"strategy/made.py": tmp_path / "made.py"})
    found = breaks("strategy")
    assert len(found) == (complaint is not None)
    assert complaint is None or complaint in found[0]


@pytest.mark.parametrize(
    ("written", "private"),
    [
        ("from torch._subclasses import FakeTensorMode", {"torch._subclasses.FakeTensorMode"}),
        ("import torch.fx._symbolic_trace", {"torch.fx._symbolic_trace"}),
        ("from torch import _guards", {"torch._guards"}),
        ("torch._C._set_x", {"torch._C", "torch._C._set_x"}),
        ("from torch.fx import Graph; torch.__version__; x._torch; torch.ops.aten._unsafe_view", set()),
    ],
)
def test_a_use_of_torch_internals_is_found(tmp_path: Path, written: str, private: set[str]) -> None:
    (tmp_path / "made.py").write_text(written, encoding="utf-8")
    assert private_torch_names(tmp_path / "made.py", "partway.strategy") == private


@pytest.mark.parametrize(
    ("written", "private"),
    [
        ("x._version", {"x._version"}),
        ("getattr(x, '_spec')", {"'_spec'"}),
        ("module._parameters['weight'] = x", {"module._parameters"}),
        ("class A:\n    def __init__(self): self._parameters = 1\n    def f(self): return self._parameters", set()),
        ("torch.ops.aten._softmax.default; aten._to_copy.default; sys._getframe(); x.__dict__", set()),
        ("x._never_heard_of", {"x._never_heard_of"}),
    ],
)
def test_a_private_attribute_is_found(tmp_path: Path, written: str, private: set[str]) -> None:
    (tmp_path / "made.py").write_text(written, encoding="utf-8")
    source = tmp_path / "made.py"
    assert private_attributes(source, bound_names([source]), of_torch()) == private

"""What was planned and compiled, on disk, by content.

An entry's name is a digest of all that a plan follows from: the captured graph, what was asked, the options, the
devices' profile, and the text of Partway and the version of PyTorch. A second start of a script captures its model,
finds the entry, and plans nothing. Nothing is ever wrong for being old; to make room, delete the folder.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import fx

import partway
from partway import fusion, propagation, runtime, strategy
from partway.propagation.graph import Graph, Port, describe, module_path, source_line
from partway.propagation.stored import dump, load

T = TypeVar("T")


def cache_folder(path: str) -> Path | None:
    """Where entries are: `path`, or if it is empty PARTWAY_CACHE_DIR, or `partway` in the user's folder of caches. With
    PARTWAY_CACHE=0 in the environment None: no cache."""
    if os.environ.get("PARTWAY_CACHE") == "0":
        return None
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(path or os.environ.get("PARTWAY_CACHE_DIR") or os.path.join(home, "partway"))


class Entry:
    """What is kept of one planned call, made of `graph`; without a `folder` nothing is."""

    def __init__(self, graph: Graph, folder: Path | None, *content: object) -> None:
        self._graph, self._folder = graph, folder
        if folder is not None:
            text = "\n".join([_software(), *_text(graph), *map(repr, content)])
            self._digest = hashlib.sha256(text.encode()).hexdigest()
            self._derivable = not any(map(_is_foreign, graph.nodes))

    def fetch(self, name: str, make: Callable[[], T], *, derived: bool = False) -> T:
        """What `make` gives, from disk if it was made before for the same content. `derived`: derivatives are in it,
        which nothing in the content says of an operator of the user's own."""
        if self._folder is None or (derived and not self._derivable):
            return make()
        path = self._folder / self._digest[:2] / f"{self._digest[2:]}.{name}"
        try:
            found: T = load(path.read_bytes(), self._graph)
        except OSError:  # most likely there is none
            pass
        except Exception as error:  # whatever a damaged file makes of pickle
            warnings.warn(f"{path} cannot be read ({error!r}), and is made anew", stacklevel=2)
        else:
            return found
        made = make()
        try:
            _write(path, dump(made, self._graph))
        except OSError as error:
            warnings.warn(
                f"a plan cannot be kept in {self._folder} ({error}); set compile_cache_path to a folder that can be "
                "written to, or enable_compile_cache=False",
                stacklevel=2,
            )
        except Exception as error:  # whatever pickle makes of a constant that has no bytes
            warnings.warn(f"a plan has no form on disk ({error!r}), and every start makes it anew", stacklevel=2)
        return made


def _write(path: Path, data: bytes) -> None:
    """All or nothing: other processes may read and write the same entry."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(data)
    os.replace(file.name, path)


@functools.cache
def _software() -> str:
    """The version of PyTorch, and a digest of Partway's text."""
    digest = hashlib.sha256()
    for module in (partway, strategy, propagation, fusion, runtime):  # an editable install has them in several folders
        for path in sorted(Path(str(module.__file__)).parent.glob("**/*")):
            if path.suffix in (".py", ".json"):
                digest.update(path.read_bytes())
    return f"torch {torch.__version__}, partway {digest.hexdigest()}"


def _text(graph: Graph) -> list[str]:
    """All that a plan and a program read of a graph."""
    lines = [f"{graph.device} {graph.aliases}"]
    lines += [
        f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {_described(node.meta.get('val'))} "
        f"{module_path(node)} {source_line(node)}"
        for node in graph.module.graph.nodes
    ]
    return lines + [_port(port) for port in (*graph.inputs, *graph.outputs)]


def _is_foreign(node: fx.Node) -> bool:
    """Whether a node calls an operator that is neither PyTorch's nor ours."""
    return getattr(node.target, "namespace", "aten") not in ("aten", "partway", "prims")


def _port(port: Port) -> str:
    return f"{port.node.name} {port.role} {port.name} {port.argument} {port.requires_grad} {describe(port.node)}"


def _described(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {value.device}"
    return str([_described(v) for v in value]) if isinstance(value, list | tuple) else type(value).__name__

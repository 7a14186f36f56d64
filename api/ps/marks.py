"""`set_param_ps`: which parameters the servers hold."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from partway.runtime.replaced import current
from partway.strategy import RuntimeStateError
from partway.strategy.errors import shown

Embedding = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True, eq=False)
class Mark:
    """What was said of a parameter. `of`: the embedding whose rows are pulled and pushed, where it is a table; weak, since
    a module would otherwise be kept by what is said of its weight."""

    name: str
    of: weakref.ReferenceType[Embedding] | None = None

    @property
    def table(self) -> Embedding | None:
        """The embedding, where it is a table."""
        return self.of() if self.of is not None else None


_marks: Any = WeakTensorKeyDictionary()  # of parameters
_closed: list[bool] = []  # an optimizer's parameters are with the servers


def set_param_ps(what: nn.Module | nn.Parameter, *, rows: bool | None = None) -> None:
    """Have the servers hold the parameters of a module, or one parameter. Before `pw.ps.optimizer`.

    rows    the tables of embeddings (nn.Embedding, nn.EmbeddingBag) below `what`: True: the workers pull the rows that a
            batch looks up, and push theirs; False: whole, like other parameters; None: by rows where the module is
            `sparse=True`

    What is not named stays on the workers: each takes the optimizer's step itself, with the mean of all gradients.
    Raises RuntimeStateError for what is named twice, or too late, and for rows of what is no embedding.
    """
    if not isinstance(what, nn.Module | nn.Parameter):
        raise RuntimeStateError(f"set_param_ps: {shown(what)} is neither an nn.Module nor an nn.Parameter")
    if _closed:
        raise RuntimeStateError(
            "set_param_ps comes before pw.ps.optimizer(...): the servers have their parameters already"
        )
    found = {"parameter": (what, None)} if isinstance(what, nn.Parameter) else _of_module(what, rows)
    if rows and not any(table for _, table in found.values()):
        raise RuntimeStateError("set_param_ps: rows=True is for nn.Embedding and nn.EmbeddingBag, and there is none")
    twice = [name for name, (parameter, _) in found.items() if current(parameter) in _marks]
    if twice:
        raise RuntimeStateError(f"set_param_ps was called for {', '.join(twice[:5])} already; name each once")
    for name, (parameter, table) in found.items():
        _marks[current(parameter)] = Mark(name, weakref.ref(table) if table is not None else None)


def _of_module(module: nn.Module, rows: bool | None) -> dict[str, tuple[nn.Parameter, Embedding | None]]:
    found: dict[str, tuple[nn.Parameter, Embedding | None]] = {}
    seen = set[int]()
    for path, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) not in seen:
                seen.add(id(parameter))
                full = f"{path}.{name}" if path else name
                found[full] = parameter, _table(full, child, rows)
    if not found:
        raise RuntimeStateError(f"set_param_ps: {type(module).__name__} has no parameters")
    return found


def _table(name: str, module: nn.Module, rows: bool | None) -> Embedding | None:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not (module.sparse if rows is None else rows):
        return None
    if module.max_norm is not None:
        raise RuntimeStateError(
            f"set_param_ps: {name} has max_norm, by which each look-up changes the rows; leave it out, or give rows=False"
        )
    return module


def mark_of(parameter: Any) -> Mark | None:
    """What was said of a parameter."""
    found: Mark | None = _marks.get(parameter)
    return found


def marked() -> list[tuple[nn.Parameter, Mark]]:
    """All that were named."""
    return list(_marks.items())


def close() -> None:
    """An optimizer's parameters are with the servers from now on."""
    _closed[:] = [True]


def forget() -> None:
    """The job has ended: nothing is named any more."""
    _closed.clear()
    _marks.clear()

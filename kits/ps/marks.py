"""`set_param_ps`: choose the parameters that the servers hold."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn

from partway.runtime.tensors import current
from partway.strategy import RuntimeStateError, shown

Embedding = nn.Embedding | nn.EmbeddingBag


@dataclass(frozen=True, eq=False)
class Mark:
    """The choice for a parameter, which is identified by its module, since that may replace it, and is not kept alive
    by the mark; a parameter that was named by itself is identified as the object.

    by_rows    it is the table of an embedding, whose rows are pulled and pushed
    """

    name: str
    by_rows: bool
    module: weakref.ReferenceType[nn.Module] | None = None
    attribute: str = ""
    alone: nn.Parameter | None = None

    @property
    def parameter(self) -> Any:
        """The current parameter; None if there is none any more."""
        if self.alone is not None:
            return current(self.alone)
        module = self.module() if self.module is not None else None
        return getattr(module, self.attribute, None)

    @property
    def table(self) -> Embedding | None:
        """The embedding, if it is a table."""
        found = self.module() if self.by_rows and self.module is not None else None
        return found if isinstance(found, nn.Embedding | nn.EmbeddingBag) else None


_marks: list[Mark] = []
_closed: list[bool] = []  # not empty: an optimizer's parameters are with the servers


def set_param_ps(what: nn.Module | nn.Parameter, *, rows: bool | None = None) -> None:
    """Make the servers hold the parameters of a module, or one parameter. Call it before `pw.ps.optimizer`.

    rows    the tables of embeddings (nn.Embedding, nn.EmbeddingBag) below `what`: True: the workers pull the rows that
            a batch looks up, and push theirs; False: whole, like other parameters; None: by rows if the module is
            `sparse=True`

    Other parameters stay on the workers: each takes the optimizer's step itself, with the mean of all gradients. Raises
    RuntimeStateError for a parameter named twice, or too late, and for rows of a parameter that is not an embedding.
    """
    if not isinstance(what, nn.Module | nn.Parameter):
        raise RuntimeStateError(f"set_param_ps: {shown(what)} is neither an nn.Module nor an nn.Parameter")
    if _closed:
        raise RuntimeStateError(
            "set_param_ps comes before pw.ps.optimizer(...): the servers have their parameters already"
        )
    found = [Mark("parameter", False, alone=what)] if isinstance(what, nn.Parameter) else _of_module(what, rows)
    if rows and not any(mark.by_rows for mark in found):
        raise RuntimeStateError("set_param_ps: rows=True is for nn.Embedding and nn.EmbeddingBag, and there is none")
    known = {id(mark.parameter) for mark in _marks}
    if twice := [mark.name for mark in found if id(mark.parameter) in known]:
        raise RuntimeStateError(f"set_param_ps was called for {', '.join(twice[:5])} already; name each once")
    _marks.extend(found)


def _of_module(module: nn.Module, rows: bool | None) -> list[Mark]:
    found: dict[int, Mark] = {}
    for path, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            full = f"{path}.{name}" if path else name
            mark = Mark(full, _is_table(full, child, rows), weakref.ref(child), name)
            found.setdefault(id(parameter), mark)
    if not found:
        raise RuntimeStateError(f"set_param_ps: {type(module).__name__} has no parameters")
    return list(found.values())


def _is_table(name: str, module: nn.Module, rows: bool | None) -> bool:
    if not isinstance(module, nn.Embedding | nn.EmbeddingBag) or not (module.sparse if rows is None else rows):
        return False
    if module.max_norm is not None:
        raise RuntimeStateError(
            f"set_param_ps: {name} has max_norm, by which each look-up changes its rows; leave it out, or give "
            "rows=False"
        )
    return True


def marked() -> list[tuple[Any, Mark]]:
    """All parameters that were named, in their current form."""
    return [(parameter, mark) for mark in _marks if (parameter := mark.parameter) is not None]


def close() -> None:
    """Allow no more marks: an optimizer's parameters are with the servers."""
    _closed[:] = [True]


def forget() -> None:
    """Clear the marks at the end of the job."""
    _closed.clear()
    _marks.clear()

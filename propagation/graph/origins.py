"""The modules and lines of the caller's code that the operators of a step come from, for people.

A piece is traced once for all equal pieces. So a node traced from another, forward or backward, keeps the position of
that node in the piece in the "custom" part of its meta data; each copy of it takes its origin from the node at this
position in the piece that the copy is for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx
from torch.fx.traceback import annotate, preserve_node_meta

_LINE = "stack_trace"
_AGAIN = "partway_again"
_OPERATOR = "partway_operator"
_KEYS = ("nn_module_stack", _LINE, _AGAIN, _OPERATOR)
_POSITION = "partway_position"


def inherit(new: fx.Node, old: fx.Node) -> None:
    """Give `new` the origin of `old`, unless it has its own."""
    new.meta |= {key: old.meta[key] for key in _KEYS if key in old.meta and key not in new.meta}


def inherit_line(new: fx.Node, old: fx.Node) -> None:
    """Give `new` the line of `old`; its module is set later."""
    if _LINE in old.meta:
        new.meta[_LINE] = old.meta[_LINE]


def computed_again(node: fx.Node) -> bool | None:
    """Whether the backward computes `node` again where it reads it; None if nothing was noted."""
    noted: bool | None = node.meta.get(_AGAIN)
    return noted


def compute_again(node: fx.Node, again: bool) -> None:
    """Note whether the backward computes `node` again where it reads it."""
    node.meta[_AGAIN] = again


def operator_of(node: fx.Node) -> str:
    """The operator of the captured call that `node`, or its gradient, is a part of; "" if nothing was noted."""
    noted: str = node.meta.get(_OPERATOR, "")
    return noted


def note_operator(node: fx.Node, name: str) -> None:
    """Note the operator of the captured call that `node` is a part of."""
    node.meta.setdefault(_OPERATOR, name)


def number(nodes: Sequence[fx.Node]) -> None:
    """Note in each node its position."""
    for i, node in enumerate(nodes):
        node.meta["custom"] = {**node.meta.get("custom", {}), _POSITION: i}


def position(node: fx.Node) -> int | None:
    """The position of the node that `node` was traced from; None if there is none."""
    found: int | None = node.meta.get("custom", {}).get(_POSITION)
    return found


class _Gradients:
    """Tracks the node whose gradient is being computed, by hooks that autograd calls before it computes one."""

    def __init__(self) -> None:
        self._now = ExitStack()

    def announce(self, results: Any, of: int) -> None:
        """Have autograd announce the gradient of `results`, those of the node at position `of`."""
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor) and result.grad_fn is not None:
                result.grad_fn.register_prehook(lambda _: self._enter(of))

    def _enter(self, of: int) -> None:
        self.end()
        self._now.enter_context(annotate({_POSITION: of}))

    def end(self) -> None:
        """Leave the current node: what follows belongs to none."""
        self._now.close()


class _Runner(fx.Interpreter):
    """Runs a module and gives the nodes traced from each node the "custom" meta data of that node."""

    def __init__(self, module: fx.GraphModule, gradients: _Gradients) -> None:
        super().__init__(module)
        self._gradients = gradients

    def run_node(self, n: fx.Node) -> Any:
        arguments = self.fetch_args_kwargs_from_env(n)
        with annotate(n.meta.get("custom", {})):
            results = getattr(self, n.op)(n.target, *arguments)
        found = position(n)
        if found is not None:
            self._gradients.announce(results, found)
        return results


@contextmanager
def tracing() -> Iterator[Callable[..., tuple[Any, ...]]]:
    """Give `run(module, *inputs)`. The nodes traced in the block from a node that it runs, and from that node's
    gradient, keep its "custom" meta data."""
    gradients = _Gradients()
    with preserve_node_meta():
        try:
            yield lambda module, *inputs: tuple(_Runner(module, gradients).run(*inputs))
        finally:
            gradients.end()

"""Where in the caller's code the operators of a step come from, for people: their modules and lines.

A piece is traced once for all pieces like it. So what is traced of a node, forward or backward, keeps the node's
position in the piece, in the "custom" part of its meta data; and a copy of it has the origin of the node that is at
this position in the piece that the copy is for.
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
    """`new` comes from where `old` does, unless it has an origin of its own."""
    new.meta |= {key: old.meta[key] for key in _KEYS if key in old.meta and key not in new.meta}


def inherit_line(new: fx.Node, old: fx.Node) -> None:
    """`new` comes from the line that `old` does; its module is still to be said."""
    if _LINE in old.meta:
        new.meta[_LINE] = old.meta[_LINE]


def computed_again(node: fx.Node) -> bool | None:
    """Whether the backward computes `node` again where it reads it; None: nothing was noted."""
    noted: bool | None = node.meta.get(_AGAIN)
    return noted


def compute_again(node: fx.Node, again: bool) -> None:
    """Note whether the backward computes `node` again where it reads it."""
    node.meta[_AGAIN] = again


def operator_of(node: fx.Node) -> str:
    """The operator of the captured call that `node` is a part of, or of its gradient; empty where nothing was noted."""
    noted: str = node.meta.get(_OPERATOR, "")
    return noted


def note_operator(node: fx.Node, name: str) -> None:
    """Note of which operator of the captured call `node` is a part."""
    node.meta.setdefault(_OPERATOR, name)


def number(nodes: Sequence[fx.Node]) -> None:
    """Note in each node its position."""
    for i, node in enumerate(nodes):
        node.meta["custom"] = {**node.meta.get("custom", {}), _POSITION: i}


def position(node: fx.Node) -> int | None:
    """The position of the node that `node` was traced of; None where it was traced of none."""
    found: int | None = node.meta.get("custom", {}).get(_POSITION)
    return found


class _Gradients:
    """Whose gradient is computed: autograd tells before it computes one."""

    def __init__(self) -> None:
        self._now = ExitStack()

    def announce(self, results: Any, of: int) -> None:
        """Have autograd tell when it comes to the gradient of `results`, of the node at position `of`."""
        for result in results if isinstance(results, tuple | list) else (results,):
            if isinstance(result, torch.Tensor) and result.grad_fn is not None:
                result.grad_fn.register_prehook(lambda _: self._enter(of))

    def _enter(self, of: int) -> None:
        self.end()
        self._now.enter_context(annotate({_POSITION: of}))

    def end(self) -> None:
        """What follows is of no node."""
        self._now.close()


class _Runner(fx.Interpreter):
    """Runs a module so that what is traced of a node keeps what the node notes."""

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
    """Gives `run(module, *inputs)`. What is traced in the block of a node that it runs, and of the gradient, keeps what
    the node notes."""
    gradients = _Gradients()
    with preserve_node_meta():
        try:
            yield lambda module, *inputs: tuple(_Runner(module, gradients).run(*inputs))
        finally:
            gradients.end()

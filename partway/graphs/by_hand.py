"""Saves the graphs of collectives that ranks call by hand: of a call what it computes on this rank, and its gradient.

A call is traced on tensors without memory, so that nothing is sent for it. It is written before it runs: of a run that
hangs the last file is what it hangs in, if no call of its kind has been written before.
"""

from __future__ import annotations

import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from partway.graphs import stages
from partway.graphs.asked import Asked, Level
from partway.graphs.files import warn
from partway.graphs.folders import by_hand_folder, file_name
from partway.graphs.operators import Shown, bytes_of, type_of
from partway.graphs.saving import own_rank
from partway.graphs.stages import Stage
from partway.graphs.text import Page
from partway.ops.where import here
from partway.propagation.torch_internals import (
    FakeTensorMode,
    TreeSpec,
    make_fx,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)
from partway.runtime.doing import named, place_of
from partway.strategy import PartwayError
from partway.strategy.files import write_whole
from partway.strategy.place import Group
from partway.strategy.units import human

_MOST = 256  # calls of one process that are written: shapes may differ in every step
_written: dict[object, None] = {}  # by process and folder
_lock = threading.Lock()  # backwards of several devices run on threads


def save(wanted: Asked, call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Write the graphs of `call`, unless one of its kind has been written: with the same arguments, on tensors of the
    same shapes, at the same line. A fault in writing is a warning."""
    rank, called = own_rank(), call.__qualname__.partition(".")[0]
    if rank and not wanted.every_rank:
        return
    leaves, structure = tree_flatten((tuple(args), kwargs))
    where = place_of(sys._getframe()).removeprefix(", ")
    kinds = [(x.dtype, x.shape, _differentiated(x)) if isinstance(x, Tensor) else str(x) for x in leaves]
    key = os.getpid(), wanted.folder, called, where, str(kinds)
    with _lock:
        count = len(_written)
        if key in _written or count >= _MOST:
            return
        _written[key] = None
    try:
        folder = by_hand_folder(wanted.folder, rank)
        name, who = f"{count:03d}_{file_name(called)}", _who(called, _group_of(call, args, kwargs))
        for stage, graph in _graphs(call, leaves, structure):
            page = _page(graph, where, who)
            stem = f"{name}{stage.name}"
            write_whole(folder / f"{stem}.txt", "\n".join([f"# {stem}: {stage.shows}", "", *page.lines()]) + "\n")
            if wanted.level >= Level.PICTURES:
                write_whole(folder / f"{stem}.dot", page.picture())
    except PartwayError:  # which the call raises, too
        with _lock:
            _written.pop(key, None)
    except Exception as error:
        warn(wanted.folder, error)


def _differentiated(x: Tensor) -> bool:
    return x.requires_grad and torch.is_grad_enabled()


def _graphs(call: Callable[..., Any], leaves: Sequence[Any], structure: TreeSpec) -> Iterator[tuple[Stage, fx.Graph]]:
    """The graph of a call and, where its operands need gradients, that of these."""
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

    def run(*operands: Tensor) -> list[Tensor]:
        given = list(leaves)
        for i, operand in zip(places, operands, strict=True):
            given[i] = operand
        args, kwargs = tree_unflatten(given, structure)
        return tree_leaves(call(*args, **kwargs))

    with FakeTensorMode():
        fakes = [torch.empty(leaves[i].shape, dtype=leaves[i].dtype, device=leaves[i].device) for i in places]
    for i, fake in zip(places, fakes, strict=True):
        fake.requires_grad_(_differentiated(leaves[i]))
    module = make_fx(run)(*fakes)
    yield stages.BY_HAND, module.graph
    wanted = [i for i, fake in enumerate(fakes) if fake.requires_grad]
    if wanted:
        with torch.no_grad():
            grads = [torch.empty_like(node.meta["val"]) for node in tree_leaves(_returned(module.graph))]

        def differentiate(operands: list[Tensor], grads: list[Tensor]) -> list[Tensor]:
            results = run(*operands)
            return list(torch.autograd.grad(results, [operands[i] for i in wanted], grads))

        backward = make_fx(differentiate)(fakes, grads).graph
        backward.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        yield stages.BY_HAND_GRADIENT, backward


def _returned(graph: fx.Graph) -> Any:
    return next(node for node in graph.nodes if node.op == "output").args[0]


def _group_of(call: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Group:
    """The group that a call is given, or of the object that is called."""
    given = inspect.signature(call).bind(*args, **kwargs).arguments
    group: Group = given["self"].group if "self" in given else given.get("group")
    return group


def _who(called: str, group: Group) -> str:
    place = here(called)
    return f"{named(place.ranks(group))}, over {','.join(place.axes(group))}"


def _page(graph: fx.Graph, where: str, who: str) -> Page:
    """A graph, with the line of the user's code that calls it and the ranks that do."""
    shown = Shown(graph)

    def lines() -> Iterator[str]:
        yield f"# {where or 'called'}"
        yield f"# of {who}"
        for node in graph.nodes:
            if node.op == "placeholder":
                value = node.meta.get("val")
                yield f"input {node.name}: {type_of(value)}    # {human(bytes_of(value))}"
        yield ""
        yield from shown.lines()
        yield ""
        yield f"return {', '.join(map(shown.written, tree_leaves(_returned(graph))))}"

    return Page(lines, {"": shown})

"""The operands and results of each call that its backward reads, and the bytes that autograd saves beside them.

`relu(x @ w) + b` has three calls, whose backwards read:

    x @ w    both operands: each is a factor of the other's gradient
    relu     its result, which is positive where the gradient passes
    + b      nothing

PyTorch reports this: the call runs once on fake tensors, and autograd lists the tensors that it saves. Equal calls run
once. If a call cannot run on fake tensors (an operator of another library without a fake form), its backward may read
everything.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ..graph.graph import Graph
from ..graph.nodes import Value, is_pointwise, is_view, operands, results_of, source_of, tensor_of, values_of
from ..ops.collectives import constrain
from ..torch_internals import FakeTensorMode, TorchDispatchMode, tree_leaves


@dataclass(frozen=True, slots=True)
class Needs:
    """What the backward of one call reads: some of its operands and results, by number, and `beside` bytes that its
    forward makes for it (statistics, masks, saved tensors of inner operators), on one device. Elementwise results of
    constants do not count: the backward computes them again (program/recompute.py)."""

    operands: frozenset[int] = frozenset()
    results: frozenset[int] = frozenset()
    beside: int = 0


NOTHING = Needs()


def needs_of(graph: Graph, flows: frozenset[Value]) -> dict[fx.Node, Needs]:
    """The needs of each call of `graph`; `flows`: the values that a gradient reaches."""
    known: dict[object, Needs] = {}
    found: dict[fx.Node, Needs] = {}
    constants = _constants(graph)
    with torch.inference_mode(False), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        for node in graph.nodes:
            if node.target is operator.getitem:
                continue
            found[node] = NOTHING
            if node.target is constrain or is_view(node) or flows.isdisjoint(values_of(node)):
                continue
            sources = [source_of(operand) for operand in operands(node)]
            wants = tuple(source in flows for source in sources)
            constant = tuple(source.node in constants for source in sources)
            key = _call(node, sources), wants, constant
            if key not in known:
                known[key] = _asked(node, sources, wants, constant)
            found[node] = known[key]
    return found


def _constants(graph: Graph) -> set[fx.Node]:
    """The nodes that depend on no input of the call."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "placeholder" and found.issuperset(node.all_input_nodes):
            found.add(node)
    return found


def _call(node: fx.Node, sources: Iterable[Value]) -> object:
    """A key for the needs of a call, together with the gradients that are wanted."""
    tensors = tuple(_likeness(tensor_of(source)) for source in sources)
    plain = map_arg((node.args, node.kwargs), lambda _: "tensor")
    return node.target, repr(plain), tensors


def _likeness(tensor: Any) -> object:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tuple(tensor.shape), tensor.stride() if tensor.layout is torch.strided else None, tensor.dtype, tensor.device


def _asked(node: fx.Node, sources: list[Value], wants: tuple[bool, ...], constant: tuple[bool, ...]) -> Needs:
    """The tensors that PyTorch saves of the call `node` for the gradients of the operands in `wants`; `constant`:
    whether each operand is constant."""
    everything = Needs(frozenset(range(len(sources))), frozenset(range(len(values_of(node)))))
    given = [_fresh(tensor_of(source), wanted) for source, wanted in zip(sources, wants, strict=True)]
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[id(tensor.untyped_storage())] = tensor
        return tensor

    left = iter(given)
    args, kwargs = map_arg((node.args, node.kwargs), lambda _: next(left))
    try:
        target: Callable[..., Any] = node.target  # type: ignore[assignment]
        made = _OfConstants(itertools.compress(given, constant))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), made:
            produced = target(*args, **kwargs)
    except Exception:  # an operator that cannot run on fake tensors may raise anything
        return everything
    results = produced if isinstance(produced, tuple | list) else [produced]
    if len(results) != len(results_of(node)):
        return everything
    places: dict[int, tuple[set[int], int]] = {}
    read_operands, read_results = set[int](), set[int]()
    for read, tensors in ((read_results, results), (read_operands, given)):  # a result may be an operand's memory
        for i, tensor in enumerate(tensors):
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                places[id(tensor.untyped_storage())] = read, i
    beside = 0
    for key, tensor in saved.items():
        if key in places:
            read, i = places[key]
            read.add(i)
        elif key not in made:
            beside += tensor.untyped_storage().nbytes()
    return Needs(frozenset(read_operands), frozenset(read_results), beside)


class _OfConstants(TorchDispatchMode):
    """Tracks tensors computed from `constants` alone while active; contains the storages of the elementwise ones."""

    def __init__(self, constants: Iterable[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._constant = {id(storage): storage for storage in _storages(list(constants))}  # keeps their ids in use
        self._elementwise: set[int] = set()

    def __contains__(self, storage: int) -> bool:
        return storage in self._elementwise

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        random = torch.Tag.nondeterministic_seeded in func.tags
        if not random and all(id(storage) in self._constant for storage in _storages((args, kwargs))):
            new = {id(storage): storage for storage in _storages(result)}
            if is_pointwise(func):
                self._elementwise |= new.keys() - self._constant.keys()
            self._constant |= new
        return result


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    """The storages of all tensors in a tree."""
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)


def _fresh(tensor: Any, wanted: bool) -> Any:
    """A new tensor like `tensor`, which requires a gradient if `wanted`."""
    if not isinstance(tensor, torch.Tensor):
        return tensor
    if tensor.layout is not torch.strided:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    new = torch.empty_strided(tuple(tensor.shape), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return new.requires_grad_(wanted)

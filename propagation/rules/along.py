"""Rules of operators that work along some dims, which stay whole, while the others are independent: sorting, cumulative
sums, quantiles, diagonals, and what is written into a slice."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import fx

from ..graph.nodes import argument, argument_names, operands, results_of, shape
from .convolution import replaced
from .rule import Dims, Emitter, Rule, letters_of, sizes_of, without

Function = Callable[[fx.Node], Rule | None]


def along(*names: str, linear: bool = False, fill: float = 0.0) -> Function:
    """Operators that work along the dims of their first operand which the arguments `names` say, all without names, or
    where an argument says None.

    Another operand or result either has all dims, or those that are independent and behind them dims of its own.
    `fill`: a number of which the operator makes one, with a finite derivative.
    """

    def rule(node: fx.Node) -> Rule | None:
        inputs, results = [shape(o) for o in operands(node)], [tuple(t.shape) for t in results_of(node)]
        size = inputs[0]
        whole = whole_dims(node, names, len(size))
        letters = without(letters_of(size), whole)
        rest = tuple(parts for d, parts in enumerate(letters) if d not in whole)

        def dims(extents: tuple[int, ...]) -> Dims:
            return letters if len(extents) == len(size) else (*rest, *((),) * (len(extents) - len(rest)))

        every = frozenset(range(len(inputs)))
        return Rule(
            tuple(map(dims, inputs)), tuple(map(dims, results)), sizes_of(letters, size),
            linear=(every,) if linear else (), fill=None if linear else fill,
        )  # fmt: skip

    return rule


def whole_dims(node: fx.Node, names: Collection[str], count: int) -> set[int]:
    """The dims that the arguments called `names` say, of so many."""
    given = [argument(node, name) for name in names]
    if not names or any(dims is None for dims in given):
        return set(range(count))
    flat = [dim for dims in given for dim in (dims if isinstance(dims, list | tuple) else [dims])]
    return {dim % max(count, 1) for dim in flat}


def diag_embed(node: fx.Node) -> Rule:
    """The last dim becomes the diagonal of two new ones."""
    (x,) = operands(node)
    size, out = shape(x), shape(node)
    letters = without(letters_of(size), {len(size) - 1})
    new, rest = whole_dims(node, ("dim1", "dim2"), len(out)), list(letters[:-1])
    dims = tuple(() if d in new else rest.pop(0) for d in range(len(out)))
    return Rule((letters,), (dims,), sizes_of(letters, size), linear=(frozenset({0}),))


def complex_parts(node: fx.Node) -> Rule:
    """view_as_complex and view_as_real: real and imaginary parts are in a last dim, which stays whole."""
    (x,) = operands(node)
    size, out = shape(x), shape(node)
    letters = letters_of(size[: min(len(size), len(out))])
    linear = (frozenset({0}),)
    dims = [(*letters, *((),) * (len(extents) - len(letters))) for extents in (size, out)]
    return Rule((dims[0],), (dims[1],), sizes_of(letters, size[: len(letters)]), linear=linear)


def quantile(node: fx.Node) -> Rule:
    """The quantiles of one dim, or of all elements; several of them are in a first dim."""
    x, *given = operands(node)
    size, dim = shape(x), argument(node, "dim")
    whole = whole_dims(node, ("dim",), len(size))
    letters = without(letters_of(size), whole)
    several = len(shape(given[0])) if given else 0
    kept = letters if argument(node, "keepdim") else tuple(p for d, p in enumerate(letters) if d not in whole)
    out = ((),) * several + (kept if dim is not None or argument(node, "keepdim") else ())
    rest = tuple(((),) * len(shape(o)) for o in given)
    return Rule((letters, *rest), (out,), sizes_of(letters, size), fill=0.0)


def searchsorted(node: fx.Node) -> Rule | None:
    """searchsorted and bucketize: places in a sorted last dim, which stays whole, of values that are independent. Of
    one series for all of them, or of one for each leading index."""
    x = argument(node, "self")
    if not isinstance(x, fx.Node):
        return None
    letters = letters_of(shape(x))

    def dims(operand: fx.Node) -> Dims:
        count = len(shape(operand))
        return ((),) if count == 1 else (*letters[: count - 1], ())

    given = {name: argument(node, name) for name in argument_names(node)}
    found = tuple(letters if name == "self" else dims(o) for name, o in given.items() if isinstance(o, fx.Node))
    # behind the end of a short slice a value may be any number
    return Rule(found, (letters,), sizes_of(letters, shape(x)), fill=0.0)


def members(node: fx.Node) -> Rule:
    """isin: each element by itself, with all test elements."""
    elements, *tests = operands(node)
    letters = letters_of(shape(elements))
    rest = tuple(((),) * len(shape(o)) for o in tests)
    return Rule((letters, *rest), (letters,), sizes_of(letters, shape(elements)))


def histogram(node: fx.Node) -> Rule:
    """histc: how many elements are in each bin. Between given ends every part has addends; else all are looked at."""
    (x,) = operands(node)
    every = () if argument(node, "min") < argument(node, "max") else range(len(shape(x)))
    letters = without(letters_of(shape(x)), every)
    sizes = sizes_of(letters, shape(x))
    return Rule((letters,), (((),),), sizes, reduce=frozenset(sizes), even=frozenset(sizes))


def native_norm(node: fx.Node) -> Rule:
    """native_layer_norm and native_group_norm: the dims that are no statistics' are independent."""
    x, *vectors = operands(node)
    size = shape(x)
    layer = "normalized_shape" in argument_names(node)
    first = len(size) - len(argument(node, "normalized_shape")) if layer else 1
    letters = without(letters_of(size), range(first, len(size)))
    affine = tuple(((),) * len(shape(o)) for o in vectors)
    statistics = tuple((*letters[:first], *((),) * (len(t.shape) - first)) for t in results_of(node)[1:])
    local = None if layer else _local_group_norm
    return Rule((letters, *affine), (letters, *statistics), sizes_of(letters, size), local=local)


def _local_group_norm(emit: Emitter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
    args, kwargs = replaced(emit.node, args, kwargs, N=emit.shapes.operands[0][0])
    return emit.call(emit.node.target, *args, **kwargs)


def rows_of_classes(node: fx.Node) -> Rule:
    """multilabel_margin_loss of each sample: its classes belong together."""
    size = shape(operands(node)[0])
    letters = without(letters_of(size), {len(size) - 1})
    return Rule((letters, letters), (letters[:-1],), sizes_of(letters, size), fill=0.0)

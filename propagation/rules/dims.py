"""Helpers that the rules of many families share: factors of dims, and rules by what happens to each dim.

whole              no dim can be split
along              the dims that arguments name stay whole, the others are independent
last_dims_whole    the last dims stay whole, the others are independent
over_dims          some dims depend on windows (`windows.py`), the others are independent
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from torch import fx

from ..graph.nodes import argument, operands, results_of, shape
from .row import RowFunction
from .rule import Dims, Localize, Rule
from .windows import Halo, Reach

# -- Factors of one tensor


def letters_of(size: Iterable[int]) -> Dims:
    """One factor for each dim, none for a dim of size 1."""
    return tuple((f"f{d}",) if extent != 1 else () for d, extent in enumerate(size))


def sizes_of(dims: Dims, size: tuple[int, ...]) -> dict[str, int]:
    """The size of each factor of a tensor's dims."""
    return {parts[0]: extent for parts, extent in zip(dims, size, strict=True) if len(parts) == 1}


def split_evenly(norm: fx.Node, sizes: Mapping[str, int]) -> frozenset[str]:
    """The factors of a norm that must be split evenly: all of them, unless its eps keeps variances away from zero. The
    variance of padding is zero, and its gradients would not be finite."""
    eps = argument(norm, "eps")
    return frozenset() if eps is None or eps > 0 else frozenset(sizes)


def without(dims: Dims, whole: Iterable[int]) -> Dims:
    """The factors of a tensor's dims, with none for the dims in `whole`."""
    dropped = set(whole)
    return tuple(() if d in dropped else parts for d, parts in enumerate(dims))


def broadcast(letters: Dims, size: tuple[int, ...]) -> Dims:
    """The factors of a tensor of `size` that broadcasts to one whose dims have the factors `letters`."""
    aligned = letters[len(letters) - len(size) :]
    return tuple(parts if extent != 1 else () for parts, extent in zip(aligned, size, strict=True))


def unsplit(node: fx.Node) -> Dims:
    """The factors of the tensor of `node` if no dim can be split."""
    return ((),) * len(shape(node))


# -- Rules


def whole(node: fx.Node) -> Rule:
    """No dim can be split."""
    return Rule(tuple(map(unsplit, operands(node))), tuple(((),) * t.ndim for t in results_of(node)), {})


def whole_dims(node: fx.Node, names: Collection[str], count: int) -> set[int]:
    """Those of `count` dims that the arguments `names` list: all without names, or if an argument is None."""
    values = [argument(node, name) for name in names]
    if not names or any(dims is None for dims in values):
        return set(range(count))
    flat = [dim for dims in values for dim in (dims if isinstance(dims, list | tuple) else [dims])]
    return {dim % max(count, 1) for dim in flat}


def along(*names: str, linear: bool = False, fill: float = 0.0) -> RowFunction:
    """Operators that work along the dims of their first operand that the arguments `names` name (see `whole_dims`).

    Another operand or result has either all dims, or the independent ones followed by its own.
    `fill`: an input for which the operator and its derivative are finite.
    """

    def rule(node: fx.Node) -> Rule | None:
        inputs, results = [shape(o) for o in operands(node)], [tuple(t.shape) for t in results_of(node)]
        size = inputs[0]
        worked_along = whole_dims(node, names, len(size))
        letters = without(letters_of(size), worked_along)
        rest = tuple(parts for d, parts in enumerate(letters) if d not in worked_along)

        def dims(extents: tuple[int, ...]) -> Dims:
            return letters if len(extents) == len(size) else (*rest, *((),) * (len(extents) - len(rest)))

        every = frozenset(range(len(inputs)))
        return Rule(
            tuple(map(dims, inputs)),
            tuple(map(dims, results)),
            sizes_of(letters, size),
            linear=(every,) if linear else (),
            fill=None if linear else fill,
        )

    return rule


def last_dims_whole(count: int) -> RowFunction:
    """Operators whose last `count` dims stay whole; the others are independent, and the same in all operands."""

    def rule(node: fx.Node) -> Rule | None:
        size = shape(operands(node)[0])
        letters = without(letters_of(size), range(len(size) - count, len(size)))
        sizes = sizes_of(letters, size)
        several = len(operands(node)) > 1  # the second holds indices, but padding holds any numbers
        even = frozenset(sizes) if several else frozenset[str]()
        return Rule((letters,) * len(operands(node)), (letters,) * len(results_of(node)), sizes, even=even)

    return rule


def over_dims(
    node: fx.Node,
    reaches: Mapping[int, Reach],
    fill: float | str = 0.0,
    linear: bool = True,
    local: Localize | None = None,
    whole: Collection[int] = (),
) -> Rule:
    """The rule of an operator whose results have the dims of its operand. Slices of the dims in `reaches` depend on a
    window, the other dims are independent. Dims in `whole`, and those of size 1 before or after, stay whole."""
    before, results = shape(operands(node)[0]), results_of(node)
    after = tuple(results[0].shape)
    sides = enumerate(zip(before, after, strict=False))
    dims: Dims = tuple((f"f{d}",) if 1 not in both and d not in whole else () for d, both in sides)
    sizes = {parts[0]: extent for parts, extent in zip(dims, after, strict=False) if parts}
    halos = tuple(Halo(0, part, reach, fill) for d, reach in reaches.items() for part in dims[d])
    out = (*dims, *((),) * (len(after) - len(before)))
    sets = (frozenset({0}),) if linear else ()
    return Rule((dims,), (out,) * len(results), sizes, linear=sets, windows=halos, local=local)

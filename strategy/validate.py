"""The validator: every problem with the strategies of a user, in one error.

Each check yields `Problem`s; `check_strategies` and the two checks of `dataset_strategy` collect them all and
raise once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from .basics.suggest import did_you_mean, either
from .errors import Problem, StrategyError, raise_problems, shown
from .layout import Layout
from .mesh import Mesh
from .notation import (
    Annotation,
    Form,
    Name,
    axes_of,
    can_write,
    coarsest_mesh,
    counted,
    counts_of,
    form_of,
    forms_of_entry,
    layouts_of_counts,
    placements_of,
    read,
    read_placement,
)
from .placement import PARTIAL, REPLICATE, Broadcast, Partial, Shard

DATASET_MODES = ("semi_auto_parallel", "auto_parallel")
DATASET_STRATEGIES = ("data_parallel", "full_batch")


def parse(strategy: object, mesh: Mesh, shape: Sequence[int]) -> Annotation:
    """The annotation that `strategy` stands for on a tensor of `shape`. Raises StrategyError with every problem."""
    (annotation,) = check_strategies([("the strategy", shape, strategy)], mesh)
    if annotation is None:
        raise StrategyError("the strategy is None; write one entry per dim, such as (None, None) for a whole tensor")
    return annotation


def check_strategies(
    named: Iterable[tuple[str, Sequence[int], object]],
    mesh: Mesh,
    *,
    fully_use_devices: bool = False,
    chunked: Collection[str] = (),
    varying: Collection[str] = (),
    addends: Collection[str] = (),
) -> tuple[Annotation | None, ...]:
    """The annotation on `mesh` for each (name, shape, strategy) of `named`; None for a strategy of None.

    A name identifies the tensor in messages: "input 'x'", "output 0". With `fully_use_devices`, split counts that leave
    some but not all devices without a part of their own are wrong too. Slices may be short or empty. Tensors named in
    `chunked` may become DTensors, and must be cut as these are. Tensors named in `varying` have other sizes in other
    calls: a dim of one element, as in a last batch, stays whole, whatever its strategy says. Tensors named in `addends`
    may have Partial() placements.

    Raises one StrategyError with the problems of all strategies.
    """
    annotations: list[Annotation | None] = []
    problems: list[Problem] = []
    for where, shape, strategy in named:
        size = tuple(shape)
        own_problems, varies = list[Problem](), where in varying
        if strategy is not None:
            summed = _summed(strategy, mesh, len(size)) if where in addends else strategy
            own_problems += _problems(where, size, summed, mesh, fully_use_devices, varies)
        valid = strategy is not None and not own_problems
        annotation = read(strategy, mesh, len(shape), where in chunked, varies) if valid else None
        if annotation is not None and not annotation.layouts(size):
            own_problems = list(_chunk_problems(where, size, annotation))
        annotations.append(annotation)
        problems += own_problems
    raise_problems(f"{counted(len(problems), 'problem')} with strategies on the mesh {mesh}:", problems)
    return tuple(annotations)


def _summed(strategy: Any, mesh: Mesh, ndim: int) -> Any:
    """`strategy` with Replicate for each Partial(sum): the layout after the addends are added up."""
    if form_of(strategy) is not Form.PLACEMENTS or (isinstance(strategy, Layout) and strategy.mesh != mesh):
        return strategy
    read = [read_placement("", placement, ndim) for placement in placements_of(strategy)]
    pairs = zip(placements_of(strategy), read, strict=True)
    return tuple(REPLICATE if one == PARTIAL else placement for placement, one in pairs)


def _chunk_problems(where: str, shape: tuple[int, ...], annotation: Annotation) -> Iterator[Problem]:
    """The dims that several axes cut into slices other than a DTensor's."""
    layout = annotation.cuts(len(shape))[0]
    for dim, size in enumerate(shape):
        cut = layout.cut(dim, size)
        if not cut.chunked:
            axes = layout.axes_of(dim)
            cutters, outer = _axes_text(axes, layout.mesh), math.prod(cut.axes[:-1])
            what = f"dim {dim} has size {size}, which {cutters} cut into slices other than a DTensor's"
            yield Problem(where, what, f"split it over one axis, or pad the dim to {-(-size // outer) * outer}")


def form_problems(where: str, strategy: object) -> Iterator[Problem]:
    """Why `strategy` is in none of the notations, whatever the mesh and the tensor."""
    if strategy is not None and form_of(strategy) is None:
        yield from _type_problems(where, strategy)


def is_one_strategy(value: object) -> bool:
    """Whether `value`, written in place of a tuple of strategies, is by its entries the strategy of one tensor."""
    if isinstance(value, Layout):
        return True
    return form_of(value) is not None and any(isinstance(entry, int | str) for entry in value)  # type: ignore[attr-defined]


def _problems(
    where: str, shape: tuple[int, ...], strategy: Any, mesh: Mesh, fully_use_devices: bool, varies: bool
) -> Iterator[Problem]:
    form = form_of(strategy)
    if form is None:
        yield from _type_problems(where, strategy)
        return
    if form is not Form.PLACEMENTS and len(strategy) != len(shape):
        yield _rank_problem(where, strategy, shape, 1 if form is Form.INTS else None)
    yield from _CHECKS[form](where, shape, strategy, mesh, varies)
    if form is Form.INTS and fully_use_devices:
        yield from _idle_problems(where, counts_of(strategy), mesh.device_num)


def _type_problems(where: str, strategy: Any) -> Iterator[Problem]:
    """Why `strategy` is in no notation."""
    if isinstance(strategy, list):
        yield Problem(
            where, f"the strategy {shown(strategy)} is a list", f"write the tuple {shown(_as_tuple(strategy))}"
        )
        return
    if not isinstance(strategy, tuple):
        one_entry = forms_of_entry(strategy)
        what = f"the strategy {shown(strategy)} is {_a(strategy)}, not a tuple"
        fix = f"write ({shown(strategy)},)" if one_entry else "write one entry per dim, such as ('dp', None) or (2, 4)"
        yield Problem(where, what, fix)
        return
    wrong = [(i, entry) for i, entry in enumerate(strategy) if not forms_of_entry(entry)]
    for i, entry in wrong:
        fix = "write an axis name, a tuple of names, an int, None, or placements, one per mesh axis"
        if isinstance(entry, tuple) and form_of(entry):
            fix = f"write one strategy for this tensor, such as {shown(entry)}"
        yield Problem(where, f"entry {i} is {shown(entry)}, {_a(entry)}", fix)
    forms = sorted({form.value for entry in strategy if entry is not None for form in forms_of_entry(entry)})
    if len(forms) > 1:
        fix = "write axis names or split counts, one per dim, or placements, one per mesh axis"
        yield Problem(where, f"{shown(strategy)} mixes {' and '.join(forms)}", fix)
    elif not wrong:
        yield Problem(where, f"{shown(strategy)} has None among placements", "write Replicate() instead")


def _name_problems(
    where: str, shape: tuple[int, ...], entries: tuple[Name, ...], mesh: Mesh, varies: bool
) -> Iterator[Problem]:
    owner: dict[str, int] = {}
    for dim, entry in enumerate(entries):
        axes = axes_of(entry)
        wrong = []
        for axis in axes:
            if axis not in mesh.axes:
                what = f"dim {dim} names the axis {axis!r}, which the mesh ({mesh}) lacks"
                wrong.append(Problem(where, what, _rename(axis, mesh)))
            elif axis in owner:
                twice = f"dim {dim} twice" if owner[axis] == dim else f"both dim {owner[axis]} and dim {dim}"
                wrong.append(Problem(where, f"axis {axis!r} splits {twice}", "use each axis at most once per tensor"))
            owner[axis] = dim
        yield from wrong
        if wrong:
            continue
        ordered = tuple(sorted(axes, key=mesh.index))
        if axes != ordered:
            what = f"dim {dim} names the axes {shown(axes)}, which are not in the order of the mesh ({mesh})"
            yield Problem(where, what, f"write {shown(ordered)}, major first")
        if dim < len(shape):
            yield from _division_problems(where, dim, shape[dim], ordered, mesh, varies)


def _count_problems(
    where: str, shape: tuple[int, ...], strategy: tuple[int | None, ...], mesh: Mesh, varies: bool
) -> Iterator[Problem]:
    counts = counts_of(strategy)
    low = [(dim, count) for dim, count in enumerate(counts) if count < 1]
    for dim, count in low:
        sized = f" has size {shape[dim]} and" if dim < len(shape) else " has"
        yield Problem(where, f"dim {dim}{sized} the split count {count}", "write an int of 1 or more")
    for dim, (size, count) in enumerate(zip(shape, counts, strict=False)):
        if size == 0 and count > 1:
            yield _empty_problem(where, dim)
        elif count >= 1 and not _can_cut(size, count, varies):
            divider = f"its split count {count}{_only_axes(mesh, count)} does"
            yield _division_problem(where, dim, size, count, divider, mesh)
    if low:
        return
    device_problems = list(_device_problems(where, counts, mesh.device_num))
    yield from device_problems
    if not device_problems and not can_write(mesh.sizes, counts):
        other = coarsest_mesh(mesh.device_num, [counts])
        what = f"no combination of axes of the mesh ({mesh}) gives the split counts {shown(strategy)}"
        yield Problem(where, what, f"use products of axis sizes, or another mesh, such as {shown(other)}")


def _placement_problems(
    where: str, shape: tuple[int, ...], strategy: Layout | Sequence[Any], mesh: Mesh, varies: bool
) -> Iterator[Problem]:
    if isinstance(strategy, Layout) and strategy.mesh != mesh:
        yield Problem(where, f"the layout {strategy} is on the mesh ({strategy.mesh}), not ({mesh})", "use one mesh")
        return
    placements = placements_of(strategy)
    if len(placements) != len(mesh.axes):
        axes_text = counted(len(mesh.axes), "axis", "axes")
        what = f"it has {counted(len(placements), 'placement')} for the {axes_text} of the mesh ({mesh})"
        yield Problem(where, what, "write one placement per mesh axis")
        return
    splitters: dict[int, tuple[str, ...]] = {}
    for axis, written in zip(mesh.axes, placements, strict=True):
        placement = read_placement(f"{where}, axis {axis!r}", written, len(shape))
        match placement:
            case Problem():
                yield placement
            case Shard(dim):
                splitters[dim] = (*splitters.get(dim, ()), axis)
            case Partial():
                what = "Partial is a state inside a program, not one of an input, a parameter or an output"
                yield Problem(f"{where}, axis {axis!r}", what, "write Shard(dim) or Replicate()")
            case Broadcast():
                what = "Broadcast says how a value is used, which Partway works out by itself"
                yield Problem(f"{where}, axis {axis!r}", what, "write Replicate()")
    for dim, axes in sorted(splitters.items()):
        yield from _division_problems(where, dim, shape[dim], axes, mesh, varies)


_CHECKS: dict[Form, Callable[[str, tuple[int, ...], Any, Mesh, bool], Iterator[Problem]]] = {
    Form.NAMES: _name_problems,
    Form.INTS: _count_problems,
    Form.PLACEMENTS: _placement_problems,
}


def _can_cut(size: int, parts: int, varies: bool) -> bool:
    """Whether a dim of `size` can be cut into `parts` parts, some of them short or empty, or may stay whole."""
    return size % parts == 0 or size > 1 or varies


def _division_problems(
    where: str, dim: int, size: int, axes: tuple[str, ...], mesh: Mesh, varies: bool
) -> Iterator[Problem]:
    if size == 0 and axes:
        yield _empty_problem(where, dim)
    parts = math.prod(mesh.size(axis) for axis in axes)
    if not _can_cut(size, parts, varies):
        divider = f"{_axes_text(axes, mesh)} {'does' if len(axes) == 1 else 'do'}"
        yield _division_problem(where, dim, size, parts, divider, mesh)


def _empty_problem(where: str, dim: int) -> Problem:
    return Problem(where, f"dim {dim} has size 0, so there is nothing to split", "leave the dim whole")


def _division_problem(where: str, dim: int, size: int, parts: int, divider: str, mesh: Mesh) -> Problem:
    splits = sorted((n for n in _possible_splits(mesh) if size % n == 0), reverse=True)
    padded = math.ceil(size / parts) * parts
    what = f"dim {dim} has size {size}, which {divider} not divide"
    return Problem(where, what, f"use a split of {either(splits)}, or pad the dim to {padded}")


def _rank_problem(where: str, entries: Sequence[object], shape: Sequence[int], whole: int | None) -> Problem:
    entries_text = counted(len(entries), "entry", "entries")
    what = f"{shown(entries)} has {entries_text} for a tensor of {counted(len(shape), 'dim')} {list(shape)}"
    return Problem(where, what, f"write one entry per dim, such as {(whole,) * len(shape)!r}" if shape else "write ()")


def _device_problems(where: str, counts: tuple[int, ...], device_num: int) -> Iterator[Problem]:
    total = math.prod(counts)
    if total > device_num:
        what = f"{shown(counts)} takes {shown(total)} devices, but there are {device_num}"
        yield Problem(where, what, f"use split counts whose product is at most {device_num}")
    elif device_num % total:
        what = f"{shown(counts)} takes {counted(total, 'device')}, which does not divide the {device_num} available"
        divisors = [n for n in range(device_num, 0, -1) if device_num % n == 0]
        yield Problem(where, what, f"use split counts whose product is {either(divisors)}")


def _idle_problems(where: str, counts: tuple[int, ...], device_num: int) -> Iterator[Problem]:
    total = math.prod(counts)
    if 1 < total < device_num and device_num % total == 0:
        what = f"{shown(counts)} uses {total} of {device_num} devices, while fully_use_devices is True"
        fix = f"use split counts whose product is {device_num} or 1, or set fully_use_devices=False"
        yield Problem(where, what, fix)


def check_dataset_strategy(
    value: object, shapes: Sequence[Sequence[int]], device_num: int, *, mode: str
) -> tuple[tuple[int, ...], ...] | None:
    """The split counts of each dim of each input that the `dataset_strategy` `value` asks for; None for None.

    "full_batch" gives every rank the whole inputs; "data_parallel" splits dim 0 of each input (0-dim inputs stay
    whole) over all devices; a tuple has a tuple of split counts for each input. An input is split in one dim at
    most, and the input of highest rank (the first of them) has the largest count.

    Raises one StrategyError with every problem, among them a `mode` other than semi_auto_parallel or auto_parallel.
    """
    if value is None:
        return None
    counts = _dataset_counts(value, shapes, device_num)
    problems = [*_mode_problems(mode), *_dataset_form_problems(value)]
    if counts is not None:
        problems += _dataset_shape_problems(counts, shapes, device_num)
    raise_problems("dataset_strategy cannot be met:", problems)
    return counts


def _dataset_counts(
    value: object, shapes: Sequence[Sequence[int]], device_num: int
) -> tuple[tuple[int, ...], ...] | None:
    """A well-typed `value` as split counts; None for any other."""
    match value:
        case "full_batch":
            return tuple((1,) * len(shape) for shape in shapes)
        case "data_parallel":
            return tuple((device_num, *[1] * len(shape))[: len(shape)] for shape in shapes)
        case tuple() if all(isinstance(counts, tuple) and all(map(_is_count, counts)) for counts in value):
            return value
    return None


def check_dataset_form(value: object) -> None:
    """Check a `dataset_strategy` as far as possible before the inputs are known. Raises StrategyError."""
    raise_problems("dataset_strategy cannot be met:", _dataset_form_problems(value))


def _mode_problems(mode: str) -> Iterator[Problem]:
    if mode not in DATASET_MODES:
        what = f"the parallel mode is {shown(mode)}, in which inputs are not sliced"
        fix = f"set parallel_mode to {either(map(repr, DATASET_MODES))}, or leave dataset_strategy out"
        yield Problem("dataset_strategy", what, fix)


def _dataset_form_problems(value: object) -> Iterator[Problem]:
    where = "dataset_strategy"
    if isinstance(value, str) and value in DATASET_STRATEGIES:
        return
    if isinstance(value, list):
        yield Problem(where, f"{shown(value)} is a list", f"write the tuple {shown(_as_tuple(value))}")
        return
    if not isinstance(value, tuple):
        what = f"{shown(value)} is unknown" if isinstance(value, str) else f"{shown(value)} is {_a(value)}"
        fix = f"write {either(map(repr, DATASET_STRATEGIES))}, or a tuple with a tuple of split counts for each input"
        yield Problem(where, what, fix)
        return
    if value and all(map(_is_count, value)):
        what = f"{shown(value)} is the strategy of one input"
        yield Problem(where, what, f"write a tuple for each input, as in {(value,)!r}")
        return
    for i, counts in enumerate(value):
        if not isinstance(counts, tuple):
            fix = f"write {_as_tuple(counts)!r}" if isinstance(counts, list) else "write one such as (1, 1, 1, 8)"
            yield Problem(f"{where}, input {i}", f"{shown(counts)} is {_a(counts)}, not a tuple of split counts", fix)
            continue
        for dim, count in enumerate(counts):
            if not _is_count(count):
                what = f"dim {dim} has {shown(count)} as its split count"
                yield Problem(f"{where}, input {i}", what, "write an int of 1 or more")
    if _dataset_counts(value, (), 1) is not None:
        yield from _dataset_limit_problems(value)


def _dataset_limit_problems(value: tuple[tuple[int, ...], ...]) -> Iterator[Problem]:
    """The two limits of MindSpore: one split dim per input, and no input split more than that of highest rank."""
    highest = max(range(len(value)), key=lambda i: len(value[i]), default=0)
    for i, counts in enumerate(value):
        split = [dim for dim, count in enumerate(counts) if count > 1]
        if len(split) > 1:
            what = f"{counts!r} splits {len(split)} dims ({', '.join(map(str, split))})"
            yield Problem(f"dataset_strategy, input {i}", what, "split at most one dim of an input")
        most, parts = math.prod(value[highest]), math.prod(counts)
        if parts > most:
            what = (
                f"{counts!r} splits it {counted(parts, 'way')}, more than input {highest}, the one of highest rank, "
                f"which {value[highest]!r} splits {counted(most, 'way')}"
            )
            fix = f"split input {highest} {counted(parts, 'way')}, or this one at most {counted(most, 'way')}"
            yield Problem(f"dataset_strategy, input {i}", what, fix)


def _dataset_shape_problems(
    counts: tuple[tuple[int, ...], ...], shapes: Sequence[Sequence[int]], device_num: int
) -> Iterator[Problem]:
    if len(counts) != len(shapes):
        what = f"it has {counted(len(counts), 'entry', 'entries')} for {counted(len(shapes), 'input')}"
        yield Problem("dataset_strategy", what, "write one tuple of split counts for each input")
    for i, (splits, shape) in enumerate(zip(counts, shapes, strict=False)):
        where = f"dataset_strategy, input {i}"
        if len(splits) != len(shape):
            yield _rank_problem(where, splits, shape, 1)
        yield from _device_problems(where, splits, device_num)


def _is_count(count: object) -> bool:
    return isinstance(count, int) and not isinstance(count, bool) and count >= 1


def _possible_splits(mesh: Mesh) -> set[int]:
    """The numbers of parts into which the mesh can split one dim."""
    splits = {1}
    for size in mesh.sizes:
        splits |= {n * size for n in splits}
    return splits


def _only_axes(mesh: Mesh, count: int) -> str:
    """The axes for a split into `count` parts, in parentheses, if there is only one choice."""
    ways = layouts_of_counts(mesh, (count,))
    return f" ({_axes_text(ways[0].axes_of(0))})" if count > 1 and len(ways) == 1 else ""


def _axes_text(axes: tuple[str, ...], mesh: Mesh | None = None) -> str:
    """The names of `axes`, with their sizes on `mesh` if it is given."""
    listed = " and ".join(repr(axis) + (f" ({mesh.size(axis)})" if mesh else "") for axis in axes)
    return f"{'axis' if len(axes) == 1 else 'axes'} {listed}"


def _rename(axis: str, mesh: Mesh) -> str:
    if axis == "None":
        return "write None without quotes"
    if mesh == Mesh.of_sizes(mesh.sizes):  # nobody has named the axes
        return f"name the axes of the mesh, such as mesh={{{axis!r}: {mesh.device_num}}}, or write split counts"
    others = f"use {either(map(repr, mesh.axes))}"
    return did_you_mean(axis, mesh.axes, others, most=1, close=0.5)  # half of a two-letter name


def _as_tuple(value: object, depth: int = 8) -> object:
    """`value` with tuples in place of lists, down to the greatest depth of a strategy."""
    return tuple(_as_tuple(v, depth - 1) for v in value) if isinstance(value, list | tuple) and depth else value


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"

"""The part of each input that a process is given, by the dataset_strategy and the in_strategy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from partway.options.parallel import DatasetMode, ParallelContext, ParallelMode
from partway.requests.request import Request, by_argument
from partway.strategy import Mesh, Problem, Replicate, StrategyError, check_dataset_strategy, parse
from partway.strategy.errors import raise_problems
from partway.strategy.notation import Form, counts_of, form_of, placements_of

Input = tuple[str, str, tuple[int, ...]]  # its name, its argument, and its shape
_TITLE = "dataset_strategy cannot be met:"


def given_strategies(
    fn: Any, request: Request, context: ParallelContext, inputs: Sequence[Input], devices: int, problems: list[Problem]
) -> list[Any]:
    """The strategy of each input by the dataset_strategy; None if it has an in_strategy, or no dims."""
    arguments = list(dict.fromkeys(argument for _, argument, _ in inputs))
    stated = by_argument(fn, request.in_strategy, arguments, [])
    own = [stated.get(argument) for _, argument, _ in inputs]
    value = context.dataset_strategy
    if value is DatasetMode.DATA_PARALLEL and any(strategy is not None for strategy in own):
        batch = _batch(strategy for strategy in own if strategy is not None)
        missing = [name for (name, _, shape), strategy in zip(inputs, own, strict=True) if strategy is None and shape]
        if len(batch) > 1 and missing:
            what = f"has no in_strategy, and the first dims of others are split by {', '.join(map(repr, batch))}"
            problems.append(Problem(f"input {missing[0]!r}", what, "say in in_strategy which part a rank is given"))
            return [None] * len(inputs)
        return [
            _along(batch[0] if batch else None, len(shape)) if strategy is None and shape else None
            for (_, _, shape), strategy in zip(inputs, own, strict=True)
        ]
    plain: Any = value.value if isinstance(value, DatasetMode) else value
    shapes = [shape for _, _, shape in inputs]
    try:
        counts = check_dataset_strategy(plain, shapes, devices, mode=ParallelMode.AUTO_PARALLEL.value) or ()
    except StrategyError as error:
        problems += error.problems
        return [None] * len(inputs)
    return [
        None if strategy is not None or not shape else splits
        for (_, _, shape), strategy, splits in zip(inputs, own, counts, strict=True)
    ]


def given_splits(
    fn: Any, request: Request, context: ParallelContext, inputs: Sequence[Input], mesh: Mesh | None, devices: int
) -> list[tuple[int, ...]]:
    """The split counts of the dims of each input, of which each process is given one part. Raises StrategyError."""
    problems: list[Problem] = []
    given = given_strategies(fn, request, context, inputs, devices, problems)
    raise_problems(_TITLE, problems)
    stated = by_argument(fn, request.in_strategy, [argument for _, argument, _ in inputs], [])
    written = None if isinstance(context.dataset_strategy, DatasetMode) else context.dataset_strategy
    splits = []
    for i, ((name, argument, shape), strategy) in enumerate(zip(inputs, given, strict=True)):
        own = stated.get(argument) if strategy is None else strategy
        counts = (1,) * len(shape) if own is None else _splits(f"input {name!r}", own, len(shape), mesh, devices)
        if written is not None and written[i] != counts:
            if any(count > 1 for count in written[i]):
                what = (
                    f"dataset_strategy gives each process one of {written[i]} parts, and in_strategy splits it {counts}"
                )
                fix = f"write {counts} in dataset_strategy, or {(1,) * len(shape)} where each process has all of it"
                problems.append(Problem(f"input {name!r}", what, fix))
            counts = (1,) * len(shape)
        splits.append(counts)
    raise_problems(_TITLE, problems)
    return splits


def _splits(where: str, strategy: Any, ndim: int, mesh: Mesh | None, devices: int) -> tuple[int, ...]:
    """The split counts of a strategy."""
    if form_of(strategy) is Form.INTS:
        return counts_of(strategy)
    if mesh is None:
        fix = "pass mesh= to shard"
        raise_problems(_TITLE, [Problem(where, f"{strategy!r} names axes, and there is no mesh", fix)])
    assert mesh is not None
    shape = (mesh.device_num**2,) * ndim  # sizes that every split divides
    return parse(strategy, mesh, shape).layouts(shape)[0].splits(ndim)


def _batch(strategies: Iterable[Any]) -> list[Any]:
    """The different entries of `strategies` that split the first dims of inputs."""
    found = []
    for strategy in strategies:
        if form_of(strategy) is Form.PLACEMENTS:
            first: Any = tuple(p if getattr(p, "dim", None) == 0 else Replicate() for p in placements_of(strategy))
            first = first if any(not isinstance(p, Replicate) for p in first) else None
        else:
            first = strategy[0] if strategy else None
        if first not in (None, 1, ()) and first not in found:
            found.append(first)
    return found


def _along(first: Any, ndim: int) -> Any:
    """The strategy that splits an input of `ndim` dims along its first dim only, by an entry from `_batch`."""
    if isinstance(first, tuple) and not all(isinstance(axis, str) for axis in first):
        return first
    return (first, *[1 if isinstance(first, int) else None] * (ndim - 1))

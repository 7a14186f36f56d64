"""The strategies of a manual function as layouts: one for each tensor that it takes, and for each that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from partway.propagation.graph.structure import Call, name_of
from partway.requests.request import by_argument, check_out_strategy
from partway.strategy import Layout, Mesh, Problem, check_strategies, raise_problems
from partway.strategy.notation import Form, form_of

InStrategy = tuple[Any, ...] | Mapping[str, Any] | None


def words_of(fn: Callable[..., Any], call: Call) -> list[str]:
    """The names of a call's tensors in messages."""
    return [f"argument {label!r} of {name_of(fn)}" for label in call.names]


def in_layouts(fn: Callable[..., Any], call: Call, in_strategy: InStrategy, mesh: Mesh) -> list[Layout]:
    """The layouts of the tensors of a call. Raises StrategyError for strategies that do not fit."""
    problems: list[Problem] = []
    wanted = by_argument(fn, in_strategy, call.arguments, problems)
    raise_problems(f"the manual function {name_of(fn)} cannot be called so:", problems)
    shapes = [tuple(tensor.shape) for tensor in call.tensors]
    return _layouts(words_of(fn, call), shapes, [wanted.get(name) for name in call.arguments], mesh)


def out_layouts(
    fn: Callable[..., Any], parts: Sequence[tuple[int, ...]], out_strategy: tuple[Any, ...] | None, mesh: Mesh
) -> list[Layout]:
    """The layouts of the results, of which a rank returns `parts`, by shape. Raises StrategyError likewise."""
    problems: list[Problem] = []
    check_out_strategy(out_strategy, len(parts), problems)
    raise_problems(f"the manual function {name_of(fn)} cannot be called so:", problems)
    strategies = [*(out_strategy or ()), *[None] * len(parts)][: len(parts)]
    words = [f"output {i} of {name_of(fn)}" for i in range(len(parts))]
    divided = [_divided(part, strategy, mesh) for part, strategy in zip(parts, strategies, strict=True)]
    return _layouts(words, divided, strategies, mesh, addends=words)


def _divided(part: tuple[int, ...], strategy: Any, mesh: Mesh) -> tuple[int, ...]:
    """A shape with the dims of `part` that every strategy divides; `part` itself if `strategy` has another number of
    entries, and will be refused."""
    dims = form_of(strategy) in (Form.NAMES, Form.INTS)
    return part if dims and len(strategy) != len(part) else tuple(size * mesh.device_num for size in part)


def _layouts(
    words: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    strategies: Sequence[Any],
    mesh: Mesh,
    addends: Sequence[str] = (),
) -> list[Layout]:
    """The one layout of each strategy. Raises one StrategyError with all problems."""
    read = check_strategies(list(zip(words, shapes, strategies, strict=True)), mesh, addends=addends)
    layouts, problems = list[Layout](), list[Problem]()
    for name, shape, annotation in zip(words, shapes, read, strict=True):
        meant = annotation.layouts(shape) if annotation is not None else (Layout.replicated(mesh),)
        layouts.append(meant[0])
        problems += _problems(name, shape, meant, str(annotation))
    raise_problems("a manual function cannot have these strategies:", problems)
    return layouts


def _problems(name: str, shape: tuple[int, ...], meant: Sequence[Layout], text: str) -> Iterator[Problem]:
    """Why an argument or result of a manual function, of `shape`, cannot have a strategy with the layouts `meant`."""
    if len(meant) > 1:
        yield Problem(name, f"{text} may mean {', '.join(map(str, meant))}", "write the names of axes")
    for dim, (size, parts) in enumerate(zip(shape, meant[0].splits(len(shape)), strict=True)):
        if size % parts:
            what = f"dim {dim} of {list(shape)} has {size} elements, which {parts} ranks cannot share evenly"
            yield Problem(name, what, "pad it: every rank of a manual function has a part of one shape")

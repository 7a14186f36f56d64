"""`manual`: islands, which are programs of one rank that a person wrote by hand, with their layouts outside."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from partway.annotations.names import by_argument, check_out_strategy
from partway.checks import check_target
from partway.engine import Engine
from partway.propagation.capture.islands import trace_ranks
from partway.propagation.capture.tracing import capturing
from partway.propagation.graph.structure import flatten_call, name_of
from partway.propagation.islands.island import Crossing, Island
from partway.propagation.ops.islands import island, keep
from partway.request import Request
from partway.strategy import Layout, Mesh, Problem, StrategyError, check_strategies, raise_problems
from partway.strategy.place import island_place


def manual(fn: Any = None, in_strategy: Any = None, out_strategy: Any = None, *, mesh: Any = None) -> Any:
    """Make `fn`, the program of one rank, an operator of whole tensors."""
    request = Request(in_strategy, out_strategy, mesh=mesh)
    if fn is None:
        return functools.partial(_manual, request=request)
    return _manual(fn, request)


def _manual(fn: Any, request: Request) -> ManualFunction:
    check_target("manual", fn)
    return ManualFunction(fn, request)


class ManualFunction:
    """A function of whole tensors, of which every rank runs its program."""

    def __init__(self, fn: Callable[..., Any], request: Request) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.request = fn, request
        self._engine = Engine(self._alone(), Request(mesh=request.mesh))

    def _alone(self) -> Callable[..., Any]:
        @functools.wraps(self.fn)
        def alone(*args: Any, **kwargs: Any) -> Any:
            return self._as_operator(args, kwargs)

        return alone

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if island_place() is not None:
            raise StrategyError(f"{name_of(self.fn)} is called inside of an island")
        if capturing():
            return self._as_operator(args, kwargs)
        return self._engine.call(args, kwargs)

    @property
    def plan(self) -> Any:
        """The plan of the last call."""
        return self._engine.latest().plan

    @property
    def program(self) -> Any:
        """The program of the last call."""
        return self._engine.latest().program

    def _as_operator(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The call as one operator of the graph that is captured."""
        mesh = self._mesh()
        call = flatten_call(self.fn, args, kwargs)
        problems: list[Problem] = []
        by_name = by_argument(self.fn, self.request.in_strategy, call.arguments, problems)
        words = [f"argument {label!r} of {name_of(self.fn)}" for label in call.names]
        shapes = [tuple(t.shape) for t in call.tensors]
        layouts = _layouts(words, shapes, [by_name.get(a) for a in call.arguments], mesh)
        graph = trace_ranks(self.fn, call, layouts, mesh)
        local = [port.node.meta["val"] for port in graph.outputs]
        check_out_strategy(self.request.out_strategy, len(local), problems)
        wanted = [*(self.request.out_strategy or ()), *[None] * len(local)][: len(local)]
        raise_problems(f"the island {name_of(self.fn)} cannot be called so:", problems)
        words_out = [f"output {i} of {name_of(self.fn)}" for i in range(len(local))]
        out = _out_layouts(words_out, [tuple(t.shape) for t in local], wanted, mesh)
        made = Island(
            name_of(self.fn), mesh,
            tuple(Crossing(w, lo, tuple(t.shape), t.dtype, t.device) for w, lo, t in zip(words, layouts, call.tensors, strict=True)),
            tuple(Crossing(w, lo, lo.global_shape(tuple(t.shape)), t.dtype, t.device) for w, lo, t in zip(words_out, out, local, strict=True)),
            graph,
        )
        keep(made.key, made)
        return graph.result.build(list(island(list(call.tensors), made.key)))

    def _mesh(self) -> Mesh:
        mesh = self.request.own_mesh or surrounding.get()
        if mesh is None:
            raise StrategyError("no mesh")
        return mesh


surrounding: ContextVar[Mesh | None] = ContextVar("surrounding", default=None)


def _layouts(words: Sequence[str], shapes: Sequence[tuple[int, ...]], strategies: Sequence[Any], mesh: Mesh) -> list[Layout]:
    read = check_strategies(list(zip(words, shapes, strategies, strict=True)), mesh)
    return [Layout.replicated(mesh) if one is None else one.layouts(shape)[0] for one, shape in zip(read, shapes, strict=True)]


def _out_layouts(words: Sequence[str], local: Sequence[tuple[int, ...]], strategies: Sequence[Any], mesh: Mesh) -> list[Layout]:
    from partway.strategy.notation import read as read_one
    return [Layout.replicated(mesh) if s is None else read_one(s, mesh, len(shape)).cuts(len(shape))[0] for s, shape in zip(strategies, local, strict=True)]

"""`manual`: manual functions, hand-written programs of one rank, as operators on whole tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar, overload

import torch
from torch import Tensor

from partway.annotations.manual_layouts import InStrategy, in_layouts, out_layouts, words_of
from partway.engine.engine import Engine, stands_alone, uncompiled
from partway.options.context import current
from partway.propagation.capture.export.tracing import capturing
from partway.propagation.capture.manual.manual_capture import trace_ranks
from partway.propagation.graph.port import Role
from partway.propagation.graph.structure import check_call, flatten_call, name_of
from partway.propagation.manual.manual import Crossing, TracedManual
from partway.propagation.ops.python.manual import call_manual, keep
from partway.propagation.plan.plan import Plan
from partway.propagation.program.program import Program
from partway.requests.request import Request, check_target
from partway.strategy import (
    Layout,
    Mesh,
    StrategyError,
)
from partway.strategy.place import Place, manual_place, placed, surrounding_mesh

P = ParamSpec("P")
R = TypeVar("R")


@overload
def manual(
    fn: Callable[P, R], in_strategy: InStrategy = None, out_strategy: tuple[Any, ...] | None = None, *, mesh: Any = None
) -> ManualFunction[P, R]: ...
@overload
def manual(
    fn: None = None, in_strategy: InStrategy = None, out_strategy: tuple[Any, ...] | None = None, *, mesh: Any = None
) -> Callable[[Callable[P, R]], ManualFunction[P, R]]: ...
def manual(fn: Any = None, in_strategy: Any = None, out_strategy: Any = None, *, mesh: Any = None) -> Any:
    """Make an operator on whole tensors from `fn`, the program that every rank runs on its parts of them.

        @pw.manual(in_strategy=(("dp", None), (None, "tp"), ("tp", None)), out_strategy=(("dp", None),))
        def mlp(x, up, down):
            return pw.ops.all_reduce(torch.relu(x @ up) @ down, group="tp")

    fn              a function of tensors. It gets parts, and may call the collectives of `partway.ops` with the names
                    of mesh axes, `pw.axis_index` and `pw.axis_size`. All tensors that it uses are arguments
    in_strategy     one entry per argument, or a dict by argument name, as `shard` takes them: axis names, or
                    placements (Shard and Replicate). None: every rank gets the whole tensor. Sizes must divide
    out_strategy    likewise, one entry per tensor that `fn` returns. None: every rank returns the whole result, the
                    same on all. Partial(): ranks return partial sums of it
    mesh            a Mesh, a dict of axis sizes or a DeviceMesh; None: that of the function around it

    It is called by itself, or inside a function or module that `shard` plans: its strategies are fixed, and everything
    around it is planned. It runs on virtual devices or, under a launcher, on their processes.

    Gradients are those of the operator on whole tensors. A tensor that is the same on all ranks along an axis (a whole
    argument, a sum) has one gradient, the same on all ranks; if ranks use it in different ways, their gradients are
    added up. Do not reduce gradients by hand.

    A random mask differs between ranks if the tensors that it is used with do, and is the same if they are.

    Raises StrategyError for strategies that do not fit, CaptureError for a function that has no static graph, or whose
    ranks do not meet in the same collectives. A whole result is trusted to be the same on all ranks; with
    PARTWAY_VERIFY=1 this is checked, and a VerifyError says where ranks differ.
    """
    request = Request(in_strategy, out_strategy, mesh=mesh)
    return functools.partial(_manual, request=request) if fn is None else _manual(fn, request)


def _manual(fn: Any, request: Request) -> ManualFunction[Any, Any]:
    check_target("manual", fn)
    if isinstance(fn, torch.nn.Module):
        raise StrategyError(
            f"manual takes a function of tensors, not the module {type(fn).__name__}, of whose parameters nothing says "
            "what part a rank has; write a function that takes them as arguments"
        )
    return ManualFunction(fn, request)


class ManualFunction(Generic[P, R]):
    """A function on whole tensors that every rank runs on its parts. `plan` and `program` are those of its last call by
    itself."""

    def __init__(self, fn: Callable[P, R], request: Request) -> None:
        functools.update_wrapper(self, fn)
        self.fn, self.request = fn, request

        @functools.wraps(fn)  # the engine reads the names of arguments, and watches the state of `fn`
        def operator(*args: Any, **kwargs: Any) -> Any:
            return self._operator(*args, **kwargs)

        self._engine = Engine(operator, Request(mesh=request.mesh))

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if manual_place() is not None:
            raise StrategyError(
                f"the manual function {name_of(self.fn)} is called inside of a manual function, which is the program "
                f"of one rank; call "
                "the function itself, with the parts that the rank has"
            )
        result: R
        if torch.compiler.is_dynamo_compiling():
            result = uncompiled(self, args, kwargs)
        elif capturing():
            result = self._operator(*args, **kwargs)
        elif stands_alone(current()):
            result = self._alone(args, kwargs)
        else:
            result = self._engine.call(args, kwargs)
        return result

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        raise StrategyError(
            f"{name_of(self.fn)} is a method, and `self` has no strategy; make a manual function of a function of its "
            f"tensors"
        )

    @property
    def plan(self) -> Plan:
        """The plan of the last call by itself."""
        return self._engine.latest().plan

    @property
    def program(self) -> Program:
        """The program of the last call by itself."""
        return self._engine.latest().program

    def _alone(self, args: Any, kwargs: Any) -> R:
        """Run a call in stand_alone mode, on one device: every axis has one rank."""
        mesh = self.request.own_mesh
        place = Place(Mesh(dict.fromkeys(mesh.axes if mesh else ("device",), 1)), 0)
        with placed(place):
            run: Callable[..., R] = self.fn
            return run(*args, **kwargs)

    def _operator(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call as one operator of the graph being captured."""
        check_call(self.fn, args, kwargs)
        mesh, call, its = self._mesh(), flatten_call(self.fn, args, kwargs), name_of(self.fn)
        words = words_of(self.fn, call)
        shapes = [tuple(tensor.shape) for tensor in call.tensors]
        layouts = in_layouts(self.fn, call, self.request.in_strategy, mesh)
        graph = trace_ranks(self.fn, call, layouts, mesh)
        parts = [port.node.meta["val"] for port in graph.outputs]
        given = dict(zip(call.names, map(_crossing, words, layouts, shapes, call.tensors), strict=True))
        whole = Layout.replicated(mesh)
        operands, crossings = list[Tensor](), list[Crossing]()
        for port in graph.inputs:
            constant = graph.constants.get(port.name) if port.role is Role.CONSTANT else None
            operands.append(call.tensors[call.names.index(port.name)] if constant is None else constant)
            crossings.append(
                given[port.name] if constant is None else _crossing(port.name, whole, tuple(constant.shape), constant)
            )
        made = TracedManual(its, mesh, tuple(crossings), self._results(parts, mesh), graph)
        keep(made.key, made)
        return graph.result.build(list(call_manual(operands, made.key)))

    def _results(self, parts: Sequence[Tensor], mesh: Mesh) -> tuple[Crossing, ...]:
        """The results, of which a rank has `parts`."""
        words = [f"output {i} of {name_of(self.fn)}" for i in range(len(parts))]
        layouts = out_layouts(self.fn, [tuple(part.shape) for part in parts], self.request.out_strategy, mesh)
        shapes = [layout.global_shape(tuple(part.shape)) for layout, part in zip(layouts, parts, strict=True)]
        return tuple(map(_crossing, words, layouts, shapes, parts))

    def _mesh(self) -> Mesh:
        own, outer = self.request.own_mesh, surrounding_mesh()
        if own is None and outer is None:
            raise StrategyError(
                f"the manual function {name_of(self.fn)} is on no mesh; pass mesh={{'dp': 2, 'tp': 4}} to manual, or "
                f"to the "
                "shard around it"
            )
        if own is not None and outer is not None and own != outer:
            raise StrategyError(
                f"the manual function {name_of(self.fn)} is on the mesh ({own}), and what calls it on ({outer}); "
                f"leave one out"
            )
        mesh = own or outer
        assert mesh is not None
        return mesh


def _crossing(name: str, layout: Layout, shape: tuple[int, ...], tensor: Tensor) -> Crossing:
    return Crossing(name, layout, shape, tensor.dtype, tensor.device)

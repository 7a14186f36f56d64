"""Where a call runs: all ranks simulated in this process, or this rank of a process group.

All that differs between the two is a method of `Placing`: `Simulated` has it for one process, `Launched` for many. What
a rank needs of others' facts to refuse a program that differs between ranks is in alike.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from partway.alike import SEED, asked, draws, modes, of_plan, options, versions
from partway.annotations.statements import dataset_was_set
from partway.compiling import Compiled
from partway.context import current_algo
from partway.dtensors import drop_hooks, is_dtensor, noted, plain, whole
from partway.options.fields import DatasetMode
from partway.options.parallel import ParallelContext
from partway.propagation.graph.port import Role
from partway.propagation.graph.structure import Call, name_of
from partway.propagation.program.local_program import PlacedPort
from partway.request import Request
from partway.runtime.agreement import Fact, agree, agreement, facts_of, gathered
from partway.runtime.loaded import Executor
from partway.runtime.one_device import OneDevice
from partway.runtime.parameters import hold
from partway.runtime.process import get_group_size, get_rank, init, launched
from partway.runtime.simulate import Simulator
from partway.state_dicts import follow_layouts
from partway.strategy import Layout, Mesh, Problem, Replicate, RuntimeStateError, StrategyError, raise_problems

Change = Callable[[Tensor], Tensor]
Observer = Callable[[Sequence[Tensor], Sequence[Tensor]], None]  # of a call's tensors, and some of its parameters
T = TypeVar("T")


@dataclass(frozen=True)
class FirstCall:
    """The first call of a signature, which is planned. `local`: each rank is given its part of every input."""

    fn: Any
    request: Request
    call: Call
    context: ParallelContext
    local: bool


class Placing(Protocol):
    """What differs between simulation and a process group, around the step itself."""

    @property
    def processes(self) -> int | None:
        """How many processes a launcher started, or None in simulation."""

    def executor(self, mesh: Mesh) -> Executor:
        """What runs a step on `mesh`."""

    def adopt(self, module: torch.nn.Module, context: ParallelContext, request: Request) -> None:
        """A module was sharded, as `request` says: before anyone asks for its parameters."""

    def adopt_added(self, module: torch.nn.Module, mesh: Mesh | None) -> tuple[str, ...]:
        """A call is planned: what parameters `module` got since it was sharded become like the others, on `mesh`.
        Their names."""

    def whole_call(self, first: FirstCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with tensors of their global shapes."""

    def memory(self, first: FirstCall) -> float | None:
        """The bytes that each device of a call has; None: those that its profile says."""

    def agreed_plan(self, first: FirstCall, plan: Callable[[], Compiled]) -> Compiled:
        """What `plan` gives for the call; where there are several processes, it is the same on all."""

    def agreed(self, purpose: str, make: Callable[[], T], text: Callable[[T], str]) -> T:
        """What `make` gives for `purpose`, later; where there are several processes, its `text` is the same on all."""

    def observer(self, fn: Any, local: bool, compiled: Compiled) -> Observer | None:
        """What is told of every call of `fn`, if anything is."""

    def settle(self, module: torch.nn.Module, layouts: Mapping[str, Layout]) -> None:
        """A plan gave parameters their layouts at rest: put them there."""

    def hold(self, module: torch.nn.Module, name: str, part: Tensor) -> None:
        """Give a parameter or buffer of the meta device values: this process's `part`."""

    def part(self, whole: Tensor, layout: Layout) -> Tensor:
        """This process's part of a tensor under `layout`, in memory of its own."""

    def whole(self, tensor: Tensor) -> Tensor:
        """All of a tensor of which processes may hold parts."""

    def enter(self, placed: PlacedPort, local: bool) -> Change | None:
        """What makes of a tensor of a call what the executor takes, or None if it takes the tensor itself."""

    def leave(self, placed: PlacedPort) -> Change | None:
        """What makes of a result of the executor what the caller gets, or None if that is the result itself."""

    def write(self, placed: PlacedPort, local: bool, given: Tensor, result: Tensor) -> None:
        """Write a result of the executor into a tensor of the call, `given`, of which it is the new value."""


class Simulated:
    """Every rank in this process: tensors are whole on both sides, parameters stay ordinary parameters."""

    @property
    def processes(self) -> int | None:
        return None

    def executor(self, mesh: Mesh) -> Executor:
        return _simulator(mesh)

    def adopt(self, module: torch.nn.Module, context: ParallelContext, request: Request) -> None:
        return None

    def adopt_added(self, module: torch.nn.Module, mesh: Mesh | None) -> tuple[str, ...]:
        return ()

    def whole_call(self, first: FirstCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = first.call.build(first.call.tensors)
        return args, kwargs

    def memory(self, first: FirstCall) -> float | None:
        return None

    def agreed_plan(self, first: FirstCall, plan: Callable[[], Compiled]) -> Compiled:
        return plan()

    def agreed(self, purpose: str, make: Callable[[], T], text: Callable[[T], str]) -> T:
        return make()

    def observer(self, fn: Any, local: bool, compiled: Compiled) -> Observer | None:
        return None

    def settle(self, module: torch.nn.Module, layouts: Mapping[str, Layout]) -> None:
        return None

    def hold(self, module: torch.nn.Module, name: str, part: Tensor) -> None:
        hold(module, name, part)

    def part(self, whole: Tensor, layout: Layout) -> Tensor:
        return whole

    def whole(self, tensor: Tensor) -> Tensor:
        return tensor

    def enter(self, placed: PlacedPort, local: bool) -> Change | None:
        return None

    def leave(self, placed: PlacedPort) -> Change | None:
        return functools.partial(noted, layout=placed.layout) if placed.layout.cuts else None

    def write(self, placed: PlacedPort, local: bool, given: Tensor, result: Tensor) -> None:
        given.copy_(result)


class Launched:
    """One rank of a process group. Parameters and results that are split are DTensors that mean what they mean on one
    device (`runtime/split_tensor.py`), so that optimizers and checkpoints of the ecosystem take them; plain inputs are whole on
    every rank (or, where the dataset_strategy was set, this rank's part); results are plain where they are whole."""

    def __init__(self) -> None:
        init()

    @property
    def processes(self) -> int:
        return get_group_size()

    def executor(self, mesh: Mesh) -> Executor:
        from partway.runtime.execute import Worker

        return Worker(mesh)

    def adopt(self, module: torch.nn.Module, context: ParallelContext, request: Request) -> None:
        """Parameters become DTensors now, whole on every rank, so that an optimizer made next holds the objects that
        stay; the first plan splits them in place."""
        from torch.distributed.tensor import DTensor

        from partway.runtime.execute import broadcast
        from partway.runtime.parameters import distribute
        from partway.runtime.random_state import generators, share_generators
        from partway.strategy.torch_mesh import check_ranks

        with agreement(f"shard {name_of(module)}") as facts:
            if request.own_mesh is not None:
                check_ranks(request.own_mesh, self.processes)
            held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            # those of a module inside that was sharded before agree already
            named = {name: t for name, t in held.items() if not isinstance(t, DTensor) and not t.is_meta}
            facts += [*versions(), *asked(request), *options(context, current_algo())]
            if context.parameter_broadcast:  # only the values may differ
                shapes = "\n".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in named.items())
                facts.append(Fact("what has to be broadcast", shapes, follows=1))
            else:
                facts += facts_of(named, "seed every rank alike, or set parameter_broadcast=True")
                facts += facts_of(generators(), SEED, follows=2)
        if context.parameter_broadcast:
            broadcast([tensor.detach() for tensor in named.values()])
            share_generators()  # ranks whose parameters differ were seeded differently
        distribute(module, request.own_mesh)
        drop_hooks(module)
        follow_layouts(module)

    def adopt_added(self, module: torch.nn.Module, mesh: Mesh | None) -> tuple[str, ...]:
        from partway.runtime.parameters import distribute

        named = dict(module.named_parameters(remove_duplicate=False))
        # functional_call gives plain tensors for one call: these are not the module's
        added = {name: p for name, p in named.items() if not is_dtensor(p) and isinstance(p, torch.nn.Parameter)}
        if added:
            purpose = f"split what {name_of(module)} got since it was sharded: {', '.join(added)}"
            agree(purpose, facts_of({n: p for n, p in added.items() if not p.is_meta}, "seed every rank alike"))
            distribute(module, mesh)
        return tuple(added)

    def whole_call(self, first: FirstCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        fn, call, context = first.fn, first.call, first.context
        tensors = [plain(tensor) for tensor in call.tensors]
        named = dict(zip((f"input {name!r}" for name in call.names), call.tensors, strict=True))
        with agreement(f"plan a call of {name_of(fn)}", _shapes(named)) as facts:
            facts += [*versions(), *asked(first.request), *options(context, current_algo()), *modes(fn)]
            facts.append(Fact("the arguments that are not tensors", call.structure.text()))
            facts += [Fact(f"the gradient of {name}", _wanted(tensor)) for name, tensor in named.items()]
            if first.local:
                parts = _dataset_parts(tensors, context, self.processes)
                facts += [Fact(name, f"{t.dtype} with {t.dim()} dims") for name, t in named.items()]
            else:
                whole = {name: t for name, t in named.items() if not is_dtensor(t)}
                facts += facts_of(whole, _whole_fix(first.request, context))
                facts += [Fact(name, _placed(t)) for name, t in named.items() if is_dtensor(t)]
        if first.local:
            held = gathered(f"plan a call of {name_of(fn)}", [list(tensor.shape) for tensor in tensors])
            shapes = whole_shapes(list(named), held, parts)
            tensors = [_of_shape(tensor, shape) for tensor, shape in zip(tensors, shapes, strict=True)]
        args, kwargs = call.build(tensors)
        return args, kwargs

    def memory(self, first: FirstCall) -> float | None:
        from partway.runtime.device_memory import memory_of_a_rank

        if first.context.device_profile is not None:
            return None
        kind = first.request.device or next((tensor.device.type for tensor in first.call.tensors), "meta")
        return memory_of_a_rank(kind) if kind in ("cpu", "cuda") else None

    def agreed_plan(self, first: FirstCall, plan: Callable[[], Compiled]) -> Compiled:
        from partway.runtime.execute import process_group
        from partway.runtime.random_state import generators

        with agreement(f"follow the plan of a call of {name_of(first.fn)}") as facts:
            compiled = plan()
            if first.local:
                _check_parts(first.call, compiled)
            facts += of_plan(compiled)
            if draws(compiled):
                facts += facts_of(generators(), SEED, follows=4)
        for axes in dict.fromkeys(c.axes for c in compiled.program.collectives):
            process_group(compiled.mesh, axes)  # all ranks are here
        return compiled

    def agreed(self, purpose: str, make: Callable[[], T], text: Callable[[T], str]) -> T:
        with agreement(purpose) as facts:
            result = make()
            facts.append(Fact("the program", text(result)))
        return result

    def observer(self, fn: Any, local: bool, compiled: Compiled) -> Observer | None:
        from partway.runtime.ledger import Written
        from partway.runtime.watch import watch

        own, written, where = watch(), Written(), f"a call of {name_of(fn)}"
        if own.size == 1:
            return None

        def note(tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
            own.stepped(written(parameters), where)
            if not local:
                own.given(tensors, where)

        together = any(c.phase == "forward" for c in compiled.plan.collectives)
        return note if together or not local else None  # a rank may call on its own part for itself

    def settle(self, module: torch.nn.Module, layouts: Mapping[str, Layout]) -> None:
        from partway.runtime.parameters import redistribute

        redistribute(module, layouts)

    def hold(self, module: torch.nn.Module, name: str, part: Tensor) -> None:
        hold(module, name, part)

    def part(self, whole: Tensor, layout: Layout) -> Tensor:
        own = whole[layout.slices(tuple(whole.shape), get_rank())]
        return own.clone(memory_format=torch.contiguous_format)

    def whole(self, tensor: Tensor) -> Tensor:
        return whole(tensor)

    def enter(self, placed: PlacedPort, local: bool) -> Change | None:
        from partway.runtime.parameters import placed_part

        given_part = local and placed.port.role is Role.INPUT
        return functools.partial(placed_part, layout=placed.layout, whole=not given_part)

    def leave(self, placed: PlacedPort) -> Change | None:
        from partway.runtime.execute import device_mesh
        from partway.runtime.parameters import as_dtensor

        layout = placed.layout
        if all(isinstance(p, Replicate) for p in layout.placements):
            return None
        return functools.partial(as_dtensor, layout=layout, shape=placed.shape, mesh=device_mesh(layout.mesh))

    def write(self, placed: PlacedPort, local: bool, given: Any, result: Tensor) -> None:
        from partway.runtime.execute import device_mesh
        from partway.runtime.parameters import as_dtensor
        from partway.runtime.split_tensor import SplitTensor
        from partway.runtime.torch_internals import spec_of

        if result is given:  # written where it lies
            return
        if local and not is_dtensor(given):  # this rank's part, whose slice may be short
            given.copy_(result[tuple(slice(0, size) for size in given.shape)])
            return
        new: Any = as_dtensor(result, placed.layout, placed.shape, device_mesh(placed.layout.mesh))
        if isinstance(given, SplitTensor) and spec_of(given) == spec_of(new):
            given.write_part(result)
        elif is_dtensor(given):
            given.copy_(new.redistribute(placements=given.placements))
        else:
            given.copy_(new.full_tensor())


def _dataset_parts(tensors: list[Tensor], context: ParallelContext, devices: int) -> list[tuple[int, ...]]:
    """Into how many parts the dataset_strategy splits each dim of each input."""
    value = context.dataset_strategy
    if isinstance(value, DatasetMode):
        first = devices if value is DatasetMode.DATA_PARALLEL else 1
        return [(first, *(1,) * (tensor.dim() - 1)) if tensor.dim() else () for tensor in tensors]
    if len(value) != len(tensors) or any(len(s) != t.dim() for s, t in zip(value, tensors, strict=False)):
        raise StrategyError(
            f"dataset_strategy {value} does not fit {len(tensors)} inputs of ranks {[t.dim() for t in tensors]}; "
            "write one tuple per input with one split count per dim"
        )
    return list(value)


def whole_shapes(
    names: Sequence[str], held: Sequence[Sequence[Sequence[int]]], splits: Sequence[tuple[int, ...]]
) -> list[tuple[int, ...]]:
    """The shapes of the inputs `names`. Each rank holds a part of every input: of the shapes `held`, by rank, with as
    many parts along each dim as `splits` has by input. The last part may be shorter, as torch.chunk cuts. Raises
    StrategyError for other parts."""
    problems, shapes = list[Problem](), []
    for i, (name, counts) in enumerate(zip(names, splits, strict=True)):
        shape = []
        for dim, count in enumerate(counts):
            sizes = [rank[i][dim] for rank in held]
            full, short = max(sizes), min(sizes)
            whole = full * (count - 1) + short
            fits = full == short or sizes.count(short) * count == len(sizes) == (sizes.count(full) + sizes.count(short))
            if not fits or (short < full and -(-whole // count) != full):
                what = f"the ranks hold parts of sizes {', '.join(map(str, sizes))} of dim {dim}"
                fix = (
                    "give every rank equally many, as a loader with drop_last=True does; only the last part may be "
                    f"shorter, as torch.chunk cuts into {count} parts"
                )
                problems.append(Problem(name, what, fix))
            shape.append(whole)
        shapes.append(tuple(shape))
    raise_problems("the parts that the ranks hold under dataset_strategy do not make a whole:", problems)
    return shapes


def _check_parts(call: Call, compiled: Compiled) -> None:
    """Raise RuntimeStateError unless this rank holds the parts that the plan gives it."""
    given = dict(zip(call.names, call.tensors, strict=True))
    for placed in compiled.local.inputs:
        tensor = given.get(placed.port.name) if placed.port.role is Role.INPUT else None
        if tensor is None or is_dtensor(tensor):
            continue
        expected = tuple(s.stop - s.start for s in placed.layout.slices(placed.shape, get_rank()))
        if tuple(tensor.shape) != expected:
            raise RuntimeStateError(
                f"rank {get_rank()} holds a part of shape {list(tensor.shape)} of input {placed.port.name!r}, of "
                f"shape {list(placed.shape)}; under {placed.layout} its part has shape {list(expected)}"
            )


def _whole_fix(request: Request, context: ParallelContext) -> str:
    if request.in_strategy is not None and dataset_was_set(context):
        return (
            "give every rank the same whole batch: where in_strategy says how inputs are split, dataset_strategy, by "
            "which each rank has its own part, is not followed; leave out in_strategy"
        )
    return "give every rank the same whole batch, or set dataset_strategy where each has its own part"


def _shapes(named: Mapping[str, Tensor]) -> str:
    """What a call is given: " with input 'x' float32[8, 4]"."""
    texts = [f"{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in named.items()]
    return f" with {', '.join(texts[:4])}" + (" and others" if texts[4:] else "") if texts else ""


def _wanted(tensor: Tensor) -> str:
    return "is wanted" if tensor.requires_grad else "is not wanted"


def _placed(tensor: Any) -> str:
    return f"a DTensor {tensor.dtype}{list(tensor.shape)} {tensor.placements} on {tensor.device_mesh}"


def _of_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)


@functools.cache
def _simulator(mesh: Mesh) -> Executor:
    return OneDevice(mesh) if mesh.device_num == 1 else Simulator(mesh)


def placing() -> Placing:
    """The Placing of this process. Where a launcher started it, the process group is started if there is none."""
    return Launched() if launched() else Simulated()

"""Where a call runs: all ranks simulated in this process, or this rank of a process group.

Every difference between the two is a method of `Placing`, which `Launched` overrides.
rank_facts.py has the facts by which ranks refuse a program that differs between them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from partway.annotations.given import given_splits
from partway.compiler.compiled import Compiled
from partway.engine.rank_facts import SEED, asked, draws, modes, of_plan, options, versions
from partway.engine.state_dicts import follow_layouts
from partway.options.context import current_algo
from partway.options.parallel import ParallelContext
from partway.propagation.graph.port import Role
from partway.propagation.graph.structure import Call, name_of
from partway.propagation.program.program import PlacedPort
from partway.requests.dtensors import drop_hooks, is_dtensor, noted, plain, whole
from partway.requests.request import Request
from partway.runtime.code.loaded_graph import Executor
from partway.runtime.executors.one_device import OneDevice
from partway.runtime.executors.simulate import Simulator
from partway.runtime.launching.process import get_group_size, get_rank, init, launched
from partway.runtime.ranks.agreement import Fact, agree, agreement, facts_of, gathered
from partway.runtime.ranks.ledger import checksum
from partway.runtime.tensors.parameters import hold
from partway.strategy import Layout, Mesh, Problem, Replicate, RuntimeStateError, raise_problems

Change = Callable[[Tensor], Tensor]
Observer = Callable[[Sequence[Tensor], Sequence[tuple[str, Tensor]]], None]  # takes a call's tensors, and its state's
T = TypeVar("T")


@dataclass(frozen=True)
class FirstCall:
    """The first call of a signature, which has to be planned."""

    fn: Any
    request: Request
    call: Call
    context: ParallelContext


class Placing:
    """Where the ranks of a call are, around the program itself: all of them in this process. Inputs and results are
    whole, and parameters stay ordinary parameters. `Launched` overrides it for one rank of a process group."""

    @property
    def processes(self) -> int | None:
        """The number of processes of the job or of the mesh's part of it, or None in simulation."""
        return None

    def executor(self, mesh: Mesh) -> Executor:
        """The executor of programs on `mesh`."""
        return _simulator(mesh)

    def adopt(self, module: torch.nn.Module, context: ParallelContext, request: Request) -> None:
        """Prepare a module that has just been sharded by `request`, before any other use of its parameters."""

    def adopt_added(self, module: torch.nn.Module, mesh: Mesh | None) -> tuple[str, ...]:
        """Before a call is planned, adopt the parameters added to `module` since it was sharded, on `mesh`. Returns
        their names."""
        return ()

    def with_wholes(self, first: FirstCall, mesh: Mesh | None) -> Call:
        """The call of `first`, with tensors of the global shape in place of those of which this rank has a part."""
        return first.call

    def any_rank(self, flag: bool, fn: Any) -> bool:
        """Whether `flag` is set for a call of `fn` on any rank; every rank calls it."""
        return flag

    def whole_call(self, first: FirstCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call, with tensors of their global shapes."""
        args, kwargs = first.call.build(first.call.tensors)
        return args, kwargs

    def memory(self, first: FirstCall) -> float | None:
        """The bytes of each device of a call; None: those of its profile."""
        return None

    def agreed_plan(self, first: FirstCall, plan: Callable[[], Compiled]) -> Compiled:
        """The result of `plan` for the call, checked to be the same on all processes."""
        return plan()

    def agreed(self, purpose: str, make: Callable[[], T], text: Callable[[T], str]) -> T:
        """The result of `make` for `purpose`, after planning; its `text` is checked to be the same on all processes."""
        return make()

    def observer(self, fn: Any, own: Mapping[str, Any], compiled: Compiled) -> Observer | None:
        """The observer of every call of `fn`, or None. `own`: the inputs of which each rank is given a part."""
        return None

    def settle(self, module: torch.nn.Module, layouts: Mapping[str, Layout]) -> None:
        """Lay out parameters by the layouts of a plan."""

    def hold(self, module: torch.nn.Module, name: str, part: Tensor) -> None:
        """Give a parameter or buffer on the meta device the values of this process's `part`."""
        hold(module, name, part)

    def part(self, whole: Tensor, layout: Layout) -> Tensor:
        """This process's part of a tensor under `layout`, in memory of its own."""
        return whole

    def whole(self, tensor: Tensor) -> Tensor:
        """The whole of a tensor of which processes may hold parts."""
        return tensor

    def enter(self, placed: PlacedPort, parts: Any) -> Change | None:
        """The function from a tensor of a call to the executor's operand, or None if the executor takes the tensor
        itself. `parts`: the parts of the ranks, if each is given one."""
        return None

    def leave(self, placed: PlacedPort, where: str = "") -> Change | None:
        """The function from an output of the executor to the caller's tensor, or None if the caller gets the output
        itself. `where`: names the call, if the output is one of the function's results."""
        return functools.partial(noted, layout=placed.layout) if placed.layout.cuts else None

    def write(self, placed: PlacedPort, parts: Any, given: Tensor, result: Tensor) -> None:
        """Write a result of the executor, the new value of the call's tensor `given`, into that tensor."""
        given.copy_(result)


class Launched(Placing):
    """One rank of a process group. Split parameters and results are DTensors with the meaning of one device
    (`tensors/split_tensor.py`), so that optimizers and checkpoints of the ecosystem take them. Plain inputs are whole
    on every rank (or this rank's part, by the dataset_strategy); whole results are plain tensors."""

    def __init__(self, mesh: Mesh | None = None) -> None:
        """If `mesh` names ranks of the job, only they make its calls and agree on them; otherwise all ranks do.

        Raises RuntimeStateError for a rank that the job does not have, StrategyError if this process is not on `mesh`.
        """
        init()
        self._part = mesh if mesh is not None and mesh.is_part else None
        if self._part:
            from partway.strategy.torch_mesh import check_ranks

            check_ranks(self._part, get_group_size())
            self._part.own_rank(get_rank())
        self._among = tuple(self._part.ranks) if self._part else None

    @property
    def processes(self) -> int:
        return len(self._among) if self._among else get_group_size()

    def executor(self, mesh: Mesh) -> Executor:
        from partway.runtime.executors.execute import Worker

        return Worker(mesh)

    def adopt(self, module: torch.nn.Module, context: ParallelContext, request: Request) -> None:
        """Make parameters DTensors, whole on every rank, so that an optimizer made next holds the final objects; the
        first plan splits them in place."""
        from torch.distributed.tensor import DTensor

        from partway.runtime.executors.execute import broadcast
        from partway.runtime.random_state import generators, share_generators
        from partway.runtime.tensors.parameters import distribute
        from partway.strategy.torch_mesh import check_ranks

        with agreement(f"shard {name_of(module)}", among=self._among) as facts:
            if request.own_mesh is not None:
                check_ranks(request.own_mesh, get_group_size())
            held = {**dict(module.named_parameters()), **dict(module.named_buffers())}
            # DTensors, of inner modules that were sharded before, have been compared already
            named = {name: t for name, t in held.items() if not isinstance(t, DTensor) and not t.is_meta}
            facts += [*versions(), *asked(request), *options(context, current_algo())]
            if context.parameter_broadcast:  # only the values may differ
                shapes = "\n".join(f"{name} {t.dtype} {list(t.shape)}" for name, t in named.items())
                facts.append(Fact("what has to be broadcast", shapes, follows=1))
            else:
                facts += facts_of(named, "seed every rank alike, or set parameter_broadcast=True")
                facts += facts_of(generators(), SEED, follows=2)
        if context.parameter_broadcast:
            broadcast([tensor.detach() for tensor in named.values()], self._part)
            share_generators(self._part)  # ranks with different parameters had different seeds
        distribute(module, request.own_mesh)
        drop_hooks(module)
        follow_layouts(module)

    def adopt_added(self, module: torch.nn.Module, mesh: Mesh | None) -> tuple[str, ...]:
        from partway.runtime.tensors.parameters import distribute

        named = dict(module.named_parameters(remove_duplicate=False))
        # without the plain tensors of functional_call, which are for one call only
        added = {name: p for name, p in named.items() if not is_dtensor(p) and isinstance(p, torch.nn.Parameter)}
        if added:
            purpose = f"split what {name_of(module)} got since it was sharded: {', '.join(added)}"
            facts = facts_of({n: p for n, p in added.items() if not p.is_meta}, "seed every rank alike")
            agree(purpose, facts, self._among)
            distribute(module, mesh)
        return tuple(added)

    def with_wholes(self, first: FirstCall, mesh: Mesh | None) -> Call:
        from partway.runtime.tensors.own_parts import Parts

        call, context = first.call, first.context
        if not context.gives_parts:
            return call
        inputs = [(n, a, tuple(t.shape)) for n, a, t in zip(call.names, call.arguments, call.tensors, strict=True)]
        splits = given_splits(first.fn, first.request, context, inputs, mesh, self.processes)
        own = [
            i
            for i, (tensor, counts) in enumerate(zip(call.tensors, splits, strict=True))
            if any(count > 1 for count in counts) and not is_dtensor(tensor)
        ]
        mine = [
            [list(call.tensors[i].shape), "" if call.tensors[i].is_meta else str(checksum(call.tensors[i]))]
            for i in own
        ]
        held = gathered(_purpose(first.fn), mine, self._among)
        if len({tuple(len(shape) for shape, _ in each) for each in held}) > 1:
            return call  # a later comparison reports how the ranks' calls differ
        tensors = list(call.tensors)
        every: list[Parts | None] = [None] * len(tensors)
        for k, i in enumerate(own):
            parts = Parts(tuple(tuple(each[k][0]) for each in held), tuple(each[k][1] for each in held))
            every[i] = parts
            tensors[i] = _of_shape(call.tensors[i], whole_of_parts(f"input {call.names[i]!r}", parts.shapes, splits[i]))
        return replace(call, tensors=tuple(tensors), parts=tuple(every))

    def any_rank(self, flag: bool, fn: Any) -> bool:
        from partway.runtime.tensors.own_parts import any_rank

        about = f"comparing the shapes of the parts of a call of {name_of(fn)}"
        return any(gathered(about, flag, self._among)) if self._among else any_rank(flag, about)

    def whole_call(self, first: FirstCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        fn, call, context = first.fn, first.call, first.context
        named = dict(zip((f"input {name!r}" for name in call.names), call.tensors, strict=True))
        own = {f"input {name!r}" for name in call.own}
        with agreement(_purpose(fn), _shapes(named), self._among) as facts:
            facts += [*versions(), *asked(first.request), *options(context, current_algo()), *modes(fn)]
            facts.append(Fact("the arguments that are not tensors", call.structure.text()))
            facts += [Fact(f"the gradient of {name}", _wanted(tensor)) for name, tensor in named.items()]
            whole = {name: t for name, t in named.items() if name not in own and not is_dtensor(t)}
            facts += facts_of(whole, _whole_fix(context))
            facts += [Fact(name, _placed(t)) for name, t in named.items() if is_dtensor(t)]
            facts += [Fact(name, f"{t.dtype} with {t.dim()} dims") for name, t in named.items() if name in own]
        args, kwargs = call.build([plain(tensor) for tensor in call.tensors])
        return args, kwargs

    def memory(self, first: FirstCall) -> float | None:
        from partway.runtime.ranks.device_memory import memory_of_a_rank

        if first.context.device_profile is not None:
            return None
        kind = first.request.device or next((tensor.device.type for tensor in first.call.tensors), "meta")
        return memory_of_a_rank(kind, self._among) if kind in ("cpu", "cuda") else None

    def agreed_plan(self, first: FirstCall, plan: Callable[[], Compiled]) -> Compiled:
        from partway.runtime.executors.execute import process_group
        from partway.runtime.random_state import generators

        with agreement(f"follow the plan of a call of {name_of(first.fn)}", among=self._among) as facts:
            compiled = plan()
            _check_parts(first.call, compiled)
            facts += of_plan(compiled)
            if draws(compiled):
                facts += facts_of(generators(), SEED, follows=4)
        splits = [p.layout.split_axes for p in compiled.local.inputs if p.port.name in first.call.own and p.layout.cuts]
        for axes in dict.fromkeys([*(c.axes for c in compiled.program.collectives), *splits]):
            process_group(compiled.mesh, axes)  # made now, while all ranks are at this point
        return compiled

    def agreed(self, purpose: str, make: Callable[[], T], text: Callable[[T], str]) -> T:
        with agreement(purpose, among=self._among) as facts:
            result = make()
            facts.append(Fact("the program", text(result)))
        return result

    def observer(self, fn: Any, own: Mapping[str, Any], compiled: Compiled) -> Observer | None:
        from partway.runtime.ranks.ledger import WriteCounts
        from partway.runtime.ranks.replicas import in_turn, ledger_of, note
        from partway.runtime.ranks.watch import watch

        written, name, calls = WriteCounts(), name_of(fn), itertools.count(1)
        where = f"a call of {name}"
        every = watch().look_every = compiled.context.look_every
        if self.processes == 1:
            return None
        among = tuple(compiled.mesh.ranks)
        own_ledger = ledger_of(among)
        inputs = [p for p in compiled.local.inputs if p.port.role is Role.INPUT]
        wholes = [i for i, p in enumerate(inputs) if p.port.name not in own]
        shared = [
            (i, ledger, f"input {p.port.name!r} of {where}")
            for i, p in enumerate(inputs)
            if p.port.name in own and (ledger := _ledger_of_part(p.layout)) is not None
        ]

        def observe(tensors: Sequence[Tensor], held: Sequence[tuple[str, Tensor]]) -> None:
            own_ledger.stepped(written(held), where)
            own_ledger.given([tensors[i] for i in wholes], where)
            for i, ledger, at in shared:
                ledger.shared(tensors[i], at)
            if every is not None:
                call = next(calls)
                copies, whole = in_turn(held, call, every)
                note(copies, f"call {call} of {name}", call, whole, among)

        return observe

    def settle(self, module: torch.nn.Module, layouts: Mapping[str, Layout]) -> None:
        from partway.runtime.tensors.parameters import redistribute

        redistribute(module, layouts)

    def part(self, whole: Tensor, layout: Layout) -> Tensor:
        from partway.strategy.torch_mesh import own_rank

        own = whole[layout.slices(tuple(whole.shape), own_rank(layout.mesh))]
        return own.clone(memory_format=torch.contiguous_format)

    def whole(self, tensor: Tensor) -> Tensor:
        return whole(tensor)

    def enter(self, placed: PlacedPort, parts: Any) -> Change | None:
        from partway.runtime.tensors.own_parts import places_of, recut
        from partway.runtime.tensors.parameters import placed_part

        layout, shape = placed.layout, tuple(placed.shape)
        if parts is not None and (held := parts.places(layout)) != places_of(layout, shape):
            return functools.partial(recut, layout=layout, shape=shape, before=held, after=places_of(layout, shape))
        return functools.partial(placed_part, layout=layout, whole=parts is None)

    def leave(self, placed: PlacedPort, where: str = "") -> Change | None:
        from partway.runtime.executors.execute import device_mesh
        from partway.runtime.tensors.parameters import as_dtensor

        layout = placed.layout
        if all(isinstance(p, Replicate) for p in layout.placements):
            return functools.partial(_alike, where=where, mesh=layout.mesh) if where and self.processes > 1 else None
        return functools.partial(as_dtensor, layout=layout, shape=placed.shape, mesh=device_mesh(layout.mesh))

    def write(self, placed: PlacedPort, parts: Any, given: Any, result: Tensor) -> None:
        from partway.runtime.executors.execute import device_mesh
        from partway.runtime.tensors.own_parts import places_of, recut
        from partway.runtime.tensors.parameters import as_dtensor
        from partway.runtime.tensors.split_tensor import SplitTensor
        from partway.runtime.torch_internals import spec_of

        if result is given:  # it was written in place
            return
        if parts is not None:  # `given` is this rank's part, whose slice may be short
            held, places = parts.places(placed.layout), places_of(placed.layout, tuple(placed.shape))
            if held != places:
                result = recut(result, placed.layout, tuple(placed.shape), places, held)
            given.copy_(result[tuple(slice(0, size) for size in given.shape)])
            return
        new: Any = as_dtensor(result, placed.layout, placed.shape, device_mesh(placed.layout.mesh))
        if isinstance(given, SplitTensor) and spec_of(given) == spec_of(new):
            given.write_part(result)
        elif is_dtensor(given):
            given.copy_(new.redistribute(placements=given.placements))
        else:
            given.copy_(new.full_tensor())


def whole_of_parts(name: str, held: Sequence[tuple[int, ...]], splits: Sequence[int]) -> tuple[int, ...]:
    """The shape of the whole input `name`, from the shapes `held` of the ranks' parts. `splits`: the number of parts of
    each dim; equally many ranks hold each part. Raises StrategyError if the parts do not make a whole."""
    problems, shape = list[Problem](), []
    for dim, count in enumerate(splits):
        sizes = [rank[dim] for rank in held]
        whole, rest = divmod(sum(sizes) * count, len(sizes))
        if rest or (count == 1 and len(set(sizes)) > 1):
            what = f"the ranks hold parts of sizes {', '.join(map(str, sizes))} of dim {dim}, {count} parts in all"
            fix = "give ranks that share a part the same one, as pw.data.distributed_sampler does"
            problems.append(Problem(name, what, fix))
        shape.append(whole)
    raise_problems("the parts that the ranks hold under dataset_strategy do not make a whole:", problems)
    return tuple(shape)


def _check_parts(call: Call, compiled: Compiled) -> None:
    """Raise RuntimeStateError unless ranks that share a part of an input hold the same values."""
    own = call.own
    for placed in compiled.local.inputs:
        parts = own.get(placed.port.name) if placed.port.role is Role.INPUT else None
        if parts is None:
            continue
        fix = "give them the same samples, as pw.data.distributed_sampler(dataset, part) does"
        try:
            places = parts.places(placed.layout)
        except RuntimeStateError as error:
            raise RuntimeStateError(f"input {placed.port.name!r}: {error}; {fix}") from None
        for rank, (place, content) in enumerate(zip(places, parts.contents, strict=True)):
            first = places.index(place)
            if content != parts.contents[first]:
                raise RuntimeStateError(
                    f"input {placed.port.name!r}: ranks {first} and {rank} share a part ({placed.layout}), and rank "
                    f"{rank} was given other values than rank {first}; {fix}"
                )


def _ledger_of_part(layout: Layout) -> Any:
    """The ledger of the ranks that share this rank's part under `layout`; None if no other rank does."""
    from partway.runtime.ranks.replicas import ledger_of

    axes = tuple(axis for axis in layout.mesh.axes if axis not in layout.split_axes)
    ranks = layout.mesh.processes(get_rank(), *axes) if axes else ()
    return ledger_of(ranks) if len(ranks) > 1 else None


def _alike(result: Tensor, where: str, mesh: Mesh) -> Tensor:
    """A result that is whole on every rank. All ranks have to use it in the same way, none with its own labels, so its
    gradient is compared between ranks."""
    if result.requires_grad:
        from partway.runtime.ranks.replicas import ledger_of

        ledger = ledger_of(tuple(mesh.ranks))
        result.register_hook(lambda gradient: ledger.came_back(gradient, where))
    return result


def _purpose(fn: Any) -> str:
    return f"plan a call of {name_of(fn)}"


def _whole_fix(context: ParallelContext) -> str:
    if context.gives_parts:
        return "give every rank the same, or say in dataset_strategy or in_strategy which part each is given"
    return "give every rank the same whole batch, or set dataset_strategy where each has its own part"


def _shapes(named: Mapping[str, Tensor]) -> str:
    """The tensors of a call, for a message: " with input 'x' float32[8, 4]"."""
    texts = [f"{name} {str(t.dtype).removeprefix('torch.')}{list(t.shape)}" for name, t in named.items()]
    return f" with {', '.join(texts[:4])}" + (" and others" if texts[4:] else "") if texts else ""


def _wanted(tensor: Tensor) -> str:
    return "is wanted" if tensor.requires_grad else "is not wanted"


def _placed(tensor: Any) -> str:
    return f"a DTensor {tensor.dtype}{list(tensor.shape)} {tensor.placements} on {tensor.device_mesh}"


def _of_shape(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype, device=tensor.device, requires_grad=tensor.requires_grad)


@functools.lru_cache(maxsize=256)
def _simulator(mesh: Mesh) -> Executor:
    return OneDevice(mesh) if mesh.device_num == 1 else Simulator(mesh)


def placing(mesh: Mesh | None = None) -> Placing:
    """The Placing of this process for calls on `mesh`. In a launched process it starts the process group if there is
    none."""
    return Launched(mesh) if launched() else Placing()


def settle(module: torch.nn.Module, layouts: Mapping[str, Layout]) -> None:
    """Lay out parameters of `module`, by their names, on the processes of the job; nothing in simulation."""
    placing().settle(module, layouts)

"""One call of a loaded function: the forward graph runs, the values for the backward are saved, and autograd calls
the backward graph. The executor (simulated ranks or one rank of a process group) is an argument: with simulated ranks a
call takes and returns whole tensors, with one rank of a process group that rank's parts."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, fx

from ..propagation.capture.export.autocast import without_autocast
from ..propagation.graph.graph import Text
from ..propagation.graph.nodes import draws_random_numbers, is_port
from ..propagation.graph.port import Role
from ..propagation.program.accumulate import Accumulation
from ..propagation.program.apart import entangled, of_outputs
from ..propagation.program.derivative import differentiate_again, gradient_program
from ..propagation.program.program import PlacedPort, Program
from ..propagation.torch_internals import is_batched, version_of
from ..strategy.errors import RuntimeStateError
from .code.instructions import AS_TRACED, InputsAs
from .code.loaded_graph import Backend, Backward, Executor, LoadedGraph, Loader
from .code.memory import memory_of
from .code.slices import Placed
from .code.strides import Strides, is_loose, strides_of
from .code.written import written_in_place
from .executors.waiting import Accumulating, Reduces, Waiting, WaitingGradient
from .random_state import drawing_again, states_of
from .tensors.batched import one_by_one
from .tensors.parameters import gradient_of
from .torch_internals import as_object, is_view, local_part_of

T = TypeVar("T")
Wanted = tuple[bool, ...]


@dataclass(eq=False)
class Loaded:
    """A program as code, for one executor.

    rebuild        loads the program for other differentiated outputs; for a subset, from the same saved values
    accumulation   how gradients of the differentiated outputs accumulate
    waiting        the gradients of its module that wait for their reduction
    writes         inference may write into inputs while it runs
    differentiate  makes the backward of a program whose gradients are differentiated again
    """

    program: Program
    executor: Executor
    rebuild: Callable[[Wanted], Loaded] = field(repr=False)
    accumulation: Callable[[Wanted], Accumulation | None] = field(repr=False, default=lambda wanted: None)
    waiting: Waiting = field(repr=False, default_factory=Waiting)
    backend: Backend = Backend.EAGER
    writes: bool = False
    differentiate: Callable[[Program, Wanted], Program] = field(repr=False, default=differentiate_again)

    def __post_init__(self) -> None:
        program = self.program
        self.loader = Loader(self.executor, self.backend)
        self.results = [Placed(placed.layout, placed.shape, result_strides(placed)) for placed in program.outputs]
        self.differentiable = [placed.port.requires_grad for placed in program.outputs]
        nodes = self.program.forward.graph.nodes
        self.random = any(node.op == "call_function" and draws_random_numbers(node) for node in nodes)
        self.inputs = [self.loader.example(placed) for placed in program.inputs]
        self.parameters = [placed.port.role is Role.PARAMETER for placed in program.inputs]
        self.others = [i for i, held in enumerate(self.parameters) if not held]
        self._derived: dict[Wanted, tuple[tuple[int, ...], Loaded]] = {}

    @cached_property
    def forward(self) -> LoadedGraph:
        """From inputs to results and the values that the backward needs."""
        return self._forward(self.program.forward)

    @cached_property
    def inference(self) -> LoadedGraph:
        """From inputs to results."""
        return self._forward(self._to_results, self.inputs_as)

    @cached_property
    def _to_results(self) -> fx.GraphModule:
        return without_saved(self.program.forward, len(self.results))

    @cached_property
    def written(self) -> Mapping[int, int]:
        """The results in inference that are inputs written in place (written.py)."""
        if self.backend is not Backend.EAGER or not self.writes:
            return {}
        return written_in_place(self.program, self._to_results.graph)

    @cached_property
    def inputs_as(self) -> InputsAs:
        """How inference takes inputs. An input that only products and lookups read is loose: its part may be a view of
        the whole, so that a call copies no weights. (Compiled code relies on the strides of its inputs.)"""
        if self.backend is not Backend.EAGER:
            return AS_TRACED
        nodes = self._to_results.graph.find_nodes(op="placeholder")
        loose = frozenset(i for i, node in enumerate(nodes) if is_loose(node))
        return InputsAs(loose, frozenset(self.written.values()))

    def _forward(self, module: fx.GraphModule, inputs_as: InputsAs = AS_TRACED) -> LoadedGraph:
        return LoadedGraph(module, "forward", self.program.conversions, self.inputs, self.loader, inputs_as)

    @cached_property
    def backward(self) -> Backward:
        """From saved values and tangents to gradients."""
        return Backward(self.program, self._backward_examples, self.loader)

    @cached_property
    def accumulating(self) -> Accumulating | None:
        """The backwards whose reductions wait, or None if none can."""
        accumulation = self.accumulation(self.program.wanted)
        return Accumulating(accumulation, self._backward_examples, self.loader) if accumulation else None

    @cached_property
    def apart(self) -> list[set[int]]:
        """For each output, the outputs that can be differentiated after it, as their backwards share no saved value."""
        able = {i for i, differentiable in enumerate(self.differentiable) if differentiable}
        return [able - others for others in entangled(self.program)] if len(able) > 1 else [set() for _ in able]

    @cached_property
    def read(self) -> list[int]:
        """The parameters whose memory the backward reads directly, and not a copy."""
        nodes = self.program.forward.graph.nodes
        places = {node: i for i, node in enumerate(self.program.forward.graph.find_nodes(op="placeholder"))}
        saved = [n for n in next(iter(reversed(nodes))).args[0][len(self.results) :] if isinstance(n, fx.Node)]
        places_read = {places[memory] for memory in map(memory_of, saved) if memory in places}
        return sorted(i for i in places_read if self.parameters[i])

    def after(self, done: Iterable[int]) -> set[int]:
        """The outputs that can be differentiated when the outputs `done` have been."""
        return set.intersection(set(range(len(self.results))), *(self.apart[i] for i in done))

    def derived(self, asked: Wanted) -> tuple[tuple[int, ...], Loaded]:
        """A program with gradients that can be differentiated again, for tangents of the outputs `asked`. Returns the
        positions of the inputs with gradients, and the program from the inputs and the tangents to the outputs and
        those gradients."""
        if asked not in self._derived:
            first = self.differentiate(self.program, asked)
            program = gradient_program(first)
            again = self.differentiate(program, tuple(placed.port.requires_grad for placed in program.outputs))

            def of(wanted: Wanted) -> Loaded:
                return replace(self, program=again if wanted == again.wanted else of_outputs(again, wanted), rebuild=of,
                    accumulation=lambda wanted: None, waiting=Waiting(), writes=False)  # fmt: skip

            self._derived[asked] = first.places_of_gradients, of(again.wanted)
        return self._derived[asked]

    def forward_of(self, inputs: list[Any]) -> tuple[list[Any], list[Any]]:
        """The results for `inputs`, and the values that the backward needs."""
        values = self.forward.run(inputs)
        return values[: len(self.results)], values[len(self.results) :]

    @property
    def _backward_examples(self) -> list[Any]:
        if self.backend is Backend.EAGER:
            return []
        tangents = itertools.compress(self.program.outputs, self.program.wanted)
        return [*self.forward.examples[len(self.results) :], *map(self.loader.example, tangents)]

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs for the `tensors` of the program's inputs, in order."""
        # asking a split tensor for an attribute takes microseconds otherwise
        results: tuple[Tensor, ...] = as_object(without_casts(self._called), (), (tensors,), {})
        return results

    def _called(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        if self.program.backward is not None and torch.is_grad_enabled():
            results: tuple[Tensor, ...] = _Function.apply(self, *tensors)  # type: ignore[no-untyped-call]
            return results
        with torch.no_grad():
            inputs = self.executor.enter(tensors, self.program.inputs, self.inputs_as.views)
            values = self.inference.run(inputs)
            return tuple(self._results_of(values, tensors))

    def _results_of(self, values: Sequence[Any], tensors: Sequence[Tensor]) -> Iterator[Tensor]:
        """The results of a call in inference; an input that was written in place is returned itself."""
        if not self.written:
            yield from self.executor.leave(values, self.results, self.inference.code.shared)
            return
        kept, placed, shared = self._left
        left = iter(self.executor.leave(list(itertools.compress(values, kept)), placed, shared))
        for i, keep in enumerate(kept):
            yield next(left) if keep else _part(tensors[self.written[i]])

    @cached_property
    def _left(self) -> tuple[Sequence[bool], Sequence[Placed], Sequence[bool]]:
        """Which results in inference are not written in place, where they are, and whether they are copied."""
        kept = [i not in self.written for i in range(len(self.results))]
        shared = self.inference.code.shared
        return kept, [*itertools.compress(self.results, kept)], [*itertools.compress(shared, kept)]

    def gradients(self, primals: Sequence[Tensor], inputs: list[Any], holding: bool) -> tuple[Tensor | None, ...]:
        """The gradients of `primals`, from the saved values and tangents `inputs`. While `holding`, gradients that can
        wait are None; else all that wait are reduced with these."""
        backward, waiting = self.backward, self.waiting
        taken: dict[Reduces, list[WaitingGradient]] = {}
        kept: tuple[int, ...] = ()
        if holding and self.accumulating and all(primals[i].is_leaf for i in self.accumulating.inputs):
            backward, kept = self.accumulating.early, self.accumulating.inputs
        elif not holding and waiting.kept:
            taken = waiting.take()
            if own := taken.pop(self, None):
                assert self.accumulating is not None
                backward = self.accumulating.last
                inputs = [*inputs, *self.executor.unpack(list(chain(*(one.addends for one in own))))]
        values = backward.values(inputs)
        arriving = backward.places
        if kept:
            self._hold(primals, dict(zip(arriving, values, strict=True)))
        for loaded, each in taken.items():
            loaded.reduce(each)
        placed, shared = backward.placed, backward.shared
        if kept:
            ready = [i not in kept for i in arriving]
            arriving, values = (*itertools.compress(arriving, ready),), [*itertools.compress(values, ready)]
            placed, shared = [*itertools.compress(placed, ready)], [*itertools.compress(shared, ready)]
        results: list[Tensor | None] = [None] * len(primals)
        for i, gradient in zip(arriving, self.executor.leave(values, placed, shared), strict=True):
            results[i] = gradient_of(primals[i], gradient)
        return tuple(results)

    def _hold(self, primals: Sequence[Tensor], values: Mapping[int, Any]) -> None:
        """Add the addends `values` to those of the gradients that wait."""
        assert self.accumulating is not None
        self.waiting.drop()
        fresh = [(primals[i], self.executor.pack([values[i]])) for i in self.accumulating.inputs]
        if before := self.waiting.kept.get(self):
            self.waiting.kept[self] = [old.plus(addends) for old, (_, addends) in zip(before, fresh, strict=True)]
            return
        self.waiting.kept[self] = [
            WaitingGradient.of(primal, [addend.clone(memory_format=torch.contiguous_format) for addend in addends])
            for primal, addends in fresh
        ]

    def reduce(self, each: Sequence[WaitingGradient]) -> None:
        """Reduce the gradients in `each`, which have waited, and add them to those of their tensors."""
        assert self.accumulating is not None
        rest = self.accumulating.rest
        values = rest.values(self.executor.unpack(list(chain(*(kept.addends for kept in each)))))
        for kept, gradient in zip(each, self.executor.leave(values, rest.placed, rest.shared), strict=True):
            primal, arrived = kept.primal, gradient_of(kept.primal, gradient)
            primal.grad = arrived if primal.grad is None else primal.grad + arrived


def without_casts(run: Callable[..., T]) -> Callable[..., T]:
    """`run` itself, without autocast if that is on: a program has the casts of its function, where the function has
    them."""
    if not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")):
        return run

    def called(*args: Any) -> T:
        with without_autocast():
            return run(*args)

    return called


def result_strides(placed: PlacedPort) -> Strides | None:
    """The strides of a result on one device; for elements that share memory there, the strides of a copy."""
    val = placed.port.node.meta["val"]
    return (
        strides_of(torch.empty_like(val)) if placed.port.role is Role.RESULT and strides_of(val) is not None else None
    )


def without_saved(module: fx.GraphModule, outputs: int) -> fx.GraphModule:
    """`module` with its first `outputs` outputs only, and without the nodes that only the others need."""
    graph = fx.Graph()
    returned: Any = graph.graph_copy(module.graph, {})
    graph.output(tuple(returned[:outputs]))
    graph.eliminate_dead_code(is_impure_node=is_port)
    return Text(module, graph)


def _part(tensor: Tensor) -> Tensor:
    """This process's part of a tensor of a call."""
    return local_part_of(tensor) if hasattr(tensor, "full_tensor") else tensor


def _whole_gradient(gradient: Any) -> Tensor | None:
    """A gradient, unwrapped if it is a DTensor."""
    whole: Tensor | None = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return whole


class _Function(torch.autograd.Function):
    """The autograd node of one call."""

    @staticmethod
    def forward(ctx: Any, loaded: Loaded, *tensors: Tensor) -> tuple[Tensor, ...]:
        executor, count = loaded.executor, len(loaded.results)
        ctx.generators = states_of(tensors[0].device) if loaded.random else None
        values, saved = loaded.forward_of(executor.enter(tensors, loaded.program.inputs))
        results = executor.leave(values, loaded.results, loaded.forward.code.shared[:count])
        # autograd forbids writes into a view that is made here
        results = [result.detach() if is_view(result) else result for result in results]
        ctx.loaded, ctx.holding = loaded, bool(loaded.waiting.blocks)
        ctx.done = frozenset()  # the outputs whose backward has freed its saved values
        # Parameters live on anyway, and what the backward reads of them is in `saved`: to save them too takes a
        # microsecond each. But a write into a DTensor does not count as a write into its packed part.
        parameters: list[Tensor | None] = list(tensors)
        for i in loaded.others:
            parameters[i] = None
        ctx.parameters, ctx.versions = parameters, [*map(version_of, tensors)]
        kept = [*(tensors[i] for i in loaded.others), *executor.pack(saved)]
        ctx.held = _held(kept) if any(loaded.apart) else None
        if ctx.held is None:
            ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        if not all(loaded.differentiable):
            ctx.mark_non_differentiable(
                *(r for r, able in zip(results, loaded.differentiable, strict=True) if not able)
            )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        run = without_casts(_Function.backward_of)
        found: tuple[Tensor | None, ...] = as_object(run, (), (ctx, gradients), {})
        return found

    @staticmethod
    def backward_of(ctx: Any, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        """`backward`, with split tensors treated as objects: only their attributes are read."""
        # the gradient of a result may be split if it was computed with split tensors
        gradients = tuple([g if type(g) is Tensor else _whole_gradient(g) for g in gradients])
        again = torch.is_grad_enabled()  # with create_graph=True
        if any(g is not None and is_batched(g) for g in gradients):
            run = _Function.differentiable if again else functools.partial(_Function.gradients, free=False)
            return (None, *one_by_one(functools.partial(run, ctx), gradients))
        return (None, *(_Function.differentiable(ctx, gradients) if again else _Function.gradients(ctx, gradients)))

    @staticmethod
    def differentiable(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """The gradients as results of a call of their own, which autograd can differentiate again. It recomputes the
        forward with the same random numbers, and writes to no buffer."""
        loaded: Loaded = ctx.loaded
        results: list[Tensor | None] = [None] * len(ctx.versions)
        asked = tuple(g is not None for g in gradients)
        if not any(asked):
            return tuple(results)
        primals, _ = _saved(ctx)
        _check_unchanged(loaded.program.inputs, primals, ctx.versions)
        if not ctx.holding:
            for other, each in loaded.waiting.take().items():
                with torch.no_grad():
                    other.reduce(each)
        places, derived = loaded.derived(asked)
        with drawing_again(ctx.generators, primals[0].device):
            values = derived([*primals, *(g for g in gradients if g is not None)])
        for i, value in zip(places, values[len(asked) :], strict=True):
            results[i] = _as_gradient(primals[i], value)
        return tuple(results)

    @staticmethod
    def gradients(ctx: Any, gradients: Sequence[Tensor | None], free: bool = True) -> tuple[Tensor | None, ...]:
        """The gradients; `free`: no others will be asked for, unless autograd keeps its graph."""
        loaded: Loaded = ctx.loaded
        asked = tuple(g is not None for g in gradients)
        if not any(asked):
            return (None,) * len(ctx.versions)
        if ctx.done and not loaded.after(ctx.done).issuperset(itertools.compress(itertools.count(), asked)):
            raise RuntimeStateError(_FREED)
        primals, packed = _saved(ctx)
        keeper = _keeper(ctx)
        executor = loaded.executor
        saved = executor.unpack(packed)
        if asked != loaded.program.wanted:
            again = any(a and not w for a, w in zip(asked, loaded.program.wanted, strict=True))
            loaded = loaded.rebuild(asked)
            if again:
                # The gradient of this output was not planned for: run the forward again, with the same random numbers,
                # for the backward that is.
                _check_unchanged(loaded.program.inputs, primals, ctx.versions)
                with drawing_again(ctx.generators, primals[0].device):
                    _, saved = loaded.forward_of(executor.enter(primals, loaded.program.inputs))
        outputs = loaded.program.outputs
        tangents = [
            executor.enter([g], [placed])[0] for g, placed in zip(gradients, outputs, strict=True) if g is not None
        ]
        inputs = [*saved, *tangents]
        if free and keeper is not ctx and not _retains_graph():
            ctx.done |= set(itertools.compress(itertools.count(), asked))
        if free and (keeper is ctx or not ctx.loaded.after(ctx.done)):
            # Nothing else refers to the saved values here, so that each is freed after its last use. (With retain_graph
            # this keeps all.)
            keeper.maybe_clear_saved_tensors()
        del packed, saved, tangents
        return loaded.gradients(primals, inputs, ctx.holding)


_FREED = (
    "a backward has run through this call before, and freed what it had kept; call backward once, of the sum of the "
    "results, or with retain_graph=True before the last time (of results that share no operators one after another)"
)


class _Keeper(torch.autograd.Function):
    """Holds the saved values of a call for several backwards, one after another: autograd frees those of its own node
    in the first."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: Sequence[Tensor]) -> Tensor:
        ctx.save_for_backward(*kept)
        return anchor.clone()


def _held(kept: Sequence[Tensor]) -> Tensor:
    """A tensor whose node holds the tensors `kept`; no backward runs through it. (Up to PyTorch 2.11 a node frees its
    saved tensors together with the tensor.)"""
    with torch.enable_grad():
        held: Tensor = _Keeper.apply(torch.empty(0, requires_grad=True), kept)  # type: ignore[no-untyped-call]
    return held


def _saved(ctx: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors of a call, and the values that it saved beside them. Raises RuntimeStateError if they were freed, or
    if one that the backward reads was written into."""
    loaded: Loaded = ctx.loaded
    try:
        rest = iter(_keeper(ctx).saved_tensors)
    except RuntimeError as error:  # PyTorch's messages name no tensor
        _check_unchanged(loaded.program.inputs, ctx.parameters, ctx.versions)
        if "second time" in str(error):
            raise RuntimeStateError(_FREED) from error
        raise
    if [version_of(ctx.parameters[i]) for i in loaded.read] != [ctx.versions[i] for i in loaded.read]:
        read = [held if i in loaded.read else None for i, held in enumerate(ctx.parameters)]
        _check_unchanged(loaded.program.inputs, read, ctx.versions)
    primals = [next(rest) if held is None else held for held in ctx.parameters]
    return primals, list(rest)


def _keeper(ctx: Any) -> Any:
    """The node that holds the saved values of a call."""
    return ctx if ctx.held is None else ctx.held.grad_fn


def _retains_graph() -> bool:
    """Return whether the running backward keeps its graph."""
    probe: Any = _held(())
    probe.grad_fn.maybe_clear_saved_tensors()
    try:
        _ = probe.grad_fn.saved_tensors
    except RuntimeError:  # freed
        return False
    return True


def _check_unchanged(placed: Sequence[PlacedPort], primals: Sequence[Tensor | None], versions: Sequence[int]) -> None:
    """Raise RuntimeStateError if a tensor was written into since it had these versions."""
    for port, primal, version in zip(placed, primals, versions, strict=True):
        if primal is not None and version_of(primal) != version:
            raise RuntimeStateError(
                f"{port.port.role.value} {port.port.name} was changed in place after the forward that this is the "
                "backward of; call backward before what changes it, such as an optimizer's step"
            )


def _as_gradient(primal: Tensor, part: Tensor) -> Tensor:
    """Like `gradient_of`, but differentiable."""
    if not hasattr(primal, "full_tensor"):
        return part
    gradient: Tensor = _Gradient.apply(part, functools.partial(gradient_of, primal))  # type: ignore[no-untyped-call]
    return gradient


class _Gradient(torch.autograd.Function):
    """Turns a part of a gradient into the gradient of a parameter."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, placed: Callable[[Tensor], Tensor]) -> Tensor:
        gradient: Any = placed(part.detach())
        ctx.mesh, ctx.placements = gradient.device_mesh, gradient.placements
        return gradient  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor, None]:
        return gradient.redistribute(ctx.mesh, ctx.placements).to_local(), None

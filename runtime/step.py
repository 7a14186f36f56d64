"""One call of a compiled function: the forward graph runs, what the backward needs is saved, and autograd
calls the backward graph. The executor (simulated ranks or one rank of a process group) is an argument: with
simulated ranks a call takes and gives whole tensors, with one rank of a process group that rank's parts.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.autograd import forward_ad

from ..propagation.graph.graph import Text
from ..propagation.graph.nodes import draws_random_numbers
from ..propagation.graph.port import Role
from ..propagation.program.accumulate import Accumulation
from ..propagation.program.apart import entangled
from ..propagation.program.local_program import Conversion, PlacedPort
from ..propagation.program.step import Step, is_port
from ..propagation.torch_internals import is_batched
from ..strategy.choice import Choice
from ..strategy.errors import RuntimeStateError
from .assemble import assemble_code
from .functions import Run
from .inductor import compile_regions, example
from .instructions import Code, Mark
from .memory import memory_of
from .parameters import gradient_of
from .record import begin, marking, timed
from .slices import Placed
from .strides import Strides, strides_of
from .torch_internals import forward_level

Wanted = tuple[bool, ...]


class Executor(Protocol):
    """Runs code on values; a value is what stands for one tensor (a list of parts, or one rank's part).

    enter, leave    between the tensors of a call and values; what is shared leaves as a copy
    zeros           the value that is zero, for a gradient that did not come
    pack, unpack    between values and flat lists of tensors, for autograd to save
    load            a code as a function of values
    """

    def enter(self, tensors: Sequence[Tensor], placed: Sequence[PlacedPort]) -> list[Any]: ...

    def leave(self, values: Sequence[Any], placed: Sequence[Placed], shared: Sequence[bool]) -> list[Tensor]: ...

    def zeros(self, placed: PlacedPort, device: torch.device) -> Any: ...

    def pack(self, values: Sequence[Any]) -> list[Tensor]: ...

    def unpack(self, tensors: Sequence[Tensor]) -> list[Any]: ...

    def load(self, code: Code, mark: Mark | None = None) -> Run: ...


class Backend(Choice):
    """What runs the operators of a step."""

    EAGER = "eager"  # PyTorch, one after another
    INDUCTOR = "inductor"  # TorchInductor's kernels, one for each stretch between collectives


class Loaded:
    """A graph and the function that runs it for one executor.

    code       its instructions
    examples   fake tensors like its outputs, where the backend needs to know them
    """

    def __init__(
        self, module: fx.GraphModule, phase: str, reasons: Sequence[Conversion], examples: Sequence[Any], loader: Loader
    ) -> None:
        self.examples: list[Any] = []
        if loader.backend is Backend.INDUCTOR:
            module, self.examples = compile_regions(module, examples)
        self.code = assemble_code(module, phase, reasons)
        self._executor = loader.executor
        self._run = loader.executor.load(self.code)

    @cached_property
    def _timed(self) -> Run:
        return self._executor.load(self.code, marking(self.code))

    def run(self, inputs: list[Any]) -> list[Any]:
        """The values of the outputs for those of the inputs."""
        if not timed():
            return self._run(inputs)
        begin(inputs)
        return self._timed(inputs)


class Backward(Loaded):
    """The backward of a Step: from saved values and tangents to the gradients of the inputs that get one.

    arriving    for each input whether there is a gradient; an input on which no output depends gets none
    placed      where the gradients are
    shared      which of them are copied, as `Code.shared`
    """

    def __init__(self, step: Step, examples: Sequence[Any], loader: Loader) -> None:
        assert step.backward is not None
        super().__init__(step.backward, "backward", step.program.conversions, examples, loader)
        slots = iter(self.code.outputs)
        self.arriving = [needs and next(slots) is not None for needs in step.needed]
        self.placed = [Placed(p.layout.dual(), p.shape) for p in itertools.compress(step.program.inputs, self.arriving)]
        self.shared = [held for held, slot in zip(self.code.shared, self.code.outputs, strict=True) if slot is not None]

    def values(self, inputs: list[Any]) -> list[Any]:
        """The gradients as values, those that there are."""
        return [value for value in self.run(inputs) if value is not None]


class Accumulating:
    """The backwards of a Step whose reductions wait: see `Accumulation`."""

    def __init__(self, found: Accumulation, examples: Sequence[Any], loader: Loader) -> None:
        self.inputs = found.inputs
        self.early = Backward(found.early, examples, loader)
        places = [i in found.inputs for i in itertools.compress(itertools.count(), found.early.needed)]
        addends = [addend.contiguous() for addend in itertools.compress(self.early.examples, places)]
        self.last = Backward(found.last, [*examples, *addends], loader)
        waiting = tuple(i in found.inputs for i in range(len(found.rest.needed)))
        self.rest = Backward(replace(found.rest, needed=waiting), addends, loader)


@dataclass
class Waiting:
    """The gradients of one module that wait for their reduction. The backwards of calls inside of `blocks` add to them,
    and the next other one reduces them all.

    A `.grad` says whether what waits of it is still wanted: it is a zero while all of it waits, and who sets it to None
    (as an optimizer's zero_grad does), or fills it with zeros, drops what waits."""

    blocks: set[object] = field(default_factory=set)
    kept: dict[CompiledStep, list[Kept]] = field(default_factory=dict)

    def drop(self) -> None:
        """Forget what is not wanted any more."""
        for step, each in list(self.kept.items()):
            wanted = [kept.is_wanted() for kept in each]
            if not any(wanted):
                del self.kept[step]
            elif not all(wanted):
                self.kept[step] = [kept if want else kept.nothing() for kept, want in zip(each, wanted, strict=True)]

    def take(self) -> dict[CompiledStep, list[Kept]]:
        """All that waits, which waits no longer."""
        self.drop()
        taken, self.kept = self.kept, {}
        for kept in chain(*taken.values()):
            kept.release()
        return taken


@dataclass(frozen=True)
class Kept:
    """What waits of the gradient of one tensor. `.grad` was `seen` when that began (`made`: for this), and had been
    written `version` times."""

    primal: Tensor
    addends: list[Tensor]
    seen: Tensor
    version: int
    made: bool

    @classmethod
    def of(cls, primal: Tensor, addends: list[Tensor]) -> Kept:
        """The first of what waits."""
        made = primal.grad is None
        if made:
            primal.grad = torch.zeros_like(primal, requires_grad=False)
        assert primal.grad is not None
        return cls(primal, addends, primal.grad, primal.grad._version, made)

    def plus(self, addends: list[Tensor]) -> Kept:
        """With one more."""
        return replace(self, addends=list(map(torch.add, self.addends, addends)))

    def nothing(self) -> Kept:
        """What waits of a gradient that was dropped, beside others that were not."""
        return Kept.of(self.primal, list(map(torch.zeros_like, self.addends)))

    def is_wanted(self) -> bool:
        """Whether nobody has dropped the gradient."""
        found = self.primal.grad
        if found is None or not self._is_written():
            return found is not None
        total: Any = found.abs().sum()
        return bool(total.full_tensor() if hasattr(total, "full_tensor") else total)

    def release(self) -> None:
        """Nothing waits any longer: a zero that was only there to say so goes."""
        if self.made and not self._is_written():
            self.primal.grad = None

    def _is_written(self) -> bool:
        return self.primal.grad is not self.seen or self.seen._version != self.version


@dataclass(frozen=True)
class Loader:
    """What runs code, and in what form."""

    executor: Executor
    backend: Backend = Backend.EAGER

    def example(self, placed: PlacedPort) -> Any:
        """A fake tensor like the part of an input or output, where the backend needs one."""
        if self.backend is Backend.EAGER:
            return None
        return example(placed.local_shape, placed.dtype, placed.port.node.meta["val"].device)


@dataclass(eq=False)
class CompiledStep:
    """A Step as code, for one executor.

    rebuild        makes the Step for other differentiated outputs; for some of these, it takes the same saved values
    accumulation   says how gradients of the differentiated outputs accumulate
    waiting        the gradients of its module that wait for their reduction
    """

    step: Step
    executor: Executor
    rebuild: Callable[[Wanted], CompiledStep] = field(repr=False)
    accumulation: Callable[[Wanted], Accumulation | None] = field(repr=False, default=lambda wanted: None)
    waiting: Waiting = field(repr=False, default_factory=Waiting)
    backend: Backend = Backend.EAGER

    def __post_init__(self) -> None:
        program = self.step.program
        self.loader = Loader(self.executor, self.backend)
        self.results = [Placed(placed.layout, placed.shape, result_strides(placed)) for placed in program.outputs]
        self.differentiable = [placed.port.requires_grad for placed in program.outputs]
        nodes = self.step.forward.graph.nodes
        self.random = any(node.op == "call_function" and draws_random_numbers(node) for node in nodes)
        self.inputs = [self.loader.example(placed) for placed in program.inputs]
        self.parameters = [placed.port.role is Role.PARAMETER for placed in program.inputs]

    @cached_property
    def forward(self) -> Loaded:
        """From inputs to results and what the backward needs."""
        return self._forward(self.step.forward)

    @cached_property
    def inference(self) -> Loaded:
        """From inputs to results."""
        return self._forward(without_saved(self.step.forward, len(self.results)))

    def _forward(self, module: fx.GraphModule) -> Loaded:
        return Loaded(module, "forward", self.step.program.conversions, self.inputs, self.loader)

    @cached_property
    def backward(self) -> Backward:
        """From what the forward saved and tangents to gradients."""
        return Backward(self.step, self._backward_examples, self.loader)

    @cached_property
    def accumulating(self) -> Accumulating | None:
        """The backwards whose reductions wait, if any can."""
        found = self.accumulation(self.step.wanted)
        return Accumulating(found, self._backward_examples, self.loader) if found else None

    @cached_property
    def apart(self) -> list[set[int]]:
        """For each output those that may be differentiated after it was, as they need nothing of what it needs."""
        able = {i for i, differentiable in enumerate(self.differentiable) if differentiable}
        return [able - others for others in entangled(self.step.program)] if len(able) > 1 else [set() for _ in able]

    @cached_property
    def read(self) -> list[int]:
        """The parameters of which the backward reads the memory that they have: not a copy, nor nothing."""
        nodes = self.step.forward.graph.nodes
        places = {node: i for i, node in enumerate(self.step.forward.graph.find_nodes(op="placeholder"))}
        saved = [n for n in next(iter(reversed(nodes))).args[0][len(self.results) :] if isinstance(n, fx.Node)]
        found = {places[memory] for memory in map(memory_of, saved) if memory in places}
        return sorted(i for i in found if self.parameters[i])

    def after(self, done: Iterable[int]) -> set[int]:
        """The outputs that may be differentiated when the outputs `done` were."""
        return set.intersection(set(range(len(self.results))), *(self.apart[i] for i in done))

    @property
    def _backward_examples(self) -> list[Any]:
        if self.backend is Backend.EAGER:
            return []
        tangents = itertools.compress(self.step.program.outputs, self.step.wanted)
        return [*self.forward.examples[len(self.results) :], *map(self.loader.example, tangents)]

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs for the `tensors` of the program's inputs, in order."""
        if forward_level() >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors):
            raise RuntimeStateError(_NO_FORWARD_MODE)
        if self.step.backward is not None and torch.is_grad_enabled():
            results: tuple[Tensor, ...] = _Function.apply(self, *tensors)  # type: ignore[no-untyped-call]
            return results
        with torch.no_grad():
            values = self.inference.run(self.executor.enter(tensors, self.step.program.inputs))
            return tuple(self.executor.leave(values, self.results, self.inference.code.shared))

    def gradients(self, primals: Sequence[Tensor], inputs: list[Any], holding: bool) -> tuple[Tensor | None, ...]:
        """The gradients of `primals`, from the saved values and tangents `inputs`. While `holding`, those that can wait
        are None; else all that wait are reduced with them."""
        backward, waiting = self.backward, self.waiting
        taken: dict[CompiledStep, list[Kept]] = {}
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
        arriving = list(itertools.compress(range(len(primals)), backward.arriving))
        if kept:
            self._hold(primals, dict(zip(arriving, values, strict=True)))
        for step, each in taken.items():
            step._reduce(each)
        ready = [i not in kept for i in arriving]
        left = self.executor.leave(*(list(itertools.compress(every, ready))
                                     for every in (values, backward.placed, backward.shared)))  # fmt: skip
        found: list[Tensor | None] = [None] * len(primals)
        for i, gradient in zip(itertools.compress(arriving, ready), left, strict=True):
            found[i] = gradient_of(primals[i], gradient)
        return tuple(found)

    def _hold(self, primals: Sequence[Tensor], values: Mapping[int, Any]) -> None:
        """Add the addends `values` of the gradients that wait to those that are there."""
        assert self.accumulating is not None
        self.waiting.drop()
        fresh = [(primals[i], self.executor.pack([values[i]])) for i in self.accumulating.inputs]
        if before := self.waiting.kept.get(self):
            self.waiting.kept[self] = [old.plus(addends) for old, (_, addends) in zip(before, fresh, strict=True)]
            return
        self.waiting.kept[self] = [
            Kept.of(primal, [addend.clone(memory_format=torch.contiguous_format) for addend in addends])
            for primal, addends in fresh
        ]

    def _reduce(self, each: Sequence[Kept]) -> None:
        """Reduce the gradients that waited, and add them to those of their tensors."""
        assert self.accumulating is not None
        rest = self.accumulating.rest
        values = rest.values(self.executor.unpack(list(chain(*(kept.addends for kept in each)))))
        for kept, gradient in zip(each, self.executor.leave(values, rest.placed, rest.shared), strict=True):
            primal, found = kept.primal, gradient_of(kept.primal, gradient)
            primal.grad = found if primal.grad is None else primal.grad + found


def result_strides(placed: PlacedPort) -> Strides | None:
    """The strides of a result, as one device would have them; where elements share memory there, those of a copy."""
    val = placed.port.node.meta["val"]
    return (
        strides_of(torch.empty_like(val)) if placed.port.role is Role.RESULT and strides_of(val) is not None else None
    )


def without_saved(module: fx.GraphModule, outputs: int) -> fx.GraphModule:
    """`module` with its first `outputs` outputs only, and without what only the others need."""
    graph = fx.Graph()
    returned: Any = graph.graph_copy(module.graph, {})
    graph.output(tuple(returned[:outputs]))
    graph.eliminate_dead_code(is_impure_node=is_port)
    return Text(module, graph)


class _Function(torch.autograd.Function):
    """The autograd node of one call."""

    @staticmethod
    def forward(ctx: Any, compiled: CompiledStep, *tensors: Tensor) -> tuple[Tensor, ...]:
        executor, count = compiled.executor, len(compiled.results)
        ctx.generators = generators(tensors[0].device) if compiled.random else None
        values = compiled.forward.run(executor.enter(tensors, compiled.step.program.inputs))
        results = executor.leave(values[:count], compiled.results, compiled.forward.code.shared[:count])
        # autograd would let nobody write into a view that is made here
        results = [result.detach() if result._is_view() else result for result in results]
        ctx.compiled, ctx.holding = compiled, bool(compiled.waiting.blocks)
        ctx.done = frozenset()  # the outputs whose backward has freed what it needs
        # Parameters live on anyway, and what the backward reads of them is packed: to save them too takes a
        # microsecond for each. But to write into a DTensor does not count as a write into the part that is packed.
        ctx.parameters = [t if held else None for t, held in zip(tensors, compiled.parameters, strict=True)]
        ctx.versions = [t._version for t in tensors]
        others = [t for t, held in zip(tensors, compiled.parameters, strict=True) if not held]
        kept = [*others, *executor.pack(values[count:])]
        ctx.keeper = _keeper(kept) if any(compiled.apart) else ctx
        if ctx.keeper is ctx:
            ctx.save_for_backward(*kept)
        ctx.set_materialize_grads(False)
        if not all(compiled.differentiable):
            ctx.mark_non_differentiable(
                *(r for r, able in zip(results, compiled.differentiable, strict=True) if not able)
            )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        roots = _roots(ctx, gradients) if torch.is_grad_enabled() else ()  # create_graph=True
        with torch.no_grad():
            results = _Function.gradients(ctx, gradients)
        if roots:
            results = _Once.apply(len(roots), *roots, *results)  # type: ignore[no-untyped-call]
        return (None, *results)

    @staticmethod
    def gradients(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        compiled: CompiledStep = ctx.compiled
        asked = tuple(g is not None for g in gradients)
        if not any(asked):
            return (None,) * len(ctx.versions)
        if any(g is not None and is_batched(g) for g in gradients):
            raise RuntimeStateError(_NOT_BATCHED)
        if ctx.done and not compiled.after(ctx.done).issuperset(itertools.compress(itertools.count(), asked)):
            raise RuntimeStateError(_FREED)
        try:
            rest = iter(ctx.keeper.saved_tensors)
        except RuntimeError as error:  # PyTorch's texts name no tensor
            _check_unchanged(compiled.step.program.inputs, ctx.parameters, ctx.versions)
            if "second time" in str(error):
                raise RuntimeStateError(_FREED) from error
            raise
        if any(ctx.parameters[i]._version != ctx.versions[i] for i in compiled.read):
            read = [held if i in compiled.read else None for i, held in enumerate(ctx.parameters)]
            _check_unchanged(compiled.step.program.inputs, read, ctx.versions)
        primals = [next(rest) if held is None else held for held in ctx.parameters]
        packed = list(rest)
        executor = compiled.executor
        saved = executor.unpack(packed)
        if asked != compiled.step.wanted:
            again = any(a and not w for a, w in zip(asked, compiled.step.wanted, strict=True))
            compiled = compiled.rebuild(asked)
            if again:
                # An output whose gradient was not planned for: run the forward again, with the random numbers that it
                # drew, for the backward that is.
                _check_unchanged(compiled.step.program.inputs, primals, ctx.versions)
                with _drawing_again(ctx.generators, primals[0].device):
                    values = compiled.forward.run(executor.enter(primals, compiled.step.program.inputs))
                saved = values[len(compiled.results) :]
        outputs = compiled.step.program.outputs
        tangents = [
            executor.enter([g], [placed])[0] for g, placed in zip(gradients, outputs, strict=True) if g is not None
        ]
        inputs = [*saved, *tangents]
        if ctx.keeper is not ctx and not _retains_graph():
            ctx.done |= set(itertools.compress(itertools.count(), asked))
        if ctx.keeper is ctx or not ctx.compiled.after(ctx.done):
            # Nothing else holds what was saved now, so that each value is let go after its last use. (With
            # retain_graph this keeps all.)
            ctx.keeper.maybe_clear_saved_tensors()
        del rest, packed, saved, tangents
        return compiled.gradients(primals, inputs, ctx.holding)


_NO_FORWARD_MODE = (
    "a sharded function has no forward-mode derivative (jvp, forward_ad); compute it with the plain function"
)
_NOT_BATCHED = (
    "a sharded function has no gradients for several tangents at once (vmap, vectorize=True, is_grads_batched=True); "
    "ask for those of one after another"
)
_FREED = (
    "a backward has run through this call before, and freed what it had kept; call backward once, of the sum of the "
    "results, or with retain_graph=True before the last time (of results that share no operators one after another)"
)


class _Keeper(torch.autograd.Function):
    """Holds what a call saved where several backwards may run through it, one after another: of its own node autograd
    lets it go with the first."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, kept: Sequence[Tensor]) -> Tensor:
        ctx.save_for_backward(*kept)
        return anchor.clone()


def _keeper(kept: Sequence[Tensor]) -> Any:
    """A node that holds the tensors `kept`, and through which no backward runs."""
    with torch.enable_grad():
        held: Tensor = _Keeper.apply(torch.empty(0, requires_grad=True), kept)  # type: ignore[no-untyped-call]
    return held.grad_fn


def _retains_graph() -> bool:
    """Whether the backward that runs was asked to keep what it needs."""
    probe = _keeper(())
    probe.maybe_clear_saved_tensors()
    try:
        _ = probe.saved_tensors
    except RuntimeError:  # freed
        return False
    return True


def _check_unchanged(placed: Sequence[PlacedPort], primals: Sequence[Tensor | None], versions: Sequence[int]) -> None:
    """Raise RuntimeStateError where a tensor was written into since it had these versions."""
    for port, primal, version in zip(placed, primals, versions, strict=True):
        if primal is not None and primal._version != version:
            raise RuntimeStateError(
                f"{port.port.role.value} {port.port.name} was changed in place after the forward that this is the "
                "backward of; call backward before what changes it, such as an optimizer's step"
            )


class _Once(torch.autograd.Function):
    """Gradients as they are, after the tensors that they follow from; to differentiate them again by one of these is an
    error instead of a silent zero."""

    @staticmethod
    def forward(ctx: Any, roots: int, *tensors: Tensor | None) -> tuple[Tensor | None, ...]:
        return tensors[roots:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeStateError(
            "a sharded function has no second derivative: its gradients, made with create_graph=True, cannot be "
            "differentiated again; compute them with the plain function"
        )


def _roots(ctx: Any, gradients: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """What the gradients of a call follow from, and may be differentiated by."""
    try:
        saved = ctx.keeper.saved_tensors
    except RuntimeError:  # freed; the backward says so
        saved = ()
    return tuple(t for t in (*saved, *ctx.parameters, *gradients) if t is not None and t.requires_grad)


Generators = tuple[Tensor, Tensor | None]  # the states of the CPU's and, where there is one, the GPU's


def put_back(states: Generators, device: torch.device) -> None:
    """Set the generators to `states` again."""
    cpu, gpu = states
    torch.set_rng_state(cpu)
    if gpu is not None:
        torch.cuda.set_rng_state(gpu, device)


def generators(device: torch.device) -> Generators:
    """The states of the generators of which a step on this device draws."""
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


@contextlib.contextmanager
def _drawing_again(states: Generators | None, device: torch.device) -> Iterator[None]:
    """Draw the numbers that come after `states` of the generators again, and leave the generators as they are."""
    if states is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        put_back(states, device)
        yield

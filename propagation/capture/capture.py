"""From a callable and one call of it to a Graph: `torch.export`, then a few named passes.

    trace          (tracing.py) torch.export, non-strict, with the modes and preparations that it needs; then
                   run_decompositions: no in-place operators, `linear`, `layer_norm`, `cross_entropy_loss` and
                   `scaled_dot_product_attention` whole, autocast as casts, mutated buffers as outputs
    ports          the inputs and outputs, by role and name; the inputs of one tied parameter become one
    passes         the list in `_passes`, below

A function whose course depends on values is captured again with its questions answered (questions.py): first none, then
conditions, then numbers as well. Where it raises on an assumed answer, the other answer is tried.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.export.graph_signature import InputKind, OutputKind

from ...strategy.errors import CaptureError, PartwayError
from ..graph.graph import Graph, verify
from ..graph.nodes import describe, source_of, value
from ..graph.port import Port, Role
from ..graph.question import Answer, Values
from ..graph.structure import Call, Path, Structure, flatten_call, name_of, state_of
from ..ops.random_numbers import RandomNumbers
from ..rules.layers.padded_convolution import absorb
from ..rules.layers.recurrent import true_states
from ..rules.table import expand
from ..torch_internals import graph_module
from .export.autocast import AutocastOnMeta, without_autocast
from .export.failures import Undecided
from .export.preparation import check_dtypes, drawing_nothing, warn_of_updates
from .export.questions import Answerable, Answering
from .export.source_lines import callers_line
from .export.tracing import Attempt, Dims, EffectListener, NoEffects, Traced, checked, trace
from .hooks import Hooks
from .rewrites.autograd_functions import adopt
from .rewrites.cleanup import leave_meta, name_manuals, prune
from .rewrites.control_flow import flatten_control
from .rewrites.experts import form_experts
from .rewrites.masks import drop_masks
from .symbols import AnySize, OtherSizesError, any_size, counted

Pass = Callable[[fx.GraphModule], None]
Around = Callable[[Pass, fx.GraphModule, Sequence[Port]], None]


def applied(each: Pass, module: fx.GraphModule, inputs: Sequence[Port]) -> None:
    """Apply a pass to `module`, whose inputs are `inputs`. A caller of `capture` may wrap passes in a function of its
    own instead."""
    each(module)


@dataclass(frozen=True)
class CaptureOptions:
    """The settings, apart from the call, that determine a graph.

    batch_norm_parts   the number of parts into which BatchNorm splits a training batch, each with its own statistics
    random_numbers     how random numbers are drawn
    own                operators with rules of users, which are not rewritten
    gradients          whether the function runs with gradients enabled; a graph with gradients also serves calls
                       without, unless the function asks whether they are enabled
    late               the answers to the first questions that the function asks late (questions.py)
    returns_given      whether tensors of the call that the function returns in an object belong to the caller and are
                       not results: `Structure.build` takes them as arguments
    """

    batch_norm_parts: int = 1
    random_numbers: RandomNumbers = RandomNumbers.COUNTER
    own: Collection[Any] = ()
    gradients: bool = True
    late: tuple[Answer, ...] = ()
    returns_given: bool = False


_DEFAULTS = CaptureOptions()


def capture(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CaptureOptions = _DEFAULTS,
    values: Values | None = None,
    effects: EffectListener | None = None,
    around: Around = applied,
) -> Graph:
    """Capture one call of `fn` (a function or nn.Module; meta tensors welcome) as a Graph.

    values    the tensors of the call, which answer the questions of `fn` (questions.py); without them it may ask none
    effects   records the values that `fn` leaves behind; their tensors become outputs of the graph, before the
              conditions that `fn` asks late
    around    applies each pass

    Raises CaptureError when torch.export cannot make one static graph, or when `fn` itself raises; the error names the
    line of the caller's code, and its cause is the original exception. An exception that `fn` raises because of an
    answer passes through unchanged. Raises StrategyError for a training BatchNorm whose batch `batch_norm_parts` does
    not divide.
    """
    call = flatten_call(fn, args, kwargs)
    undecided: Undecided | None = None
    for level in Answerable if values else (Answerable.NOTHING,):
        try:
            attempt, traced = _traced(fn, call, level, options, values, effects or NoEffects())
        except Undecided as error:
            undecided = error
            continue
        graph = _graph(traced, attempt, options, around)
        asked = tuple(attempt.answering.asked) if attempt.answering else ()
        return _checked(replace(graph, asked=asked), traced)
    assert undecided is not None
    raise CaptureError(str(undecided)) from undecided.__cause__


def capture_any_size(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    changing: Dims,
    dense: bool = True,
    options: CaptureOptions = _DEFAULTS,
    effects: EffectListener | None = None,
) -> AnySize:
    """Capture `fn` for all sizes of the dims `changing` of a call's tensors, whose own sizes there are at least 2.
    `dense`: as if all tensors were contiguous; otherwise with their own strides, for a function that asks for them.

    Raises CaptureError where `capture` does, and where `fn` asks for values.
    """
    return _with_symbols(fn, flatten_call(fn, args, kwargs), changing, dense, options, effects)


def _with_symbols(
    fn: Callable[..., Any],
    call: Call,
    changing: Dims,
    dense: bool,
    options: CaptureOptions,
    effects: EffectListener | None,
) -> AnySize:
    """Capture `fn` with symbols for the sizes `changing`, and compare the graph at those of `call` with that of a
    capture without symbols."""
    effects = effects or NoEffects()
    given = tuple(t.contiguous() if dense and t.layout is torch.strided else t for t in call.tensors)
    args, kwargs = call.build(given)
    plain = capture(fn, args, kwargs, options, effects=effects)
    effects.finish()
    attempt = replace(_attempt(fn, call, None, options, effects, checked=True), changing=changing, dense=dense)
    with _no_other_sizes():
        with drawing_nothing(None):
            try:
                captured = any_size(attempt, trace(attempt))
            except AutocastOnMeta as found:
                attempt = replace(attempt, hooks=Hooks(), stands_for=found.device)
                captured = any_size(attempt, trace(attempt))
        if captured.dims:
            _check_alike(_graph_at(captured, replace(call, tensors=given), options, applied), plain)
    return captured


@contextlib.contextmanager
def _no_other_sizes() -> Iterator[None]:
    """A block in which everything that a graph with symbols lacks is a CaptureError."""
    try:
        yield
    except OtherSizesError as error:
        raise CaptureError(str(error)) from error
    except Undecided as error:
        raise CaptureError(str(error)) from error.__cause__


def capture_counting(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    numbers: Sequence[Path],
    options: CaptureOptions = _DEFAULTS,
    effects: EffectListener | None = None,
    around: Around = applied,
) -> Graph:
    """The graph of `fn` for all calls that differ from this one only in `numbers`, which become inputs; its `counts`
    are the conditions on them.

    Raises CaptureError where `capture` does, where `fn` asks for values, and where a size depends on a number.
    """
    call = flatten_call(fn, args, kwargs).counting(numbers)
    if call is None:
        raise CaptureError(f"a number of {name_of(fn)} is none, or less than 2")
    first = len(call.tensors) - call.numbers
    changing = frozenset((place, 0) for place in range(first, len(call.tensors)))
    captured = _with_symbols(fn, call, changing, False, options, effects)
    given = [int(number) for number in call.tensors[first:]]
    for place, _ in sorted(changing - captured.dims):
        raise CaptureError(f"it counts on the number {given[place - first]}")
    if captured.attempt.hooks.called().by_number:
        raise CaptureError("it has hooks that run in each call")
    with _no_other_sizes():
        traced, counts = counted(captured)
        if not counts.hold(given):
            raise CaptureError(f"what it computes of {given} is larger than a tensor holds")
        graph = _graph(traced, replace(captured.attempt, call=call), options, around)
        return replace(_checked(graph, traced), counts=counts)


def graph_at(
    captured: AnySize,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CaptureOptions = _DEFAULTS,
    around: Around = applied,
) -> Graph:
    """The graph of a call of a function captured for any size, with the same `options`. Raises OtherSizesError where a
    capture of the call might give another graph."""
    return _graph_at(captured, flatten_call(captured.attempt.fn, args, kwargs), options, around)


def _graph_at(captured: AnySize, call: Call, options: CaptureOptions, around: Around) -> Graph:
    attempt, traced = captured.at(call)
    try:
        return _checked(_graph(checked(traced, attempt.fn), attempt, options, around), traced)
    except Undecided as error:
        raise OtherSizesError(str(error)) from error


def _check_alike(graph: Graph, plain: Graph) -> None:
    """Raise CaptureError unless the graph captured with symbols equals the one captured without. Python may ask whether
    a size is an int, or write it into a string, and torch records no guard."""
    if _texts(graph) != _texts(plain):
        raise CaptureError("it does something else where torch has symbols for sizes, as where it asks for their type")


def _texts(graph: Graph) -> list[Any]:
    """A graph as text, with the names of its inputs and numbers for its operators. Numbers that it returns are plain
    values, as in a capture without symbols."""
    numbers = {port.node: number for port in graph.outputs if (number := _number_of(port.node)) is not None}
    nodes = [node for node in graph.nodes if node not in numbers]
    names: dict[fx.Node, str] = {port.node: port.name for port in graph.inputs}
    names |= {node: str(place) for place, node in enumerate(nodes)}
    read = [fx.map_arg((node.args, node.kwargs), names.__getitem__) for node in nodes]
    texts: list[Any] = [f"{node.target} {each} {describe(node)}" for node, each in zip(nodes, read, strict=True)]
    texts += [(port.role, names[port.node]) for port in graph.outputs if port.node not in numbers]
    for role, structure in ((Role.RESULT, graph.result), (Role.LEFT, graph.left)):
        if structure is not None:
            values = [numbers.get(port.node) for port in graph.outputs if port.role is role]
            texts.append(structure.telling(iter(values)).key())
    return texts


def _number_of(node: fx.Node) -> bool | int | float | None:
    """The number that a node returns, if it is a constant of the graph."""
    if node.target is not torch.ops.aten.scalar_tensor.default or isinstance(node.args[0], fx.Node):
        return None
    kind = {torch.bool: bool, torch.int64: int, torch.float64: float}.get(value(node).dtype)
    number: Any = node.args[0]
    return kind(number) if kind else None


def _checked(graph: Graph, traced: Traced) -> Graph:
    """The graph with the tensors that the trace read, verified. Warns of updates in checkpointed regions."""
    warn_of_updates(graph)
    return verify(check_dtypes(replace(graph, read=tuple(traced.read))))


def _attempt(
    fn: Callable[..., Any],
    call: Call,
    answering: Answering | None,
    options: CaptureOptions,
    effects: EffectListener,
    checked: bool,
) -> Attempt:
    return Attempt(fn, call, answering, effects, Hooks(), checked, options.gradients, options.returns_given)


def _traced(
    fn: Callable[..., Any],
    call: Call,
    level: Answerable,
    options: CaptureOptions,
    values: Values | None,
    effects: EffectListener,
) -> tuple[Attempt, Traced]:
    """Trace `fn` with questions up to `level` answered, on the first answers to late questions on which it does not
    raise."""
    may_draw = options.random_numbers is not RandomNumbers.TORCH
    assumed: Sequence[Answer] = options.late
    stands_for = None
    while True:
        answering = None
        if values and level is not Answerable.NOTHING:
            answering = Answering(level, values, may_draw, lambda: callers_line(traceback.extract_stack(), fn), assumed)
        attempt = _attempt(fn, call, answering, options, effects, checked=values is not None)
        attempt = replace(attempt, stands_for=stands_for)
        try:
            with drawing_nothing(answering):
                return attempt, checked(trace(attempt), fn)
        except AutocastOnMeta as found:
            stands_for = found.device
        except (PartwayError, Undecided):
            raise
        except Exception:  # raised by `fn` on these answers
            others = _other_answers(answering.assumed if answering else [], len(options.late))
            if others is None:
                raise
            assumed = others


def _other_answers(assumed: Sequence[Answer], known: int) -> Sequence[Answer] | None:
    """The next combination of answers to assume after `fn` raised on `assumed`, of which the first `known` are fixed;
    None after the last combination."""
    last = max((i for i, answer in enumerate(assumed) if i >= known and not answer), default=None)
    return None if last is None else (*assumed[:last], True)


def _graph(traced: Traced, attempt: Attempt, options: CaptureOptions, around: Around) -> Graph:
    """The graph of a traced call."""
    module, hooks = graph_module(traced.module, traced.module.graph), attempt.hooks
    hooks.place(module)
    inputs = input_ports(traced, module, attempt.call, attempt.fn)
    outputs = output_ports(traced, module, inputs)
    device = "meta" if attempt.stands_for else next((value(port.node).device.type for port in inputs.ports), "cpu")
    with without_autocast():
        for each in _passes(inputs, outputs, device, options):
            around(each, module, inputs.ports)
    hooks.check(module)
    graph = Graph(
        module, tuple(inputs.ports), (), traced.result, inputs.aliases, inputs.constants, device, left=traced.left,
        hooks=hooks.called(),
    )  # fmt: skip
    return replace(graph, outputs=tuple(_final_ports(graph, outputs)))


def _passes(inputs: InputPorts, outputs: list[Port], device: str, options: CaptureOptions) -> Iterator[Pass]:
    """The passes over the module of a graph, in order. Each changes it in place; capture owns the module."""

    def expand_operators(module: fx.GraphModule) -> None:
        written = expand(module, options.batch_norm_parts, options.random_numbers, options.own)
        outputs.extend(unseen_updates(module, written, inputs.ports, outputs))

    if device == "meta":
        yield leave_meta  # tensors of the meta device are planned as on the CPU
    yield true_states  # the states of LSTMs get their real shapes in place of the traced ones
    yield adopt  # the backward of a torch.autograd.Function becomes one that autograd derives
    yield flatten_control  # loops are unrolled, and branches become one operator each
    yield drop_masks  # attention with a causal mask is_causal, without the mask
    yield form_experts  # mixtures of experts become rows that are dispatched and combined
    yield expand_operators  # operators whose rule would not be local become sums and pointwise operators
    yield name_manuals  # calls of manual functions get the names of their functions
    yield absorb  # convolutions take over the padding of their operands
    yield prune  # views become reshapes; asserts and dead nodes go


def _final_ports(graph: Graph, outputs: Sequence[Port]) -> Iterator[Port]:
    """The `outputs` with the nodes that the final graph returns, and whether a gradient reaches them."""
    returned = next(node for node in graph.module.graph.nodes if node.op == "output").args[0]
    differentiable = graph.differentiable
    for node, port in zip(returned, outputs, strict=True):
        needs = port.role is not Role.BUFFER_UPDATE and source_of(node) in differentiable
        yield Port(node, port.role, port.name, requires_grad=needs)


# -- The inputs and outputs of a graph by role and name, from torch.export's signature

_WRITTEN = "the function writes to {!r} in place; return the new value, or keep it in a buffer"
_UPDATES = {Role.BUFFER: Role.BUFFER_UPDATE, Role.INPUT: Role.INPUT_UPDATE}


@dataclass(frozen=True)
class InputPorts:
    """The inputs of a graph. `aliases` maps the other names of a tied parameter to the one that is an input."""

    ports: list[Port] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)


def input_ports(traced: Traced, module: fx.GraphModule, call: Call, fn: Callable[..., Any]) -> InputPorts:
    """The ports of the inputs. The inputs of one tied parameter become one (in place).

    Raises CaptureError for an input that is not a tensor.
    """
    placeholders = {node.name: node for node in module.graph.nodes if node.op == "placeholder"}
    inputs, state, first = InputPorts(), state_of(fn), dict[int, Port]()
    arguments = iter(zip(call.tensors, call.names, call.arguments, strict=True))
    for spec in traced.signature.input_specs:
        node = placeholders[spec.arg.name]
        name = _own_name(spec.target)
        match spec.kind:
            case InputKind.PARAMETER | InputKind.BUFFER:
                role = Role.PARAMETER if spec.kind is InputKind.PARAMETER else Role.BUFFER
                tensor = state[name]
                port = Port(node, role, name, requires_grad=tensor.requires_grad)
                if id(tensor) in first:  # tied: two names, one tensor
                    node.replace_all_uses_with(first[id(tensor)].node)
                    inputs.aliases[name] = first[id(tensor)].name
                    module.graph.erase_node(node)
                    continue
                first[id(tensor)] = port
            case InputKind.CONSTANT_TENSOR:
                tensor = inputs.constants[name] = traced.constants[spec.target or ""]
                port = Port(node, Role.CONSTANT, name, requires_grad=tensor.requires_grad)
            case InputKind.USER_INPUT:
                tensor, name, argument = next(arguments)
                port = Port(node, Role.INPUT, name, argument, tensor.requires_grad)
            case InputKind.CUSTOM_OBJ:
                kind = type(traced.constants.get(spec.target or "", None)).__name__
                raise CaptureError(
                    f"{name_of(fn)} uses an object that a graph cannot hold, a {kind}; a torch.Generator is not "
                    "needed: random numbers follow torch.manual_seed, alike on every rank"
                )
            case _:
                raise CaptureError(f"inputs of kind {spec.kind} ({spec.arg.name}) are not supported")
        inputs.ports.append(port)
    return inputs


def output_ports(traced: Traced, module: fx.GraphModule, inputs: InputPorts) -> list[Port]:
    """The ports of the outputs. Raises CaptureError for a parameter or constant that the function writes to."""
    returned = next(node for node in module.graph.nodes if node.op == "output").args[0]
    names = {port.node.name: port.name for port in inputs.ports}
    outputs: list[Port] = []
    results = iter(
        [
            *((Role.RESULT, name) for name in result_names(traced.result)),
            *((Role.LEFT, f"left[{i}]") for i in range(traced.left.count())),
        ]
    )
    for node, spec in zip(returned, traced.signature.output_specs, strict=True):
        target = spec.target or ""
        match spec.kind:
            case OutputKind.USER_OUTPUT:
                outputs.append(Port(node, *next(results)))
            case OutputKind.BUFFER_MUTATION:
                outputs.append(Port(node, Role.BUFFER_UPDATE, _own_name(target)))
            case OutputKind.USER_INPUT_MUTATION:
                outputs.append(Port(node, Role.INPUT_UPDATE, names[target]))
            case _:
                raise CaptureError(_WRITTEN.format(names.get(target, _own_name(target))))
    return outputs


def unseen_updates(
    module: fx.GraphModule, written: Mapping[fx.Node, fx.Node], inputs: list[Port], outputs: list[Port]
) -> list[Port]:
    """The ports of buffers and inputs whose writes only expansion revealed. They become outputs (in place), after all
    others. Raises CaptureError for a write to a parameter or constant."""
    returned = next(node for node in module.graph.nodes if node.op == "output")
    known = {port.name for port in outputs if port.role in _UPDATES.values()}
    updates: list[Port] = []
    for port in inputs:
        if port.node in written and port.role not in _UPDATES:
            raise CaptureError(_WRITTEN.format(port.name))
        if port.node in written and port.name not in known:
            updates.append(Port(written[port.node], _UPDATES[port.role], port.name))
    returned.args = ((*returned.args[0], *(port.node for port in updates)),)
    return updates


def result_names(result: Structure) -> tuple[str, ...]:
    """A name for each tensor of a result: `result`, or `result[0]`, `result[1]`, ..."""
    tensors = result.count()
    return ("result",) if tensors == 1 else tuple(f"result[{i}]" for i in range(tensors))


def _own_name(target: str | None) -> str:
    """The name of a parameter or buffer in the function's module, which is the attribute `fn` of the traced module."""
    return (target or "").removeprefix("fn.")

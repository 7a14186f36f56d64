"""From a plan's choices to the program that one rank runs: local operators, and conversions between layouts.

Every tensor is converted at most once into each layout that its consumers want, so that their gradients are summed
before a single collective.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from ...strategy.cut import SliceWindow
from ...strategy.errors import VerifyError
from ...strategy.layout import Layout
from ...strategy.layout import layout as layout_of
from ...strategy.placement import REPLICATE, Kind, Placement, Shard, kind
from ..cost.conversion import ConversionStep, once_more, with_cuts
from ..cost.cost import Hierarchy, hierarchies
from ..graph.graph import Text
from ..graph.nodes import (
    Value,
    compute_again,
    draws_random_numbers,
    inherit,
    is_pointwise,
    mark,
    module_path,
    note_operator,
    operands,
    operator_name,
    region_of,
    source_line,
    source_of,
    tensor_of,
    values_of,
)
from ..graph.port import Port, Role
from ..manual.flows import gradients_inside
from ..manual.manual import TracedManual
from ..manual.writing import ManualConversion, written
from ..memory.reader import Keeping
from ..ops.collectives import constrain, convert
from ..ops.experts import counted
from ..ops.python.manual import call_manual, manual_of
from ..problem.problem import Option, SearchProblem, Vertex, VertexKind
from ..rules.rule import Emitter, Hop, Localize, LocalShapes, Rule, windows_of
from ..rules.windows import by_dim, own_slice, place_in, united
from .collective import Conversion
from .program import PlacedPort, Program

_slice = torch.ops.aten.slice.Tensor
_index = torch.ops.aten.index.Tensor
# Operators that give any size of their result the same elements, with the place of the size among their arguments.
_SIZED: dict[Any, int] = {
    torch.ops.aten.empty.memory_format: 0,
    torch.ops.aten.expand.default: 1,
    torch.ops.aten.full.default: 0,
    torch.ops.aten.ones.default: 0,
    torch.ops.aten.zeros.default: 0,
}
LARGE_CONSTANT = 1e6  # bytes from which a part of a constant is computed by itself, and not cut out of the whole


def lower(problem: SearchProblem, choice: tuple[int, ...], keeping: Keeping | None = None) -> Program:
    """The program of the options `choice` of `problem`. `keeping`: the fates of results; None: nothing runs again."""
    program = _Lowering(problem, choice, keeping).program()
    chosen = (vertex.options[c] for vertex, c in zip(problem.vertices, choice, strict=True))
    if not problem.tensors.routings or not any(each.unsized_dims for option in chosen for each in option.results):
        return program
    return program.of_any_size(_Lowering(problem, choice, keeping, more=1).program())


class _Lowering:
    """The state of writing one program: the node of each value in each layout so far."""

    def __init__(self, problem: SearchProblem, choice: tuple[int, ...], keeping: Keeping | None, more: int = 0) -> None:
        self.problem, self.settings = problem, problem.settings
        self.more = more  # rows that are added to each number of rows that is not known before run time
        self.graph = fx.Graph()
        self.local: dict[tuple[Value, Layout], fx.Node] = {}
        self.exchanged: dict[tuple[fx.Node, SliceWindow], fx.Node] = {}
        self.base: dict[Value, tuple[Layout, str]] = {}  # the layout that consumers start from, and its strategy
        self.conversions: list[Conversion] = []
        self.cost = sum(float(v.unary[c]) for v, c in zip(problem.vertices, choice, strict=True))
        self.differentiable = problem.graph.differentiable
        self.ports = {port.node: port for port in problem.graph.inputs}
        self.chosen: dict[tuple[VertexKind, fx.Node, str], tuple[Vertex, Option]] = {
            (v.kind, v.node, v.name): (v, v.options[c]) for v, c in zip(problem.vertices, choice, strict=True)
        }
        self.operators = {v.node: (v, o) for (k, _, _), (v, o) in self.chosen.items() if k is VertexKind.OPERATOR}
        self.hubs = {
            edge.value: problem.vertices[edge.consumer].options[choice[edge.consumer]].results[0]
            for edge in problem.edges
            if problem.vertices[edge.consumer].kind is VertexKind.HUB
        }
        self.joint = self._joint_windows()
        self.notes, self.repeated = _fates(problem, choice, keeping)
        self.cost += keeping.cost if keeping else 0.0
        self.constant_parts: dict[fx.Node, fx.Node] = {}  # from nodes that compute parts to their constants
        self.regions: dict[tuple[fx.Node, int], int] = {}  # regions of torch.utils.checkpoint inside manual functions

    def program(self) -> Program:
        inputs = []
        whole = Layout.replicated(self.settings.mesh)
        for port in self.problem.graph.inputs:
            node = self.graph.placeholder(port.node.name)
            chosen = self.chosen.get((VertexKind.INPUT, port.node, port.name))
            rest = chosen[1].results[0] if chosen else whole
            self._produce(Value(port.node), node, rest, f"{port.role.value} {port.name} {rest}")
            inputs.append(_placed(port, rest))
        for node in self.problem.graph.nodes:
            if node.target is not operator.getitem:
                before = len(self.graph.nodes)
                self._emit(node)
                for new in itertools.islice(reversed(self.graph.nodes), len(self.graph.nodes) - before):
                    if (constant := self.constant_parts.get(new)) is not None:
                        inherit(new, constant)
                        note_operator(new, constant.name)
                        continue
                    mark(new, region_of(node))
                    inherit(new, node)
                    note_operator(new, node.name)
                    if new.target not in (convert, counted) and (note := self.notes.get(node)):
                        note(new)
        outputs, results = [], []
        for port in self.problem.graph.outputs:
            chosen = self.chosen.get((VertexKind.OUTPUT, port.node, port.name))
            rest = chosen[1].operands[0] if chosen else whole
            consumer = f"{port.role.value} {port.name} {rest}"
            results.append(self._converted(source_of(port.node), rest, consumer, port.node, f"output {port.name}"))
            outputs.append(_placed(port, rest))
        self.graph.output(tuple(results))
        self.graph.eliminate_dead_code(is_impure_node=lambda node: node.op in ("placeholder", "output"))
        module = Text({}, self.graph)
        return Program.of_forward(
            module,
            self.settings.mesh,
            tuple(inputs),
            tuple(outputs),
            tuple(self.conversions),
            self.settings.profile,
            self.cost,
        )

    def _produce(self, v: Value, node: fx.Node, rest: Layout, strategy: str) -> None:
        self.local[v, rest] = node
        self.base[v] = (rest, strategy)
        if v in self.hubs and self.hubs[v] != rest:
            self._converted(v, self.hubs[v], f"shared by its consumers {self.hubs[v]}", v.node)
            self.base[v] = (self.hubs[v], strategy)

    def _emit(self, node: fx.Node) -> None:
        """Write one operator on local parts."""
        whole = Layout.replicated(self.settings.mesh)
        vertex, option = self.operators.get(node, (None, None))
        inputs = operands(node)
        wanted = option.operands if option else (whole,) * len(inputs)
        strategy = describe_option(vertex, option) if vertex and option else "constant"
        consumer = f"{operator_name(node)} {node.name} {strategy}"
        parts = [
            self._converted(source_of(o), layout, consumer, node) for o, layout in zip(inputs, wanted, strict=True)
        ]
        emit = self._emitter(node, vertex.rule, option, consumer) if vertex and vertex.rule and option else None
        if emit:
            parts = [self._prepared(i, part, emit, wanted[i], consumer) for i, part in enumerate(parts)]
        taken = iter(parts)
        called: Any = map_arg((node.args, node.kwargs), lambda _: next(taken))
        args, kwargs = called
        produced = values_of(node)
        rests = option.results if option else (whole,) * len(produced)
        if node.target is constrain:
            self._produce(produced[0], args[0], rests[0], consumer)
            return
        if node.target is call_manual:
            for v, part, rest in zip(produced, self._of_manual(node, args[0], consumer), rests, strict=True):
                self._produce(v, part, rest, consumer)
            return
        if emit and emit.rule.local:
            result: Any = self._local_form(emit, emit.rule.local, tuple(args), dict(kwargs))
        else:
            result = self._called(node, args, kwargs)
        several = isinstance(node.meta["val"], tuple | list)
        for v, rest in zip(produced, rests, strict=True):
            if not several:
                self._produce(v, result, rest, consumer)
            elif isinstance(tensor_of(v), torch.Tensor):
                one = isinstance(result, fx.Node)
                item = self.graph.call_function(operator.getitem, (result, v.index)) if one else result[v.index]
                self._produce(v, item, rest, consumer)

    def _of_manual(self, node: fx.Node, parts: Sequence[fx.Node], consumer: str) -> tuple[fx.Node, ...]:
        """Write the program of a manual function in the place of its call, and return a rank's parts of its results."""
        its = manual_of(str(node.args[1]))
        text = written(its)
        flows = gradients_inside(its, node, self.problem.tensors.flows)
        env = dict(zip(text.graph.find_nodes(op="placeholder"), parts, strict=True))
        for inner in text.graph.nodes:
            if inner.op == "call_function":
                env[inner] = self.graph.node_copy(inner, env.__getitem__)
                if inner.target is convert:
                    arguments: tuple[Any, ...] = env[inner].args
                    *how, place = arguments
                    env[inner].args = (*how, len(self.conversions))
                    c = text.conversions[place]
                    self.conversions.append(self._conversion_inside(c, its, node, c.has_gradient(flows), consumer))
                if (region := region_of(inner)) is not None:  # regions of the surrounding graph have numbers from 0 on
                    mark(env[inner], -1 - self.regions.setdefault((node, region), len(self.regions)))
        returned: Any = text.graph.output_node().args[0]
        return tuple(env[part] for part in returned)

    def _conversion_inside(
        self, c: ManualConversion, its: TracedManual, call: fx.Node, gradient: bool, consumer: str
    ) -> Conversion:
        """A conversion of a manual function, as one of the program."""
        at = c.at if c.at is not None else c.of.node
        name = next((port.name for port in its.graph.inputs if port.node is c.of.node), c.of.node.name)
        by = f"{operator_name(at)} {at.name}" if at.op == "call_function" else name
        return Conversion(
            tag=len(self.conversions),
            tensor=f"{call.name}.{name}",
            axes=c.axes,
            size=self.settings.mesh.size(*c.axes),
            source=c.source,
            target=c.target,
            whole_bytes=c.whole_bytes,
            dtype=tensor_of(c.of).dtype,
            gradient=gradient,
            parameter=False,
            producer=consumer,
            consumer=f"{by} of the manual function {its.word}",
            where=call.name,
            path=module_path(call),
            line=source_line(at) or source_line(call),
            hierarchies=self._hierarchies(c.axes),
        )

    def _local_form(self, emit: Emitter, local: Localize, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The local form of a call. Raises VerifyError unless it sends exactly what its priced rule states."""
        before = len(self.conversions)
        result = local(emit, args, kwargs)
        said = sum(len(emit.hops(exchange.factor)) for exchange in emit.rule.exchanges)
        if (sent := len(self.conversions) - before) != said:
            raise VerifyError(
                f"the local form of {operator_name(emit.node)} {emit.node.name} writes {sent} conversions, and the "
                f"exchanges of its rule, by which it was priced, have {said}; write each hop once, with Emitter.sent"
            )
        return result

    def _emitter(self, node: fx.Node, rule: Rule, option: Option, consumer: str) -> Emitter:
        """The emitter that the local form of a call is written with."""
        sources, produced = [source_of(o) for o in operands(node)], values_of(node)
        more, load = self.more, self.settings.load
        shapes = LocalShapes(
            tuple(lo.local_shape(_shape(v), more, load) for v, lo in zip(sources, option.operands, strict=True)),
            tuple(lo.local_shape(_shape(v), more, load) for v, lo in zip(produced, option.results, strict=True)),
        )

        def send(x: fx.Node, hop: Hop, axes: tuple[str, ...], counts: fx.Node | None) -> fx.Node:
            v, shape = (*sources, *produced)[hop.tensor], (*shapes.operands, *shapes.results)[hop.tensor]
            held = math.prod(shape) * tensor_of(v).element_size()
            step = ConversionStep(axes, hop.source, hop.target, (*option.operands, *option.results)[hop.tensor])
            whole_bytes = hop.whole_bytes(held, self.settings.mesh.size(*axes))
            producer = self.base[v][1] if v in self.base else consumer
            return self._convert(x, v, step, whole_bytes, producer, consumer, node, node.name, counts=counts)

        return Emitter(
            node=node,
            rule=rule,
            shapes=shapes,
            whole=tuple(map(_shape, sources)),
            graph=self.graph,
            split=self._split(option),
            send=send,
            axes=dict(zip(self.settings.mesh.axes, self.settings.mesh.sizes, strict=True)),
            more=more,
            expert_load=self.settings.expert_load,
        )

    def _prepared(self, i: int, part: fx.Node, emit: Emitter, held: Layout, consumer: str) -> fx.Node:
        """Operand `i` of a call for its local form: with the padding of uneven shards filled, where it would be wrong,
        and with the windows that it reads."""
        part = emit.filled(i, part)
        wanted = by_dim(emit.windows, i)
        if not wanted:
            return part
        v = source_of(operands(emit.node)[i])
        joint = self.joint.get((v, held), wanted)
        size = list(held.local_shape(_shape(v)))
        for dim, window in joint.items():
            part = self._exchanged(part, v, held, tuple(size), window, consumer, emit.node)
            size[dim] = window.width
        for dim, window in joint.items():
            part = self._narrowed(part, window, wanted.get(dim, own_slice(window)))
        return part

    def _exchanged(
        self,
        part: fx.Node,
        v: Value,
        held: Layout,
        size: tuple[int, ...],
        window: SliceWindow,
        consumer: str,
        at: fx.Node,
    ) -> fx.Node:
        """`part` of `v`, of the local `size`, with `window` in place of a slice."""
        if window.local is not None:
            return self._narrowed(part, own_slice(window), window)
        if (part, window) not in self.exchanged:
            row = math.prod(size) // size[window.dim] * tensor_of(v).element_size()
            axes, whole_bytes = held.axes_of(window.dim), row * window.cut.size
            producer, slices = self.base[v][1], Shard(window.dim)
            self.exchanged[part, window] = self._convert(
                part, v, ConversionStep(axes, slices, window, held), whole_bytes, producer, consumer, at, at.name
            )
        return self.exchanged[part, window]

    def _narrowed(self, part: fx.Node, held: SliceWindow, wanted: SliceWindow) -> fx.Node:
        """The window `wanted`, cut out of one that contains it."""
        place = place_in(held, wanted)
        assert place is not None
        if (place, wanted.width) == (0, held.width):
            return part
        return self.graph.call_function(_slice, (part, held.dim, place, place + wanted.width))

    def _joint_windows(self) -> dict[tuple[Value, Layout], Mapping[int, SliceWindow]]:
        """For each tensor and layout of which several operators read windows, the windows that serve all of them."""
        readers: dict[tuple[Value, Layout], list[Mapping[int, SliceWindow]]] = {}
        for node, (vertex, option) in self.operators.items():
            if vertex.rule and vertex.rule.windows:
                sources = [source_of(o) for o in operands(node)]
                windows = windows_of(vertex.rule, self._split(option), [_shape(v) for v in sources])
                for i in dict.fromkeys(operand for operand, _ in windows):
                    readers.setdefault((sources[i], option.operands[i]), []).append(by_dim(windows, i))
        joint = {key: united(windows) for key, windows in readers.items() if len(windows) > 1}
        return {key: windows for key, windows in joint.items() if windows is not None}

    def _split(self, option: Option) -> dict[str, dict[str, int]]:
        """For each factor that `option` splits, the axes that split it, major first, with their sizes."""
        mesh, split = self.settings.mesh, dict[str, dict[str, int]]()
        for axis, factor in zip(mesh.axes, option.factors, strict=True):
            if factor:
                split.setdefault(factor, {})[axis] = mesh.size(axis)
        return split

    def _converted(self, v: Value, target: Layout, consumer: str, at: fx.Node, where: str = "") -> fx.Node:
        """The node that holds `v` laid out as `target`, made by conversions if there is none yet."""
        if (v, target) in self.local:
            return self.local[v, target]
        if self._is_computed_in_parts(v, target):
            plain = _aligned(target, _shape(v), _shape(v))  # a copy computed separately is as good as one
            node = self.local[v, target] = self._constant_part(v, plain, consumer, at)
            compute_again(node, False)
            return node
        here, producer = self.base[v]
        table = self.problem.table(v, output=bool(where))
        again = (v, target) in self.repeated
        table = once_more(table) if again else table
        node = self.local[v, here]
        for step in table.path(here, target):
            if (v, step.after) not in self.local:
                self.cost += step.cost if v.node not in self.problem.constants else 0.0
                exact = with_cuts(step, here, _shape(v))
                whole_bytes = round(table.local_bytes(here))
                if isinstance(exact.source, Shard):
                    cut, many = exact.source.cut, self.settings.mesh.size(*step.axes)
                    whole_bytes = whole_bytes // cut.width * cut.size if cut else whole_bytes * many
                # also if the planned backward does not reach it: another output may be differentiated
                counts = kind(step.source, step.target) is not Kind.NOTHING or v in self.differentiable
                if counts and self.settings.mesh.size(*step.axes) > 1:  # a single rank needs no conversion
                    node = self._convert(node, v, exact, whole_bytes, producer, consumer, at, where or at.name, again)
                self.local[v, step.after] = node
            node, here = self.local[v, step.after], step.after
        return node

    def _is_computed_in_parts(self, v: Value, target: Layout) -> bool:
        """Whether a constant is computed directly as the part in layout `target`: a mask of all sequences of a batch
        may be larger than everything else that a device holds."""
        if v.node not in self.problem.constants or not isinstance(tensor_of(v), torch.Tensor):
            return False
        return tensor_of(v).nbytes >= LARGE_CONSTANT and self._parts_of(v, target) is not None

    def _parts_of(self, v: Value, target: Layout) -> list[tuple[Value, Layout]] | None:
        """The parts of its operands from which an operator computes the part of `v` in layout `target`; None if it
        cannot. All parts are full, and each operand is split like the result, or whole."""
        node, shape = v.node, _shape(v)
        if not target.cuts or target.adds or not target.divides(shape):
            return None
        sources = [source_of(o) for o in operands(node)]
        if is_pointwise(node.target) and not draws_random_numbers(node):
            return [(o, _aligned(target, shape, _shape(o))) for o in sources]
        if node.target in _SIZED:
            return [(o, _aligned(target, shape, _shape(o))) for o in sources]
        arguments: tuple[Any, ...] = node.args
        if node.target is _index and all(isinstance(index, fx.Node) for index in arguments[1]):
            (indexed, *indices), many = sources, len(torch.broadcast_shapes(*map(_shape, sources[1:])))
            splits = [dim for dim, parts in enumerate(target.splits(len(shape))) if parts > 1]
            if all(dim < many for dim in splits) and tensor_of(indices[0]).dtype is not torch.bool:
                whole = Layout.replicated(self.settings.mesh)
                return [(indexed, whole), *((o, _aligned(target, shape[:many], _shape(o))) for o in indices)]
        return None

    def _constant_part(self, v: Value, target: Layout, consumer: str, at: fx.Node) -> fx.Node:
        """The node of a constant's part in layout `target`, computed from parts of its operands."""
        if (v, target) in self.local:
            return self.local[v, target]
        parts = self._parts_of(v, target)
        if parts is None:
            return self._converted(v, target, consumer, at)
        made = iter([self._constant_part(o, layout, consumer, at) for o, layout in parts])
        called: Any = map_arg((v.node.args, v.node.kwargs), lambda _: next(made))
        args, kwargs = called
        if (place := _SIZED.get(v.node.target)) is not None:
            args = (*args[:place], list(target.local_shape(_shape(v))), *args[place + 1 :])
        node = self.local[v, target] = self._called(v.node, args, kwargs)
        self.constant_parts[node] = v.node
        return node

    def _called(self, node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> fx.Node:
        """A call of the operator of `node` with other arguments."""
        target: Any = node.target
        return self.graph.call_function(target, tuple(args), dict(kwargs))

    def _convert(
        self, node: fx.Node, v: Value, step: ConversionStep, whole_bytes: int, producer: str, consumer: str,
        at: fx.Node, where: str, again: bool = False, counts: fx.Node | None = None,
    ) -> fx.Node:  # fmt: skip
        """Write one conversion, caused by `at`, and note it in the list. `counts`: of rows to send, and to get."""
        size = self.settings.mesh.size(*step.axes)
        conversion = Conversion(
            tag=len(self.conversions),
            tensor=tensor_name(self.ports, v),
            axes=step.axes,
            size=size,
            source=step.source,
            target=step.target,
            whole_bytes=whole_bytes,
            dtype=tensor_of(v).dtype,
            gradient=v in self.problem.tensors.flows,
            wider=self.problem.tensors.wider(v),
            parameter=self._is_parameter(v) or v in self.problem.tensors.wide,
            producer=producer,
            consumer=consumer,
            where=where,
            path=module_path(at),
            line=source_line(at),
            repeated=again,
            hierarchies=self._hierarchies(step.axes),
        )
        self.conversions.append(conversion)
        how = str(step.source), str(step.target), list(step.axes), size, conversion.tag
        converted = self.graph.call_function(convert, (node, *how) if counts is None else (node, *how, counts))
        if again:
            compute_again(converted, True)
        if v.node in self.problem.constants and kind(step.source, step.target) is Kind.SLICE:
            # a slice may be a view, which would keep the whole of a mask that one device needs little of
            converted = self.graph.call_function(torch.ops.aten.clone.default, (converted,))
            compute_again(converted, False)
        return converted

    def _hierarchies(self, axes: tuple[str, ...]) -> tuple[Hierarchy, ...]:
        return tuple(hierarchies(self.settings.mesh, axes, self.settings.profile).values())

    def _is_parameter(self, v: Value) -> bool:
        return v.node in self.ports and self.ports[v.node].role is Role.PARAMETER


def _fates(
    problem: SearchProblem, choice: tuple[int, ...], keeping: Keeping | None
) -> tuple[Mapping[fx.Node, Callable[[fx.Node], None]], frozenset[tuple[Value, Layout]]]:
    """The notes that the fates of operators make on their nodes, and the tensors that the backward converts again."""
    if keeping is None:
        return {}, frozenset()
    notes = {
        vertex.node: fate.note
        for vertex, fate in zip(problem.vertices, keeping.fates, strict=True)
        if vertex.kind is VertexKind.OPERATOR and fate.note
    }
    notes |= dict.fromkeys(problem.constants, partial(compute_again, again=False))
    repeated, kept = set[tuple[Value, Layout]](), set[tuple[Value, Layout]]()
    for edge, again, keeps in zip(problem.edges, keeping.again, keeping.kept, strict=True):
        source = problem.vertices[edge.producer].options[choice[edge.producer]].results[edge.result]
        target = problem.vertices[edge.consumer].options[choice[edge.consumer]].operands[edge.operand]
        if source != target and (again or keeps):
            (repeated if again else kept).add((edge.value, target))
    return notes, frozenset(repeated - kept)


def describe_option(vertex: Vertex, option: Option) -> str:
    """A strategy as text: the factor split on each axis, or the placement of the first result if none is."""
    mesh = (option.results or option.operands)[0].mesh
    words = []
    for i, axis in enumerate(mesh.axes):
        factor = option.factors[i]
        placement = (option.results or option.operands)[0].placements[i]
        words.append(f"{axis}:{factor}" if factor else f"{axis}:{placement}")
    return "(" + " ".join(words) + ")"


def _placed(port: Port, rest: Layout) -> PlacedPort:
    tensor = tensor_of(source_of(port.node))
    return PlacedPort(port, tuple(tensor.shape), tensor.dtype, rest)


def _shape(v: Value) -> tuple[int, ...]:
    tensor = tensor_of(v)
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else ()


def tensor_name(inputs: Mapping[fx.Node, Port], v: Value) -> str:
    """The name that collectives give the tensor `v`: an input's own, else that of the operator that makes it."""
    if v.node in inputs:
        return inputs[v.node].name
    return v.node.name if not v.index else f"{v.node.name}[{v.index}]"


def _aligned(layout: Layout, shape: tuple[int, ...], operand: tuple[int, ...]) -> Layout:
    """The layout of an operand that broadcasts to a result of `shape`, for a part of the result in `layout`."""
    before = len(shape) - len(operand)

    def placed(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return REPLICATE
        dim = placement.dim - before
        return Shard(dim) if dim >= 0 and operand[dim] == shape[placement.dim] != 1 else REPLICATE

    return layout_of(layout.mesh, tuple(map(placed, layout.placements)))

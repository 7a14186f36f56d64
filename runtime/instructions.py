"""A graph as a list of instructions, and as a Python function of them, made once per graph.

Both executors run the same instructions, and in both a value is one rank's tensor; what differs is how a conversion
moves data, so an executor says how to write an instruction as a Python expression. The function is straight-line code:
between two operators there is nothing but an assignment.
"""

from __future__ import annotations

import linecache
import math
import operator
import os
import re
import weakref
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from ..propagation.graph.nodes import draws_random_numbers
from ..propagation.ops.batch_norm import OWN_MEMORY
from ..propagation.ops.collectives import convert, convert_group, payload_bytes
from ..propagation.ops.hooked import calls_hook
from ..propagation.ops.indexing import position
from ..propagation.ops.random_numbers import draw
from ..propagation.program import lower as planned
from ..propagation.torch_internals import OpOverload, makes_memory
from ..strategy.cut import Cut, SliceWindow
from ..strategy.placement import Kind, Placement, Shard, kind, placement_from_code
from .slices import padded
from .strides import check_laid_out, contiguous, follows, laid_out, strides_of

Run = Callable[[list[Any]], list[Any]]
Bind = Callable[[Any], str]  # gives a value a name in the text of a function


@dataclass(frozen=True, slots=True)
class Conversion:
    """A conversion of one or several tensors along `axes`. `owned`: of which of them nobody else reads the memory, so
    that it may hold the result. `private`: and of which simulated ranks have one each, see `Instruction`."""

    kind: Kind
    source: Placement
    target: Placement
    axes: tuple[str, ...]
    size: int
    phase: str
    tags: tuple[int, ...]
    grouped: bool
    owned: tuple[bool, ...]
    private: tuple[bool, ...]

    def payload(self, shape: Sequence[int], itemsize: int) -> int:
        """The payload of a local tensor of `shape`: see `Collective.payload_bytes`."""
        return payload_bytes(self.source, self.target, shape, itemsize, self.size)

    @property
    def window(self) -> SliceWindow | None:
        """The window that an exchange makes of slices, or makes slices of."""
        return next((side for side in (self.source, self.target) if isinstance(side, SliceWindow)), None)

    @property
    def dims(self) -> tuple[int, int]:
        """The dims that are put together and cut apart (0 where a side is whole)."""
        before = self.source.dim if isinstance(self.source, Shard) else 0
        after = self.target.dim if isinstance(self.target, Shard) else 0
        return before, after


@dataclass(frozen=True, slots=True)
class Instruction:
    """Compute slot `out` from the slots `operands` (of a conversion one for each tensor, of a call each once).

    text         the call of an operator as Python, in which v3 is slot 3 and other names are constants of the Code
    in_place     the same, into the memory of an operand that nobody else reads; "" if there is none
    private      of that memory each simulated rank has its own: what is the same for several ranks they share
    conversion   what it is instead of a call
    along        or the axes of which it is the rank's position
    once         it draws random numbers, of which every rank must see the same, or calls a person's hook
    follows      its value has the traced strides wherever its operands have theirs
    """

    out: int
    operands: tuple[int, ...]
    text: str
    in_place: str
    private: bool
    conversion: Conversion | None
    once: bool
    name: str
    along: tuple[str, ...] = ()
    follows: bool = False

    @property
    def communicates(self) -> bool:
        return self.conversion is not None and self.conversion.kind.communicates


@dataclass(frozen=True)
class Code:
    """A graph ready to run: inputs fill the first slots. `shared`: for each output whether it may share memory with an
    input, with another output, or with something larger than itself. `traced`: fake tensors like the values of slots;
    empty where nothing was traced."""

    instructions: tuple[Instruction, ...]
    inputs: int
    outputs: tuple[int | None, ...]
    shared: tuple[bool, ...]
    constants: Mapping[str, Any]
    phase: str
    traced: Mapping[int, Tensor] = field(default_factory=dict)
    reasons: Sequence[planned.Conversion] = ()  # of conversions, by their tags

    @cached_property
    def identity(self) -> int:
        """A number that tells it from other codes, the same in every process."""
        text = "\n".join(f"{step.out} {step.operands} {step.text} {step.name}" for step in self.instructions)
        return zlib.crc32(f"{self.phase}\n{text}\n{self.outputs}".encode())

    def describe(self, step: Instruction) -> str:
        """What `step` is, for people: "the backward's all_reduce of fc1.weight over dp (model.py:31, ...)"."""
        c = step.conversion
        if c is None:
            return f"{step.name} of the {self.phase}"
        reasons = [self.reasons[tag] for tag in c.tags if tag < len(self.reasons)]
        tensors = [reason.tensor for reason in reasons]
        named = ", ".join(tensors[:3]) + (f" and {len(tensors) - 3} more" if len(tensors) > 3 else "")
        line = next((f" ({reason.line})" for reason in reasons if reason.line), "")
        return f"the {self.phase}'s {c.kind} of {named or step.name} over {','.join(c.axes)}{line}"


@dataclass(frozen=True, slots=True)
class Trail:
    """What the lines of a function are: kept with its names, so that a frame or a traceback tells where a rank is."""

    code: Code
    lines: Mapping[int, Instruction]
    ranks: Callable[[Conversion], tuple[int, ...]]

    def at(self, line: int) -> tuple[Instruction | None, str]:
        """The instruction of a line, and what it is."""
        step = self.lines.get(line)
        return step, self.code.describe(step) if step else f"the {self.code.phase}"

    def peers(self, step: Instruction | None) -> tuple[int, ...]:
        """The ranks that take part in `step`; none where it is no collective."""
        return self.ranks(step.conversion) if step and step.conversion and step.communicates else ()


def trail_of(frame: FrameType) -> Trail | None:
    """The trail of the function that a frame runs, if it is one of ours."""
    found = frame.f_globals.get("trail")
    return found if isinstance(found, Trail) else None


Mark = Callable[[Instruction, Any, bool], None]  # an instruction, its value, and whether that was awaited


def local_conversion(c: Conversion, part: Tensor, position: int) -> Tensor:
    """A conversion that needs no other rank, for the rank at `position` of its group; contiguous, but for NOTHING."""
    before, after = c.dims
    match c.kind:
        case Kind.SLICE:
            assert isinstance(c.target, Shard)
            cut = c.target.cut or Cut(part.shape[after], (c.size,))
            start, stop = cut.spans[position]
            return contiguous(padded(part.narrow(after, start, stop - start), after, cut.width))
        case Kind.PAD:
            assert isinstance(c.source, Shard)
            cut = c.source.cut or Cut(part.shape[before] * c.size, (c.size,))
            start, stop = cut.spans[position]
            shape = list(part.shape)
            shape[before] = cut.size
            made = part.new_zeros(shape)
            made.narrow(before, start, stop - start).copy_(part.narrow(before, 0, stop - start))
            return made
        case Kind.KEEP:
            return contiguous(part) if position == 0 else part.new_zeros(part.shape)
        case _:
            return part


# -- From instructions to a function ---------------------------------------------------------------------------------


class Dialect(Protocol):
    """How an executor writes instructions. `late`: a collective gives what is to be awaited, by its `wait`."""

    late: bool

    def express(self, step: Instruction, bind: Bind) -> str:
        """The value of `step` as a Python expression; `bind` names what it needs besides slots and constants."""

    def ranks(self, c: Conversion) -> tuple[int, ...]:
        """The ranks of processes that a conversion waits for."""


def compile_code(code: Code, dialect: Dialect, mark: Mark | None = None) -> Run:
    """The function that runs `code`: from the list of the values of its inputs, which it empties, to those of its
    outputs. `mark(step, value, awaited)` is called after each instruction, and after each wait for one."""
    return compile_steps(code, code.instructions, range(code.inputs), code.outputs, dialect, mark)


def compile_steps(
    code: Code, steps: Sequence[Instruction], takes: Sequence[int], gives: Sequence[int | None], dialect: Dialect,
    mark: Mark | None = None, names: Sequence[str] = (),
) -> Run:  # fmt: skip
    """The function of `steps` of `code`: from the list of what is called `names` in their texts and the values of the
    slots `takes`, which it empties, to those of the slots `gives`. Each value is let go after its last use."""
    known: dict[str, Any] = dict(code.constants)

    def bind(value: Any) -> str:
        name = f"c{len(known)}"
        known[name] = value
        return name

    check = _checks(code, bind)
    dead = _last_uses(steps, takes, gives)
    arguments = [*names, *(f"v{slot}" for slot in takes)]
    lines = ["def run(inputs):"]
    lines += [f"    {', '.join(arguments)}, = inputs", "    inputs.clear()"] if arguments else ()
    for slot in takes:
        lines += check(slot, f"input {slot}", slot >= code.inputs)
    lines += _let_go(dead[-1])
    pending: dict[int, Instruction] = {}
    where: dict[int, Instruction] = {}

    def wait_for(slot: int) -> Iterator[str]:
        if slot in pending:
            step = where[len(lines) + 1] = pending.pop(slot)
            yield f"    v{slot} = v{slot}.wait()"
            yield from check(slot, step.name, True)
            if mark:
                yield f"    {bind(mark)}({bind(step)}, None, True)"

    for i, step in enumerate(steps):
        for slot in step.operands:
            lines.extend(wait_for(slot))
        where[len(lines) + 1] = step
        lines.append(f"    v{step.out} = {dialect.express(step, bind)}  # {step.name}")
        if not step.communicates:
            lines += check(step.out, step.name, step.follows)
        if mark:
            lines.append(f"    {bind(mark)}({bind(step)}, v{step.out}, False)")
        lines += _let_go(dead[i])
        if dialect.late and step.communicates:
            pending[step.out] = step
    for output in gives:
        lines.extend(wait_for(output) if output is not None else ())
    lines.append(f"    return [{', '.join('None' if output is None else f'v{output}' for output in gives)}]")
    known["trail"] = Trail(code, where, dialect.ranks)
    return _function("\n".join(_in_few_variables(lines)) + "\n", known, code.phase)


def _checks(code: Code, bind: Bind) -> Callable[[int, str, bool], Iterator[str]]:
    """What writes the line after which a slot has the strides that were traced for it. Where it is known to have them
    (`exact`) there is none, but with PARTWAY_VERIFY=1 the line that raises if it has not."""
    fix = bind(laid_out)
    verify = bind(check_laid_out) if os.environ.get("PARTWAY_VERIFY") == "1" else ""

    def lines(slot: int, name: str, exact: bool) -> Iterator[str]:
        strides = strides_of(code.traced.get(slot))
        if strides is None:
            return
        if not exact:
            yield f"    if v{slot}.stride() != {strides}: v{slot} = {fix}(v{slot}, {strides})"
        if verify:
            yield f"    {verify}(v{slot}, {bind(code.traced[slot])}, {name!r})"

    return lines


def _last_uses(
    steps: Sequence[Instruction], takes: Sequence[int], gives: Sequence[int | None]
) -> Mapping[int, Sequence[int]]:
    """The slots that are read for the last time by the i-th of `steps`, and by none (i = -1)."""
    last = dict.fromkeys(takes, -1)
    for i, step in enumerate(steps):
        last.update(dict.fromkeys((*step.operands, step.out), i))
    kept, found = set(gives), defaultdict(list)
    for slot, i in last.items():
        if slot not in kept:
            found[i].append(slot)
    return found


def _let_go(slots: Sequence[int]) -> Iterator[str]:
    if slots:
        yield f"    del {', '.join(f'v{slot}' for slot in slots)}"


_VARIABLE = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|#.*|\bv(\d+)\b""")


def _in_few_variables(lines: Sequence[str]) -> Iterator[str]:
    """`lines` in which a value has the variable of one that was let go. A frame has room for all its variables, and
    where it is large Python maps memory for each call from it, which takes longer than a small kernel."""
    variables: dict[str, int] = {}
    free: list[int] = []

    def renamed(found: re.Match[str]) -> str:
        slot = found[1]
        if slot is None:
            return found[0]
        if slot not in variables:
            variables[slot] = free.pop() if free else len(variables)
        return f"v{variables[slot]}"

    for line in lines:
        yield _VARIABLE.sub(renamed, line)
        if line.startswith("    del "):
            free += (variables.pop(slot) for slot in _VARIABLE.findall(line))


def _function(text: str, names: dict[str, Any], phase: str) -> Run:
    """The function `run` of `text`, whose lines a traceback shows."""
    file = f"<partway {phase} {id(names):x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), names)
    run: Run = names.pop("run")  # its globals are these names: nothing but its callers keeps it
    weakref.finalize(run, linecache.cache.pop, file, None)
    return run


# -- From a graph to instructions ------------------------------------------------------------------------------------


def assemble_code(module: fx.GraphModule, phase: str, reasons: Sequence[planned.Conversion] = ()) -> Code:
    """The instructions of a flat graph. Constants of the module are inputs of none: they are bound here. `reasons`: its
    conversions as they were planned."""
    nodes = members_late(list(module.graph.nodes))
    same = {node: node.all_input_nodes[0] for node in nodes if _is_identity(node)}
    slots: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op == "placeholder":
            slots[node] = len(slots)
    inputs = len(slots)
    returned: Any = ()
    instructions: list[Instruction] = []
    constants = _Constants()
    for node in nodes:
        if node.op == "output":
            (returned,) = node.args
        if node in same:
            slots[node] = slots[same[node]]
        if node.op not in ("get_attr", "call_function") or node in same:
            continue
        slots[node] = len(slots)
        used = _operands(node)
        operands = tuple(slots[o] for o in used)
        if node.target is not convert_group:
            operands = tuple(dict.fromkeys(operands))
        text = ""
        if node.op == "get_attr":
            text = constants.name(getattr(module, str(node.target)))
        elif node.target not in (convert, convert_group, position):
            text = _written(node.target, node.args, node.kwargs, slots, constants)
        in_place, private = "", False
        if found := _overwriting(node):
            in_place = _written(found.target, found.args, found.kwargs, slots, constants)
            private = _is_private(found.owner)
        instructions.append(
            Instruction(
                slots[node], operands, text, in_place, private, _conversion(node, phase),
                _runs_once(node), node.name, _along(node), follows(node),
            )
        )  # fmt: skip
    outputs = tuple(slots[o] if isinstance(o, fx.Node) else None for o in returned)
    traced = {slot: val for node, slot in slots.items() if isinstance(val := node.meta.get("val"), Tensor)}
    return Code(tuple(instructions), inputs, outputs, _shared(returned), constants.values, phase, traced, reasons)


def members_late(nodes: list[fx.Node]) -> list[fx.Node]:
    """`nodes` with what takes one tensor out of a group of conversions moved to just before its first use: an
    executor may go on while the group is under way, and waits where a result is read."""
    place = {node: i for i, node in enumerate(nodes)}

    def when(node: fx.Node) -> tuple[int, int]:
        if node.target is operator.getitem and node.all_input_nodes[0].target is convert_group and node.users:
            return min(place[user] for user in node.users), 0
        return place[node], 1

    return sorted(nodes, key=when)


def _is_identity(node: fx.Node) -> bool:
    """Whether what a node gives is its operand: without autograd, what detaches is that too."""
    if node.target is convert:
        return kind(*map(placement_from_code, node.args[1:3])) is Kind.NOTHING  # type: ignore[arg-type]
    return node.target in (_aten.detach.default, _aten.alias.default)


def _operands(node: fx.Node) -> tuple[fx.Node, ...]:
    arguments: tuple[Any, ...] = node.args
    return tuple(arguments[0]) if node.target is convert_group else tuple(node.all_input_nodes)


class _Constants:
    """What a text refers to by name: operators, and arguments that have no text of their own."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._names: dict[int, str] = {}

    def name(self, value: Any) -> str:
        if id(value) not in self._names:
            self._names[id(value)] = name = f"k{len(self.values)}"
            self.values[name] = value
        return self._names[id(value)]


def _written(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], slots: Mapping[fx.Node, int], constants: _Constants
) -> str:
    """A call as Python."""
    texts = [_argument(a, slots, constants) for a in args]
    if target is operator.getitem:
        return f"{texts[0]}[{texts[1]}]"
    texts += [f"{name}={_argument(a, slots, constants)}" for name, a in kwargs.items()]
    return f"{constants.name(target)}({', '.join(texts)})"


def _argument(value: Any, slots: Mapping[fx.Node, int], constants: _Constants) -> str:
    if isinstance(value, fx.Node):
        return f"v{slots[value]}"
    if isinstance(value, list | tuple):
        inside = [_argument(v, slots, constants) for v in value]
        return f"[{', '.join(inside)}]" if isinstance(value, list) else f"({''.join(f'{v}, ' for v in inside)})"
    if value is None or type(value) in (bool, int, str) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    assert not isinstance(value, slice | dict), f"an argument is a {type(value).__name__}: {value}"
    return constants.name(value)


def _conversion(node: fx.Node, phase: str) -> Conversion | None:
    if node.target not in (convert, convert_group):
        return None
    arguments: tuple[Any, ...] = node.args
    _, source, target, axes, size, tags = arguments
    before, after = placement_from_code(source), placement_from_code(target)
    grouped = node.target is convert_group
    owners = [_owner(operand, node) for operand in _operands(node)]
    owned = tuple(owner is not None for owner in owners)
    private = tuple(map(_is_private, owners))
    tags = tuple(tags) if grouped else (tags,)
    return Conversion(kind(before, after), before, after, tuple(axes), size, phase, tags, grouped, owned, private)


def _along(node: fx.Node) -> tuple[str, ...]:
    arguments: tuple[Any, ...] = node.args
    return tuple(arguments[0]) if node.target is position else ()


# -- Who else may read the memory of a value -------------------------------------------------------------------------

_aten = torch.ops.aten

# Views of all of a tensor: what they give is no smaller than the memory that it keeps alive.
_WHOLE_VIEWS = {
    _aten.view.default, _aten._unsafe_view.default, _aten.reshape.default, _aten.t.default, _aten.transpose.int,
    _aten.permute.default, _aten.squeeze.default, _aten.squeeze.dim, _aten.squeeze.dims, _aten.unsqueeze.default,
}  # fmt: skip


# Operators of which each element is made of those at its place, and their forms that write into the first operand.
_IN_PLACE: dict[Any, Any] = {
    _aten.add.Scalar: _aten.add_.Scalar,
    _aten.add.Tensor: _aten.add_.Tensor,
    _aten.addcmul.default: _aten.addcmul_.default,
    _aten.div.Scalar: _aten.div_.Scalar,
    _aten.div.Tensor: _aten.div_.Tensor,
    _aten.mul.Scalar: _aten.mul_.Scalar,
    _aten.mul.Tensor: _aten.mul_.Tensor,
    _aten.neg.default: _aten.neg_.default,
    _aten.relu.default: _aten.relu_.default,
    _aten.sub.Tensor: _aten.sub_.Tensor,
    _aten.tanh.default: _aten.tanh_.default,
}


# Those of which another form writes its result into the argument of this name, which may be the first operand.
_OUT_OF_PLACE: dict[Any, tuple[Any, str]] = {
    _aten.gelu_backward.default: (_aten.gelu_backward.grad_input, "grad_input"),
    _aten.tanh_backward.default: (_aten.tanh_backward.grad_input, "grad_input"),
    _aten.threshold_backward.default: (_aten.threshold_backward.grad_input, "grad_input"),
}
_COMMUTES = {_aten.add.Tensor, _aten.mul.Tensor}


@dataclass(frozen=True)
class _Overwrite:
    """A call that writes into the memory of its first operand, which `owner` has made."""

    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    owner: fx.Node


def _overwriting(node: fx.Node) -> _Overwrite | None:
    """The call of `node` as one that writes into an operand, if nobody else reads that memory and it is just what the
    result needs. New memory costs as much as the arithmetic: it has to be mapped and cleared."""
    if node.target not in _IN_PLACE and node.target not in _OUT_OF_PLACE:
        return None
    first, *rest = node.args
    orders = [(first, *rest)]
    if node.target in _COMMUTES and len(rest) == 1 and not node.kwargs:
        orders.append((rest[0], first))
    for args in orders:
        operand = args[0]
        owner = _owner(operand, node)
        if isinstance(operand, fx.Node) and owner is not None and _is_like(operand, node):
            if node.target in _IN_PLACE:
                return _Overwrite(_IN_PLACE[node.target], args, node.kwargs, owner)
            target, name = _OUT_OF_PLACE[node.target]
            return _Overwrite(target, args, {**node.kwargs, name: operand}, owner)
    return None


def _is_like(one: fx.Node, other: fx.Node) -> bool:
    """Whether the values of two nodes have one shape, dtype and strides."""
    a, b = one.meta.get("val"), other.meta.get("val")
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return (a.shape, a.dtype, strides_of(a)) == (b.shape, b.dtype, strides_of(b))


def _is_whole_view(node: fx.Node) -> bool:
    return node.target in _WHOLE_VIEWS or _is_identity(node)


def _owner(node: Any, reader: fx.Node) -> fx.Node | None:
    """What has made the memory of `node`, if `reader` alone reads it, all of it and once."""
    while isinstance(node, fx.Node) and set(node.users) == {reader} and _reads(reader)[node] == 1:
        if _is_fresh(node):
            return node
        if not _is_whole_view(node):
            return None
        node, reader = node.all_input_nodes[0], node
    return None


def _runs_once(node: fx.Node) -> bool:
    """Whether one rank computes what a call gives for all."""
    return node.op == "call_function" and (draws_random_numbers(node) or calls_hook(node))


def _is_private(owner: fx.Node | None) -> bool:
    """Whether each rank runs what has made this memory: neither the ranks of a group together nor one for all."""
    if owner is None:
        return False
    maker = _maker(owner)
    together = maker.target in (convert, convert_group) or _runs_once(maker)
    return bool(maker.all_input_nodes) and not together


def _reads(node: fx.Node) -> Counter[fx.Node]:
    """How often `node` names each of its operands."""
    found: Counter[fx.Node] = Counter()

    def see(operand: fx.Node) -> fx.Node:
        found[operand] += 1
        return operand

    fx.node.map_arg((node.args, node.kwargs), see)
    return found


def _shared(returned: Any) -> tuple[bool, ...]:
    """See `Code.shared`."""
    roots = [_root(o) if isinstance(o, fx.Node) else None for o in returned]
    count = Counter(roots)
    return tuple(root is not None and (not _is_fresh(root) or count[root] > 1) for root in roots)


def _root(node: fx.Node) -> fx.Node:
    """The value of which `node` is a view, all of it."""
    while _is_whole_view(node):
        node = node.all_input_nodes[0]
    return node


def memory_of(node: fx.Node) -> fx.Node:
    """The value whose memory `node` may have, all or a part of it."""
    while node.all_input_nodes and not _makes_memory(_maker(node)):
        node = node.all_input_nodes[0]
    return node


def _is_fresh(node: fx.Node) -> bool:
    """Whether an operator makes memory for `node`, and no more than for it."""
    return _makes_memory(_maker(node))


def _maker(node: fx.Node) -> fx.Node:
    """The call of which `node` is a result."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _makes_memory(node: fx.Node) -> bool:
    if node.target in (convert, convert_group):
        arguments: tuple[Any, ...] = node.args
        return kind(*map(placement_from_code, arguments[1:3])).communicates
    return (
        node.target in OWN_MEMORY
        or node.target is draw
        or (isinstance(node.target, OpOverload) and makes_memory(node.target))
    )

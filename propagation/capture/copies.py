"""The operators that stand for modules which are like traced ones become copies of what these gave.

Of each kind two modules were traced (alike.py). What they gave stands between two notes in the graph. The second has to
be the first with other operands and another path, node by node; then it is copied. Names go on counting as in a trace
of all.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ExportGraphSignature, TensorArgument

from ..torch_internals import OpOverload, graph_module, numbers_of_names, schema_of, tree_leaves
from .alike import copied, traced
from .calls import UnlikeError

_NAME = re.compile(r"(.*?)(?:_(\d+))?$", re.DOTALL)
_GENERATED = re.compile(r'^ *File "<.*\n.*\n?', re.MULTILINE)
_DROPPED = ("from_node", "torch_fn")  # where PyTorch's own passes had a node from


def check_pure(program: ExportedProgram) -> None:
    """Raise UnlikeError if a program writes in place somewhere."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if isinstance(node.target, OpOverload) and schema_of(node.target).is_mutable:
                raise UnlikeError


def with_copies(program: ExportedProgram, notes: int, copies: int) -> tuple[fx.GraphModule, ExportGraphSignature]:
    """The program with so many `copies`, and without its last `notes` outputs, which only told what was traced. Raises
    UnlikeError if two modules that are to be alike are not, or nothing reads what one gives."""
    graph, signature = program.graph, program.graph_signature
    specs = signature.output_specs[: len(signature.output_specs) - notes]
    if any(spec.kind is not torch.export.graph_signature.OutputKind.USER_OUTPUT for spec in specs):
        raise UnlikeError
    parts = (part for part in program.graph_module.modules() if part is not program.graph_module)
    inner = [node for part in parts if isinstance(part, fx.GraphModule) for node in part.graph.nodes]
    if any(node.target in (copied, traced) for node in inner):  # in a branch or a loop
        raise UnlikeError
    nodes = list(graph.nodes)
    if sum(node.target is copied for node in nodes) != copies:
        raise UnlikeError
    steps, last = _steps(nodes)
    templates = _templates(nodes)
    made, env = fx.Graph(), dict[fx.Node, Any]()
    names = _Names(made)
    for node in nodes:
        if node.target is traced:
            continue
        if node.target is copied:
            results = templates[node.args[2]].copy(names, steps, node, env)
            env |= {item: results[item.args[1]] for item in node.users}
        elif node.op == "output":
            returned = node.args[0]
            output = made.output(tuple(fx.node.map_arg(returned[: len(returned) - notes], env.__getitem__)))
            output.meta = node.meta
        elif node not in env:
            env[node] = names.create(node, *fx.node.map_arg((node.args, node.kwargs), env.__getitem__), steps[node])
            env[node].meta = node.meta
    outputs = [
        replace(spec, arg=replace(spec.arg, name=env[node].name)) if isinstance(spec.arg, TensorArgument) else spec
        for spec, node in zip(specs, nodes[-1].args[0], strict=False)
    ]
    names.count_on(numbers_of_names(graph), last)
    _drop_unread(made)
    return graph_module(program.graph_module, made), ExportGraphSignature(list(signature.input_specs), outputs)


class _Names:
    """Makes nodes of a graph whose names count on."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph, self._counted = graph, _Counted()

    def create(self, node: fx.Node, args: Any, kwargs: Any, step: tuple[str, int]) -> fx.Node:
        """A node as `node`, with other operands, whose number is `step` after what it counts from."""
        base, more = step
        number = self._counted.before(base, args) + more
        name = node.name if node.op == "placeholder" else f"{base}_{number}" if number else base
        made = self._graph.create_node(node.op, node.target, args, kwargs, name, node.type)
        self._counted.count(made, base, number, node.meta.get("val"))
        return made

    def count_on(self, before: Mapping[str, int], last: Mapping[str, int]) -> None:
        """Let names that are given later be numbered after all those `before`, the last of which were `last`, as if the
        nodes that were dropped there had been here."""
        numbers = numbers_of_names(self._graph)
        for base, number in self._counted.last.items():
            more = max(before.get(base, 0) - last.get(base, 0), 0)
            numbers[base] = max(numbers.get(base, 0), number + more)


class _Counted:
    """The numbers of names that are taken. Getting a result of an operator is a node, also where nothing reads it and
    it is dropped: these nodes count from the operator."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}
        self._results: dict[Any, int] = {}

    def before(self, base: str, args: Sequence[Any]) -> int:
        """What the number of the next node is counted from, which has these operands."""
        if base == "getitem" and args and args[0] in self._results:
            return self._results[args[0]]
        return self.last.get(base, -1)

    def count(self, node: fx.Node, base: str, number: int, val: Any) -> None:
        """`node` has this name, and gives `val`."""
        if base != "getitem" or node.args[0] not in self._results:
            self.last[base] = number
        if isinstance(val, list | tuple):
            self._results[node] = self.last.get("getitem", -1)
            self.last["getitem"] = self._results[node] + sum(isinstance(each, torch.Tensor) for each in val)


def _drop_unread(graph: fx.Graph) -> None:
    """Drop what computes results that were noted and that nothing reads, as torch.export has done where there was no
    note (in place). Raises UnlikeError for random numbers, which not every version drops."""
    unread: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "call_function" and node.meta.get("val") is not None and unread.issuperset(node.users):
            unread.add(node)
    if any(torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) for node in unread):
        raise UnlikeError
    if unread:
        graph.eliminate_dead_code()


def _steps(nodes: Sequence[fx.Node]) -> tuple[dict[fx.Node, tuple[str, int]], dict[str, int]]:
    """The name of each node without its number, and how much that is after what it counts from; the last numbers."""
    counted = _Counted()
    steps: dict[fx.Node, tuple[str, int]] = {}
    for node in nodes:
        base, number = _split(node.name)
        steps[node] = base, number - counted.before(base, node.args)
        counted.count(node, base, number, node.meta.get("val"))
    return steps, counted.last


def _split(name: str) -> tuple[str, int]:
    """The name of a node without its number, and the number."""
    found = _NAME.match(name)
    assert found is not None
    return found[1], int(found[2] or 0)


@dataclass(frozen=True, eq=False)
class _Template:
    """What a traced module gave: the `nodes`, the `note` beside them, and the path of the module."""

    note: fx.Node
    nodes: tuple[fx.Node, ...]

    @property
    def outer(self) -> Sequence[fx.Node]:
        """The nodes that it reads from outside."""
        return self.note.args[0]  # type: ignore[return-value]

    def copy(
        self, names: _Names, steps: Mapping[fx.Node, tuple[str, int]], stand_in: fx.Node, env: Mapping[fx.Node, Any]
    ) -> list[fx.Node]:
        """Copies for a module that `stand_in` stands for; its results."""
        if _frames(stand_in) != _frames(self.note):
            raise UnlikeError
        outer: Any = stand_in.args[0]
        own = _paired(self.outer, [env[node] for node in outer])
        moved = _Moved(self.note, stand_in)
        for node in self.nodes:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), own.__getitem__)
            own[node] = names.create(node, args, kwargs, steps[node])
            own[node].meta = moved.meta(node)
        return [own[node] for node in self.note.args[1]]  # type: ignore[union-attr, index]


def _paired(ours: Sequence[fx.Node], theirs: Sequence[Any]) -> dict[fx.Node, Any]:
    """Which node stands where one of ours does. Raises UnlikeError where two of one are one of the other."""
    pairs = dict(zip(ours, theirs, strict=True))
    if not len(pairs) == len(ours) == len(set(theirs)):
        raise UnlikeError
    return pairs


class _Moved:
    """The meta data of nodes of the module that `note` stands beside, as they are in the module of `other`."""

    def __init__(self, note: fx.Node, other: fx.Node) -> None:
        self._note, self._other = note, other
        self._depth = len(_stack(note))
        (self._old_key, (self._old, _)), (self._key, (self._new, _)) = (
            list(_stack(each).items())[-1] for each in (note, other)
        )
        self._stacks: dict[tuple[Any, ...], dict[str, Any]] = {}

    def meta(self, node: fx.Node) -> dict[str, Any]:
        """That of `node`."""
        new = {key: value for key, value in node.meta.items() if key not in _DROPPED}
        inside = tuple(_stack(node).items())[self._depth :]
        if inside not in self._stacks:
            own = {self._moved(key, self._old_key, self._key): (self._moved(path, self._old, self._new), kind)
                   for key, (path, kind) in inside}  # fmt: skip
            self._stacks[inside] = {**_stack(self._other), **own}
        new["nn_module_stack"] = self._stacks[inside]
        if "custom" in new and new["custom"] == self._note.meta.get("custom"):
            new["custom"] = self._other.meta["custom"]
        return new

    @staticmethod
    def _moved(text: str, old: str, new: str) -> str:
        return new + text[len(old) :] if text == old or text.startswith(f"{old}.") else text


def _stack(node: fx.Node) -> dict[str, Any]:
    found: dict[str, Any] = node.meta.get("nn_module_stack") or {}
    return found


def _templates(nodes: Sequence[fx.Node]) -> dict[Any, _Template]:
    """For each kind what its second traced module gave, if something stands for such a module. Raises UnlikeError where
    the first one gave something else."""
    wanted = {node.args[2] for node in nodes if node.target is copied}
    found: dict[Any, list[_Template]] = {kind: [] for kind in wanted}
    first = 0
    for i, node in enumerate(nodes):
        if node.target is not traced:
            continue
        if not node.args[1]:
            first = i + 1
        elif node.args[2] in wanted:
            found[node.args[2]].append(_Template(node, tuple(nodes[first:i])))
    for pair in found.values():
        if len(pair) != 2:
            raise UnlikeError
        _check_alike(*pair)
    return {kind: pair[1] for kind, pair in found.items()}


def _check_alike(one: _Template, other: _Template) -> None:
    """Raise UnlikeError unless the second module gave the first one's nodes with other operands and another path."""
    pairs, moved = _paired(one.outer, other.outer), _Moved(one.note, other.note)
    if len(one.nodes) != len(other.nodes) or _shown(one.note) != _shown(other.note):
        raise UnlikeError
    for node, copy in zip(one.nodes, other.nodes, strict=True):
        if not all(operand in pairs for operand in node.all_input_nodes):
            raise UnlikeError
        args = fx.node.map_arg((node.args, node.kwargs), pairs.__getitem__)
        if (node.op, node.target, args) != ("call_function", copy.target, (copy.args, copy.kwargs)):
            raise UnlikeError
        meta = moved.meta(node)
        if any(meta.get(key) != copy.meta.get(key) for key in ("nn_module_stack", "custom")):
            raise UnlikeError
        if _shown(node) != _shown(copy):
            raise UnlikeError
        pairs[node] = copy
    if [pairs.get(node) for node in one.note.args[1]] != list(other.note.args[1]):  # type: ignore[arg-type, union-attr]
        raise UnlikeError


def _shown(node: fx.Node) -> list[Any]:
    """What is seen of a node beside its operands and its place."""
    return [_frames(node), *map(_told, tree_leaves(node.meta.get("val")))]


def _frames(node: fx.Node) -> str:
    """Where a node comes from, without the lines of code that torch generated: in a region of torch.autocast a trace
    has no other ones."""
    return _GENERATED.sub("", node.meta.get("stack_trace") or "")


def _told(val: Any) -> Any:
    if not isinstance(val, torch.Tensor):
        return val
    return val.dtype, val.device, tuple(val.shape), val.stride(), val.requires_grad

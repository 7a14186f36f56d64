"""Merges the programs of ranks that ask for their place into one program.

`pw.axis_index` is a plain number, so that a person may write `if pw.axis_index("tp") == 0`. The program is then traced
for each place, and the traces are merged: the common calls are written once, and the differing calls between two
collectives become one call of `partway::run`, which runs the text of its own rank. All ranks meet in the same
collectives, in the same order.

    common calls          the same operators on common operands
    crossing values       results of a rank's own calls that a collective, a later stretch or the result reads: they
                          have the same shape on every rank; zeros stand in for a value that a rank does not have
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_arg

from ....strategy.errors import CaptureError
from ...graph.graph import Graph, Text
from ...graph.nodes import argument, at_source, describe, draws_random_numbers, operator_name, value
from ...graph.port import Port, Role
from ...ops import by_hand, indexing
from ...ops.by_hand import COLLECTIVES
from ...ops.python.functions import made_of, run
from ...ops.random_numbers import keys
from ..rewrites.control_flow import function_text
from .permutations import messages_of, rounds_of, sent_in

aten = torch.ops.aten


@dataclass
class _Rank:
    """One trace during the merge. `where` maps its nodes to those of the merged graph; `numbers`: equal for equal calls
    on equal operands."""

    name: str
    graph: Graph
    stretches: list[list[fx.Node]]  # its calls, cut where ranks meet
    meetings: list[fx.Node]
    where: dict[fx.Node, fx.Node] = field(default_factory=dict)
    numbers: dict[fx.Node, Hashable] = field(default_factory=dict)


def merged(graphs: Sequence[Graph], axes: Sequence[str], sizes: Sequence[int]) -> Graph:
    """The program of all ranks. `graphs` are the traces at the positions along `axes`, of these `sizes`, in order.

    Raises CaptureError where ranks do not meet in the same collectives, or hand them tensors of different shapes.
    """
    places = itertools.product(*map(range, sizes))
    names = [", ".join(f"{a}={i}" for a, i in zip(axes, place, strict=True)) for place in places]
    for graph in graphs:
        _write_numbers(graph)
    _check_constants(graphs)
    if len({str(graph.module.graph) for graph in graphs}) == 1:
        return graphs[0]
    return _Merging([_rank(name, graph) for name, graph in zip(names, graphs, strict=True)], axes, sizes).graph()


def _write_numbers(graph: Graph) -> None:
    """Replace each scalar constant by a call that creates it (in place): `y[0] = rank` is a constant of each trace."""
    for port in graph.inputs:
        constant = graph.constants.get(port.name) if port.role is Role.CONSTANT else None
        if constant is not None and not constant.shape:
            like: Any = {"dtype": constant.dtype, "device": constant.device}
            with graph.module.graph.inserting_before(graph.nodes[0]):
                made = graph.module.graph.call_function(aten.full.default, ([], constant.item()), like)
            made.meta["val"] = value(port.node)
            port.node.replace_all_uses_with(made)


def _check_constants(graphs: Sequence[Graph]) -> None:
    """Raise CaptureError unless all ranks use the same constants."""
    used = [[g.constants[p.name] for p in g.inputs if p.role is Role.CONSTANT and p.node.users] for g in graphs]
    for mine in used[1:]:
        alike = len(mine) == len(used[0]) and all(
            a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))
            for a, b in zip(mine, used[0], strict=True)
        )
        if not alike:
            raise CaptureError(
                "the ranks of a manual function use constant tensors that differ; make them of numbers, as by "
                "torch.full or torch.arange, or pass them as an argument that is split"
            )


def _rank(name: str, graph: Graph) -> _Rank:
    """A trace cut at its collectives. A getitem is in the stretch of the call whose result it takes."""
    stretches: list[list[fx.Node]] = [[]]
    meetings: list[fx.Node] = []
    place: dict[fx.Node, int] = {}
    for node in graph.nodes:
        here = len(meetings)
        if node.target is operator.getitem:
            here = place[node.args[0]]  # type: ignore[index]
        place[node] = here
        if node.target in COLLECTIVES:
            meetings.append(node)
            stretches.append([])
            place[node] = here + 1
        else:
            stretches[here].append(node)
    return _Rank(name, graph, stretches, meetings)


def _used(graph: Graph) -> list[Port]:
    """The inputs of a graph except unread constants."""
    return [port for port in graph.inputs if port.role is not Role.CONSTANT or port.node.users]


class _Merging:
    """The state of one merge."""

    def __init__(self, ranks: Sequence[_Rank], axes: Sequence[str], sizes: Sequence[int]) -> None:
        self.ranks, self.axes, self.sizes = ranks, list(axes), list(sizes)
        self.out = fx.Graph()
        self.interned: dict[Hashable, int] = {}

    def graph(self) -> Graph:
        first = self.ranks[0]
        self._check_alike()
        ports = [_used(rank.graph) for rank in self.ranks]
        for i, port in enumerate(ports[0]):
            copy = self.out.node_copy(port.node)
            for rank, own in zip(self.ranks, ports, strict=True):
                rank.where[own[i].node], rank.numbers[own[i].node] = copy, ("input", i)
        self.place = self.out.call_function(indexing.position, (self.axes, self.sizes))
        self.place.meta["val"] = torch.empty((), dtype=torch.int64, device="meta")
        for i in range(len(first.stretches)):
            self._common(i)
            if i == len(first.meetings):
                handed = self._own(i, [self._returned(rank) for rank in self.ranks], "the result")
            elif first.meetings[i].target is by_hand.send_receive:
                self._exchange(i)
            else:
                self._meet(i)
        self.out.output(tuple(handed))
        inputs = tuple(replace(port, node=first.where[port.node]) for port in ports[0])
        outputs = tuple(replace(port, node=node) for port, node in zip(first.graph.outputs, handed, strict=True))
        return replace(first.graph, module=Text({}, self.out), inputs=inputs, outputs=outputs)

    def _check_alike(self) -> None:
        """Raise CaptureError unless all ranks call the same collectives and return the same structure."""
        first = self.ranks[0]
        for rank in self.ranks[1:]:
            for mine, theirs in itertools.zip_longest(first.meetings, rank.meetings):
                if _call(mine) != _call(theirs):
                    at = at_source(mine if mine is not None else theirs)
                    raise CaptureError(
                        f"the ranks of a manual function do not meet: the one at {first.name} calls {_told(mine)} "
                        f"where the "
                        f"one at {rank.name} calls {_told(theirs)}; call collectives on all ranks alike, outside of "
                        f"conditions on axis_index{at}"
                    )
            if first.graph.result.key() != rank.graph.result.key():
                raise CaptureError(
                    f"the ranks of a manual function return different things: the one at {first.name} "
                    f"{first.graph.result.text()}, and the one at {rank.name} {rank.graph.result.text()}"
                )

    def _returned(self, rank: _Rank) -> list[fx.Node]:
        return [port.node for port in rank.graph.outputs]

    # -- common calls

    def _common(self, i: int) -> None:
        """Write the calls of stretch `i` that all ranks make on common operands."""
        by_number = [self._numbered(rank, i) for rank in self.ranks]
        for number, node in by_number[0].items():
            its = [numbers.get(number) for numbers in by_number]
            everywhere = all(n is not None for n in its)
            if everywhere and all(operand in self.ranks[0].where for operand in node.all_input_nodes):
                copy = self.out.node_copy(node, self.ranks[0].where.__getitem__)
                for rank in self.ranks:
                    for same in rank.stretches[i]:
                        if rank.numbers[same] == number and same not in rank.where:
                            rank.where[same] = copy

    def _numbered(self, rank: _Rank, i: int) -> dict[Hashable, fx.Node]:
        """The calls of a stretch by numbers, which are equal for equal calls on equal operands."""
        found: dict[Hashable, fx.Node] = {}
        for node in rank.stretches[i]:
            if node in rank.where:  # received from another rank
                continue
            drawn = len(rank.numbers) if node.target is keys or draws_random_numbers(node) else 0
            key = (str(node.target), self._frozen(rank, node), drawn)
            rank.numbers[node] = self.interned.setdefault(key, len(self.interned))
            found.setdefault(rank.numbers[node], node)
        return found

    def _frozen(self, rank: _Rank, node: fx.Node) -> str:
        args, kwargs = map_arg((node.args, node.kwargs), lambda n: f"<{rank.numbers[n]}>")
        return f"{args} {kwargs}"

    # -- differing calls

    def _own(self, i: int, pinned: Sequence[Sequence[fx.Node | None]], what: str) -> list[fx.Node]:
        """Write the calls that differ by rank in stretch `i`. Returns the nodes that stand for `pinned`, the values
        that each rank hands to `what`; a rank without a value hands in zeros."""
        slots = [_Slot([nodes[p] for nodes in pinned]) for p in range(len(pinned[0]))]
        for slot in slots:
            self._check_shapes(slot, what)
        whole = [self._alike(slot) for slot in slots]
        needed = [slot for slot, node in zip(slots, whole, strict=True) if node is None]
        carried = self._carried(i, needed)
        results = self._switched([*needed, *carried]) if needed or carried else []
        for slot, result in zip([*needed, *carried], results, strict=True):
            for rank, node in zip(self.ranks, slot.nodes, strict=True):
                if node is not None and node not in rank.where:
                    rank.where[node] = result
        own = iter(results)
        return [node if node is not None else next(own) for node in whole]

    def _alike(self, slot: _Slot) -> fx.Node | None:
        """The one node that stands for a slot on all ranks, if there is one."""
        standing = {rank.where.get(node) for rank, node in zip(self.ranks, slot.nodes, strict=True)}  # type: ignore[arg-type]
        return standing.pop() if len(standing) == 1 else None

    def _check_shapes(self, slot: _Slot, what: str) -> None:
        given = [(rank.name, node) for rank, node in zip(self.ranks, slot.nodes, strict=True) if node is not None]
        (name, first), *others = given
        for other, node in others:
            if describe(node) != describe(first):
                raise CaptureError(
                    f"the ranks of a manual function hand different tensors to {what}: the one at {name} "
                    f"{describe(first)}, "
                    f"and the one at {other} {describe(node)}; pad them to one shape{at_source(node)}"
                )

    def _carried(self, i: int, needed: Sequence[_Slot]) -> list[_Slot]:
        """Slots for the values that ranks computed by themselves and read later, grouped by shape and dtype."""
        by_kind: dict[str, list[list[fx.Node]]] = {}
        for r, rank in enumerate(self.ranks):
            here = set(rank.stretches[i]) - rank.where.keys()
            held = {slot.nodes[r] for slot in needed}
            for node in rank.stretches[i]:
                if node in here and node not in held and self._is_read_later(rank, node, i):
                    every = by_kind.setdefault(describe(node), [[] for _ in self.ranks])
                    every[r].append(node)
        return [_Slot(list(nodes)) for every in by_kind.values() for nodes in itertools.zip_longest(*every)]

    def _is_read_later(self, rank: _Rank, node: fx.Node, i: int) -> bool:
        if not isinstance(value(node), torch.Tensor):
            return False
        later = {n for stretch in rank.stretches[i + 1 :] for n in stretch} | set(rank.meetings[i + 1 :])
        returned = self._returned(rank) if i < len(rank.meetings) else []
        return node in returned or any(user in later for user in node.users)

    def _switched(self, slots: Sequence[_Slot]) -> list[fx.Node]:
        """Write a call that computes `slots` by the text of each rank. Returns the nodes of its results."""
        ends = [[slot.nodes[r] for slot in slots] for r in range(len(self.ranks))]
        read = (_read(rank, own) for rank, own in zip(self.ranks, ends, strict=True))
        operands = list(dict.fromkeys(itertools.chain.from_iterable(read)))
        kinds = [value(next(node for node in slot.nodes if node is not None)) for slot in slots]
        text = ""
        for r, (rank, own) in enumerate(zip(self.ranks, ends, strict=True)):
            text += function_text(self._at(slots), f"rank{r}", _function(rank, operands, own, kinds))
        every = ", ".join(f"rank{r}" for r in range(len(self.ranks)))
        text += f"def forward(place, *operands):\n    return ({every},)[int(place)](*operands)\n\n"
        text += "def like(place, *operands):\n    return rank0(*operands)\n"
        call = self.out.call_function(run, ([self.place, *operands], made_of(text)))
        call.meta |= {"val": list(kinds), "stack_trace": self._at(slots).meta.get("stack_trace")}
        results = []
        for n, kind in enumerate(kinds):
            results.append(self.out.call_function(operator.getitem, (call, n)))
            results[-1].meta["val"] = kind
        return results

    def _at(self, slots: Sequence[_Slot]) -> fx.Node:
        return next(node for slot in slots for node in slot.nodes if node is not None)

    # -- where ranks meet

    def _meet(self, i: int) -> None:
        """Write the collective after stretch `i`."""
        meetings = [rank.meetings[i] for rank in self.ranks]
        handed = self._own(i, [list(node.all_input_nodes) for node in meetings], operator_name(meetings[0]))
        given = dict(zip(meetings[0].all_input_nodes, handed, strict=True))
        copy = self.out.node_copy(meetings[0], given.__getitem__)
        for rank, node in zip(self.ranks, meetings, strict=True):
            rank.where[node], rank.numbers[node] = copy, ("meeting", i)

    def _exchange(self, i: int) -> None:
        """Write the exchange of messages after stretch `i` as permutations, in each of which a rank sends and receives
        at most one tensor."""
        calls = [rank.meetings[i] for rank in self.ranks]
        axes, size = list(argument(calls[0], "axes")), argument(calls[0], "size")
        places = [self._place_along(r, axes) for r in range(len(self.ranks))]
        rounds = rounds_of(messages_of(calls, places, axes))
        sending = [[sent_in(calls[r], places[r], one) for one in rounds] for r in range(len(self.ranks))]
        handed = self._own(i, sending, "an exchange with neighbours")
        for n, (messages, x) in enumerate(zip(rounds, handed, strict=True)):
            pairs = [end for message in messages for end in (message.source, message.target)]
            moved = self.out.call_function(by_hand.permute, (x, pairs, axes, size))
            moved.meta |= {"val": x.meta["val"], "stack_trace": calls[0].meta.get("stack_trace")}
            for rank, call, place in zip(self.ranks, calls, places, strict=True):
                wanted = {message.into for message in messages if message.target == place}
                for item in call.users:
                    if item.args[1] in wanted:
                        rank.where[item], rank.numbers[item] = moved, ("round", i, n)

    def _place_along(self, r: int, axes: Sequence[str]) -> int:
        """The position along `axes` of the rank of trace `r`."""
        missing = [axis for axis in axes if axis not in self.axes]
        if missing:
            raise CaptureError(f"an exchange over {','.join(axes)} is the same at every place along {missing[0]}")
        coordinate = dict(zip(self.axes, np.unravel_index(r, self.sizes), strict=True))
        sizes = dict(zip(self.axes, self.sizes, strict=True))
        return int(np.ravel_multi_index([coordinate[a] for a in axes], [sizes[a] for a in axes]))


@dataclass
class _Slot:
    """A result that each rank computes by itself: the node of each rank, or None where a rank has none."""

    nodes: list[fx.Node | None]


def _needed(rank: _Rank, ends: Sequence[fx.Node | None]) -> list[fx.Node]:
    """The rank's own calls that `ends` depend on, in order."""
    wanted, stack = set[fx.Node](), [end for end in ends if end is not None]
    while stack:
        node = stack.pop()
        if node not in wanted and node not in rank.where:
            wanted.add(node)
            stack += node.all_input_nodes
    return [node for stretch in rank.stretches for node in stretch if node in wanted]


def _read(rank: _Rank, ends: Sequence[fx.Node | None]) -> Iterator[fx.Node]:
    """The merged nodes that the rank's own calls for `ends` read."""
    own = _needed(rank, ends)
    for node in own:
        yield from (rank.where[operand] for operand in node.all_input_nodes if operand in rank.where)
    yield from (rank.where[end] for end in ends if end in rank.where)


def _function(
    rank: _Rank, operands: Sequence[fx.Node], ends: Sequence[fx.Node | None], kinds: Sequence[torch.Tensor]
) -> fx.GraphModule:
    """The rank's own calls for `ends`, as a function of `operands`. Results are zeros like `kinds` where an end is
    None. Raises CaptureError where ranks draw different numbers of random tensors."""
    graph = fx.Graph()
    given = {operand: graph.placeholder(operand.name) for operand in operands}
    env: dict[fx.Node, fx.Node] = {}

    def standing(node: fx.Node) -> fx.Node:
        return env[node] if node in env else given[rank.where[node]]

    for node in _needed(rank, ends):
        if node.target is keys:
            raise CaptureError(
                "the ranks of a manual function draw different numbers of random tensors; draw on all ranks alike, "
                "outside "
                f"of conditions on axis_index{at_source(node)}"
            )
        env[node] = graph.node_copy(node, standing)
    results = []
    for end, kind in zip(ends, kinds, strict=True):
        like: Any = {"dtype": kind.dtype, "device": kind.device}
        zeros = graph.call_function(aten.zeros.default, (list(kind.shape),), like) if end is None else None
        results.append(standing(end) if end is not None else zeros)
    graph.output(tuple(results))
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)


def _call(node: fx.Node | None) -> str:
    """The text of a collective without its operands."""
    if node is None:
        return ""
    if node.target is by_hand.send_receive:  # its neighbours differ by rank
        return f"{operator_name(node)}({argument(node, 'axes')})"
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: "tensor")
    return f"{operator_name(node)}{args}{kwargs}"


def _told(node: fx.Node | None) -> str:
    return "nothing more" if node is None else _call(node)

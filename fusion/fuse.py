"""The fusion pass: policies group the collectives of parameters, and each group is issued early enough to be hidden.

gradients   all_reduce and reduce_scatter, in the backward: a group is issued when its last member is ready
weights     all_gather, in the forward, and in the backward where weights are gathered again: a group is issued
            when the group before it is first used, so that at most two groups of whole weights are held
exchanges   of the rows of a mixture of experts: other operators run meanwhile (`exchanges.py`)
updates     all_reduce of buffer updates, such as BatchNorm's running statistics with statistics of each part of the
            batch (`batch_norm_parts`): issued in the forward when their operands are ready, and read after all
            other operators
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any

import torch
from torch import fx

from ..propagation.cost.profile import DeviceProfile
from ..propagation.graph.graph import Text
from ..propagation.graph.nodes import returned_by
from ..propagation.graph.port import Role
from ..propagation.ops.collectives import COLLECTIVES, TAG, convert, convert_group, is_gather, kind_of, payload_bytes
from ..propagation.program.program import Program
from ..propagation.program.schedule import UNHEARD, Unit, Work, play, work_of
from ..strategy.mesh import Mesh
from ..strategy.placement import Kind, placement_from_code
from .cycles import split_cycles
from .events import Costs, events_of
from .exchanges import hide_exchanges
from .members import Groups, Key, Member
from .modes import Fusion, FusionPolicies
from .policy import Offers

Parameters = Mapping[int, tuple[str, str]]  # the conversions of parameters: from a tag to source and target


def fuse_program(program: Program, policies: FusionPolicies) -> Program:
    """`program` with the collectives of its parameters, and of buffer updates, in groups by `policies`."""
    parameters = {c.tag: (str(c.source), str(c.target)) for c in program.conversions if c.parameter}
    mesh, profile = program.mesh, program.profile
    if policies.allgather:
        program = program.with_values()
        program = replace(program, forward=fuse(program.forward, parameters, policies, mesh, profile))
    program = _updates_last(program, policies.allreduce)
    if program.backward is not None:
        program = replace(program, backward=fuse(program.backward, parameters, policies, mesh, profile))
    if any(Kind.ALL_TO_ALLV in (c.kind("forward"), c.kind("backward")) for c in program.conversions):
        program = program.with_values()
        program = replace(program, forward=hide_exchanges(program.forward, mesh, profile))
        if program.backward is not None:
            program = replace(program, backward=hide_exchanges(program.backward, mesh, profile))
    return program


def fuse(
    module: fx.GraphModule, parameters: Parameters, policies: FusionPolicies, mesh: Mesh, profile: DeviceProfile
) -> fx.GraphModule:
    """A copy of `module`, a forward or a backward graph, in which each group of collectives is one `convert_group`.

    The pass groups `convert` nodes whose tag is in `parameters`, of the kinds that have a policy. It places a group of
    gradients, or a single gradient, right after the last of its operands; a group of weights, or a single weight, right
    before the first use of the group before it. Nodes that use a result are moved back as far as necessary; all others
    keep their order. Values do not change: a group converts each member as before. Every `convert` must have its local
    value in `meta["val"]`; for policies that predict (by `mesh` and `profile`) all nodes must.
    Raises ContextError if an index of a policy is larger than the number of gradient AllReduces.
    """
    units = _Grouping(module.graph, parameters, policies, mesh, profile).units() if policies else _Units((), ())
    fused = Text(module, rebuild(_ordered(module.graph, units)))
    fused.meta.update(module.meta)
    return fused


def gradient_collectives(graph: fx.Graph, parameters: Parameters, kind: Kind) -> tuple[fx.Node, ...]:
    """The collectives of `kind` on gradients of parameters, in the order in which their operands are produced.

    (Autograd may place the collectives themselves much later: it runs backward functions in the reverse order of
    recording, and the conversions of parameters can stand anywhere before their first use.)
    """
    place = _places(graph)
    gradients = [node for node in _converts(graph, parameters, kind) if not _is_weight(node, parameters)]
    return tuple(sorted(gradients, key=lambda node: (place[node.all_input_nodes[0]], place[node])))


def weight_gathers(graph: fx.Graph, parameters: Parameters, kind: Kind = Kind.ALL_GATHER) -> tuple[fx.Node, ...]:
    """The gathers of parameters, of `kind`, in the order of their first uses: those of a forward, or of a backward that
    gathers weights again. (The gradient of a parameter may be gathered as well; it is not a weight.)"""
    place = _places(graph)
    weights = [node for node in _converts(graph, parameters, kind) if _is_weight(node, parameters)]
    return tuple(sorted(weights, key=lambda node: (_first_use(node, place), place[node])))


def member(node: fx.Node) -> Member:
    """The Member of a `convert` node: the part that a policy sees."""
    arguments: tuple[Any, ...] = node.args
    operand, source, target, axes, size, tag = arguments
    value = operand.meta["val"] if isinstance(operand, fx.Node) else operand
    assert isinstance(value, torch.Tensor) and isinstance(tag, int), f"{node.format_node()} is no convert of a tensor"
    before, after = placement_from_code(source), placement_from_code(target)
    payload = payload_bytes(before, after, value.shape, value.element_size(), size)
    return Member(tag, source, target, tuple(axes), value.dtype, payload)


def group(members: Sequence[Member], fusion: Fusion) -> Groups:
    """The groups by the policy of `fusion` without a prediction, as positions in `members`: each once, ascending within
    a group."""
    return fusion.policy.group(members, fusion.config)


def _places(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: index for index, node in enumerate(graph.nodes)}


def _first_use(node: fx.Node, place: Mapping[fx.Node, int]) -> int:
    return min((place[user] for user in node.users), default=place[node])


def _converts(graph: fx.Graph, parameters: Parameters, kind: Kind) -> Iterator[fx.Node]:
    for node in graph.find_nodes(op="call_function", target=convert):
        source, target, tag = (node.args[place] for place in (1, 2, TAG))
        if tag in parameters and kind_of(str(source), str(target)) is kind:
            yield node


def _is_weight(node: fx.Node, parameters: Parameters) -> bool:
    """Whether `node` converts the parameter itself; the transpose converts its gradient."""
    return node.args[1:3] == parameters[node.args[5]]  # type: ignore[index]


# -- Which nodes run as one ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Units:
    """The nodes that run as one, by when they are issued. `weights` are in the order of their first use."""

    gradients: tuple[Unit, ...]
    weights: tuple[Unit, ...]

    def __iter__(self) -> Iterator[Unit]:
        return iter(self.gradients + self.weights)


class _Grouping:
    """The groups of one graph: each kind by its policy, and policies that predict after the others."""

    def __init__(
        self, graph: fx.Graph, parameters: Parameters, policies: FusionPolicies, mesh: Mesh, profile: DeviceProfile
    ) -> None:
        self.graph, self.mesh, self.profile = graph, mesh, profile
        by_kind: dict[Kind, Fusion | None] = {
            kind: getattr(policies, row.fusion) for kind, row in COLLECTIVES.items() if row.fusion
        }
        self.nodes = {
            kind: weight_gathers(graph, parameters, kind)
            if is_gather(kind)
            else gradient_collectives(graph, parameters, kind)
            for kind, fusion in by_kind.items()
            if fusion
        }
        self.fusions = {kind: fusion for kind, fusion in by_kind.items() if fusion and self.nodes[kind]}
        self.members = {kind: [member(node) for node in self.nodes[kind]] for kind in self.fusions}
        self.needs = {gathers: self._needs(gathers) for gathers in (False, True)}

    def units(self) -> _Units:
        """The units by all policies together."""
        groups = {kind: group(self.members[kind], fusion) for kind, fusion in self.fusions.items()}
        for kind, fusion in self.fusions.items():
            if fusion.policy.predict:
                groups[kind] = fusion.policy.predict(_Outlook(self, kind, groups))
        return self.units_of(groups)

    @cached_property
    def work(self) -> dict[fx.Node, Work]:
        """The predicted work of each node, by the profile."""
        return work_of(self.graph, self.mesh, self.profile)

    def units_of(self, groups: Mapping[Kind, Groups]) -> _Units:
        """The units of the groups of each kind, none of which waits for itself. Weights never wait for gradients."""
        gradients, weights = (self._split(groups, gathers) for gathers in (False, True))
        place = _places(self.graph)
        uses = {unit: min(_first_use(node, place) for node in unit) for unit in weights}
        return _Units(tuple(gradients), tuple(sorted(weights, key=uses.__getitem__)))

    def _split(self, groups: Mapping[Kind, Groups], gathers: bool) -> list[Unit]:
        together: list[tuple[int, ...]] = []
        start = 0
        for kind in self._kinds(gathers):
            together += [tuple(start + position for position in positions) for positions in groups[kind]]
            start += len(self.nodes[kind])
        nodes = self._nodes(gathers)
        return [tuple(nodes[i] for i in piece) for piece in split_cycles(tuple(together), self.needs[gathers])]

    def _kinds(self, gathers: bool) -> list[Kind]:
        return [kind for kind in self.fusions if is_gather(kind) is gathers]

    def _nodes(self, gathers: bool) -> list[fx.Node]:
        return [node for kind in self._kinds(gathers) for node in self.nodes[kind]]

    def _needs(self, gathers: bool) -> list[frozenset[int]]:
        """For each of the nodes, the positions of the others whose results it needs, directly or indirectly."""
        nodes = self._nodes(gathers)
        own = {node: 1 << position for position, node in enumerate(nodes)}
        masks: dict[fx.Node, int] = {}  # sets of positions, as the bits of an int
        for node in self.graph.nodes if nodes else ():
            mask = 0
            for operand in node.all_input_nodes:
                mask |= masks[operand] | own.get(operand, 0)
            masks[node] = mask
        return [frozenset(i for i in range(len(nodes)) if masks[node] >> i & 1) for node in nodes]


class _Outlook:
    """The predicted schedule of a graph, for a policy that groups the collectives of `kind` (see `policy.Outlook`).

    `others` are the groups of all kinds; those of `kind` itself are ignored.
    """

    def __init__(self, grouping: _Grouping, kind: Kind, others: Mapping[Kind, Groups]) -> None:
        self.grouping, self.kind, self.others = grouping, kind, dict(others)
        self.members, self.nodes = grouping.members[kind], grouping.nodes[kind]
        self.weights = is_gather(kind)

    @property
    def costs(self) -> Costs:
        """For each key, the seconds of a message before and per byte, if it carries all its members."""
        bytes_of = Counter[Key]()
        for member in self.members:
            bytes_of[member.key] += member.bytes
        works = [self.grouping.work[node] for node in self.nodes]
        return {m.key: work.rates(bytes_of[m.key]) for m, work in zip(self.members, works, strict=True)}

    def seconds(self, groups: Groups) -> float:
        """The duration of the graph with `groups`, in seconds."""
        return play(self._order(groups), self.grouping.work)[1]

    def offers(self) -> Offers:
        """When gradients are ready. A gradient that reads a collective of another kind is deferred until its group."""
        alone = list(self._order(self._alone))
        position = {node: index for index, node in enumerate(self.nodes)}
        order = tuple(position[unit[0]] for unit in alone if unit[0] in position)
        return Offers(order, *events_of(alone, self.grouping.work, [self.nodes[i] for i in order]))

    def first_uses(self) -> list[float]:
        """When each weight is first used if nothing waits for it."""
        unheard = {**self.grouping.work, **dict.fromkeys(self.nodes, UNHEARD)}
        played, _ = play(self._order(self._alone), unheard)
        starts = {node: start for unit, start, _ in played for node in unit}
        return [min((starts[user] for user in node.users), default=0.0) for node in self.nodes]

    @property
    def _alone(self) -> Groups:
        return tuple((position,) for position in range(len(self.nodes)))

    def _order(self, groups: Groups) -> Iterator[Unit]:
        units = self.grouping.units_of({**self.others, self.kind: groups})
        return _ordered(self.grouping.graph, units)


# -- In what order they run ------------------------------------------------------------------------------------------


def _ordered(graph: fx.Graph, units: _Units) -> Iterator[Unit]:
    """All nodes in a topological order that places `units` where they are to be issued, and the others as near to
    their old order as possible."""
    priority = _priorities(graph, units)
    unit = {node: nodes for nodes in units for node in nodes}
    waits: dict[Unit, int] = {}
    readers: dict[fx.Node, list[Unit]] = {}
    ready: list[tuple[Priority, Unit]] = []
    for node in graph.nodes:
        nodes = unit.get(node, (node,))
        if nodes in waits:
            continue
        operands = {operand for each in nodes for operand in each.all_input_nodes}
        waits[nodes] = len(operands)
        for operand in operands:
            readers.setdefault(operand, []).append(nodes)
        if not operands:
            heappush(ready, (priority(nodes), nodes))
    while ready:
        _, nodes = heappop(ready)
        yield nodes
        for node in nodes:
            for reader in readers.get(node, ()):
                waits[reader] -= 1
                if not waits[reader]:
                    heappush(ready, (priority(reader), reader))


Priority = tuple[int, int, int, int]  # the stage, the place in it, 1 for the node at that place, the unit's own place


def _priorities(graph: fx.Graph, units: _Units) -> Callable[[Unit], Priority]:
    """The priority of a unit among those that are ready. Inputs come first, even before a collective of an input:
    readers of a graph expect them there."""
    place = _places(graph)
    early: dict[Unit, Priority] = {nodes: (1, place[nodes[0]], 0, 0) for nodes in units.gradients}
    used: dict[Key | None, int] = {}  # the first use of the last group of weights so far, by key and (None) of any key
    for nodes in units.weights:
        key = member(nodes[0]).key
        before = used.get(key, used.get(None))
        own = place[nodes[0]]
        early[nodes] = (1, own, 0, 0) if before is None else (2, before, 0, own)
        used[key] = used[None] = min(_first_use(node, place) for node in nodes)

    def priority(nodes: Unit) -> Priority:
        if nodes in early:
            return early[nodes]
        return (0 if nodes[0].op == "placeholder" else 2), place[nodes[0]], 1, 0

    return priority


def rebuild(units: Iterable[Unit]) -> fx.Graph:
    """A new graph of `units` in their order; each unit of several nodes becomes one `convert_group`."""
    graph = fx.Graph()
    new: dict[fx.Node, fx.Node] = {}
    for unit in units:
        if len(unit) == 1:
            new[unit[0]] = graph.node_copy(unit[0], new.__getitem__)
            continue
        operands = [new[node.all_input_nodes[0]] for node in unit]
        _, source, target, axes, size, _ = unit[0].args
        arguments = operands, source, target, axes, size, [node.args[5] for node in unit]
        fused = graph.call_function(convert_group, arguments, name="convert_group")
        fused.meta["val"] = [node.meta["val"] for node in unit]
        for index, node in enumerate(unit):
            new[node] = graph.call_function(operator.getitem, (fused, index))
            new[node].meta = dict(node.meta)
    graph.lint()
    return graph


# -- Buffer updates --------------------------------------------------------------------------------------------------


def _updates_last(program: Program, fusion: Fusion | None) -> Program:
    """`program` with the readers of buffer updates' AllReduces behind all other nodes of its forward.

    The `updates` of `fusion`'s policy groups these AllReduces. Indices and overlap are about gradients, so the modes
    index and overlap make the groups of auto here.
    """
    if not _update_collectives(program):
        return program
    if fusion:
        program = program.with_values()
    collectives = _update_collectives(program)
    forward = Text(
        program.forward, rebuild(_readers_last(program.forward.graph, collectives, _groups(collectives, fusion)))
    )
    forward.meta.update(program.forward.meta)
    return replace(program, forward=forward)


def _groups(collectives: list[fx.Node], fusion: Fusion | None) -> Groups:
    if fusion is None:
        return tuple((position,) for position in range(len(collectives)))
    return fusion.policy.updates([member(node) for node in collectives], fusion.config)


def _update_collectives(program: Program) -> list[fx.Node]:
    """The AllReduces of the forward that only buffer updates read; none needs the result of another."""
    graph = program.forward.graph
    returned = returned_by(graph)
    roles = [placed.port.role for placed in program.outputs]
    kept = {*returned[len(roles) :]}  # for the backward
    kept |= {node for node, role in zip(returned, roles, strict=False) if role is not Role.BUFFER_UPDATE}
    aside: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        only = all(user.op == "output" or user in aside for user in node.users)
        if node.op == "call_function" and node not in kept and only:
            aside.add(node)
    updates: dict[fx.Node, None] = {}
    late: set[fx.Node] = set()
    for node in graph.nodes:
        if any(operand in updates or operand in late for operand in node.all_input_nodes):
            late.add(node)
        elif node in aside and node.target is convert and kind_of(*map(str, node.args[1:3])) is Kind.ALL_REDUCE:
            updates[node] = None
    return list(updates)


def _readers_last(graph: fx.Graph, collectives: list[fx.Node], groups: Groups) -> Iterator[Unit]:
    """The nodes of `graph`, with each group at the place of its last member, and the readers of groups at the end."""
    ends = {collectives[positions[-1]]: tuple(collectives[i] for i in positions) for positions in groups}
    members, late = set(collectives), list[fx.Node]()
    behind = set(collectives)
    for node in graph.nodes:
        if node in members:
            if node in ends:
                yield ends[node]
        elif any(operand in behind for operand in node.all_input_nodes):
            behind.add(node)
            late.append(node)
        else:
            yield (node,)
    for node in late:
        yield (node,)

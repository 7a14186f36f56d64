"""The operators of a plan as a foldable tree of modules, in which repeated layers stand as one.

A group is a module, a stack of consecutive layers that are alike, or a run of neighbours in a module with too many
children to view at once. Groups are in the order of their first operators.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from partway.propagation.plan import OperatorPlan, PlanData, TensorPlan
from partway.propagation.program import Collective

MOST = 40  # children of a group


@dataclass(frozen=True)
class Group:
    """A group of operators.

    kind       what it stands for; the whole is a module without a name
    name       the path of a module; for a stack or a run from that of its first child to that of the last
    label      the part of the name that is not in its parent's
    children   groups, and operators by their number in the plan
    """

    kind: Literal["module", "stack", "run"]
    name: str
    label: str
    children: tuple[Group | int, ...]

    @property
    def first(self) -> int:
        """The number of the first operator in it."""
        child = self.children[0]
        return child if isinstance(child, int) else child.first


@dataclass
class _Module:
    """A module under construction: its content, in order of first use."""

    path: str
    children: list[_Module | int] = field(default_factory=list)
    inside: dict[str, _Module] = field(default_factory=dict)


def outline(plan: PlanData) -> Group:
    """The tree of all operators of `plan`."""
    root = _Module("")
    for number, operator in enumerate(plan.operators):
        at = root
        for i, part in enumerate(parts := operator.module.split(".") if operator.module else []):
            if part not in at.inside:
                at.inside[part] = _Module(".".join(parts[: i + 1]))
                at.children.append(at.inside[part])
            at = at.inside[part]
        at.children.append(number)
    return Group("module", "", "", _ModuleGrouping(plan).inside(root))


class _ModuleGrouping:
    """Groups of the modules of one plan; the key by which two are alike is computed once for each operator."""

    def __init__(self, plan: PlanData) -> None:
        at = plan.collectives_by_place()
        self._names = [f"{o.module} {o.name}" for o in plan.operators]
        self._alike = [_alike(o, at.get(o.name, ())) for o in plan.operators]
        self._keys: dict[int, tuple[Group, Hashable]] = {}  # by id, with the group, so that no other gets its id

    def module(self, module: _Module, parent: str) -> Group:
        """The group of `module`; a chain of modules that contain only each other is one."""
        while len(module.children) == 1 and isinstance(module.children[0], _Module):
            module = module.children[0]
        label = module.path.removeprefix(f"{parent}.") if parent else module.path
        children = self.inside(module)
        if len(children) == 1 and isinstance(stack := children[0], Group) and label:  # only the list of layers
            return Group(stack.kind, stack.name, f"{label}.{stack.label}", stack.children)
        return Group("module", module.path, label, children)

    def inside(self, module: _Module) -> tuple[Group | int, ...]:
        """The children of the group of `module`."""
        children = (child if isinstance(child, int) else self.module(child, module.path) for child in module.children)
        return self._runs(self._stacks(children))

    def _stacks(self, children: Iterable[Group | int]) -> list[Group | int]:
        """`children`, with consecutive modules that are alike as one stack: those whose names differ only in
        numbers."""
        groups: list[list[Group | int]] = []
        for child in children:
            last = groups[-1][-1] if groups else None
            if isinstance(child, Group) and isinstance(last, Group) and self._like(child, last):
                groups[-1].append(child)
            else:
                groups.append([child])
        return [self._joined("stack", group) if len(group) > 1 else group[0] for group in groups]

    def _like(self, one: Group, other: Group) -> bool:
        patterns = {re.sub(r"\d+", "*", each.label) for each in (one, other)}
        return len(patterns) == 1 and one.label != other.label and self._key(one) == self._key(other)

    def _runs(self, children: Sequence[Group | int]) -> tuple[Group | int, ...]:
        """`children`, at most MOST of them: if there are more, each is a run of neighbours."""
        while len(children) > MOST:
            each = max(2, min(MOST, -(-len(children) // MOST)))
            children = [
                self._joined("run", children[i : i + each]) if len(children[i : i + each]) > 1 else children[i]
                for i in range(0, len(children), each)
            ]
        return tuple(children)

    def _joined(self, kind: Literal["stack", "run"], children: Sequence[Group | int]) -> Group:
        first, last = self._ends(children[0])[0], self._ends(children[-1])[1]
        inside = self._runs(children) if kind == "stack" else tuple(children)
        return Group(kind, f"{first[0]} – {last[0]}", f"{first[1]} – {last[1]}", inside)

    def _ends(self, child: Group | int) -> tuple[tuple[str, str], tuple[str, str]]:
        """The name and the label of a child; for a run those of its two ends."""
        if isinstance(child, int):
            name = self._names[child].split(" ")[1]
            return (name, name), (name, name)
        if child.kind == "run":
            return self._ends(child.children[0])[0], self._ends(child.children[-1])[1]
        return (child.name, child.label), (child.name, child.label)

    def _key(self, child: Group | int) -> Hashable:
        """The key that children share if they are alike: the operators inside and the plan's decisions for them."""
        if isinstance(child, int):
            return self._alike[child]
        if id(child) not in self._keys:
            labels = [c.label if isinstance(c, Group) and c.kind == "module" else "" for c in child.children]
            key = child.kind, tuple(zip(labels, map(self._key, child.children), strict=True))
            self._keys[id(child)] = child, key
        return self._keys[id(child)][1]


def _alike(o: OperatorPlan, collectives: Iterable[Collective]) -> Hashable:
    sent = tuple((c.kind, c.axes, c.phase, c.payload_bytes) for c in collectives)
    # without the tensors kept for the backward: in plans of equal cost, layers may take turns
    return o.operator, o.result, o.factors, o.operands, o.results, o.annotation, f"{o.seconds:.6g}", sent


def module_of(tensor: TensorPlan) -> str:
    """The path of the module of the parameter or buffer `tensor`."""
    return tensor.name.rpartition(".")[0]

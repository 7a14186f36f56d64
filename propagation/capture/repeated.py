"""Which modules inside a function may be alike, so that one of them is traced for all (alike.py finds out)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn

from ..torch_internals import buffers_in, hooks_in, modules_in, parameters_in
from .hook_kinds import KINDS

_TRACED = 2  # of those that are alike; the others are copies
_PLAIN = (bool, str, float, type(None), Enum)


def repeated(fn: Any) -> dict[nn.Module, Hashable]:
    """Modules of which at least three look alike, none inside another, with a key that these share: where they are most
    worth it. What looks alike may still do something else."""
    if not isinstance(fn, nn.Module):
        return {}
    order = list(fn.modules())
    if any(map(_may_write, order)):
        return {}  # nothing is copied then
    looks, above = _looks(fn), dict[nn.Module, nn.Module]()
    for module in order:
        above.update((child, module) for child in _children(module))
    groups: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for module in order[1:]:
        if looks[module].size > 1:
            groups[looks[module].key].append(module)
    alike = [(key, each) for group in groups.values() for key, each in _apart(group, looks, above)]
    alike = [(key, each) for key, each in alike if len(each) > _TRACED]
    alike.sort(key=lambda pair: -(len(pair[1]) - _TRACED) * looks[pair[1][0]].size)
    chosen: dict[nn.Module, Hashable] = {}
    taken: set[nn.Module] = set()  # and all that are above them
    for key, each in alike:
        for module in each:
            if module not in taken and not any(up in chosen for up in _up(module, above)):
                chosen[module] = key
                taken.update((module, *_up(module, above)))
    return chosen


@dataclass(frozen=True)
class _Look:
    """What a module looks like with all that is inside: alike ones have one `key`.

    numbers   its whole numbers, which may count modules
    size      the number of modules
    """

    key: int
    numbers: tuple[int, ...]
    size: int


def _looks(fn: nn.Module) -> dict[nn.Module, _Look]:
    """What each module looks like; those inside come first."""
    found: dict[nn.Module, _Look] = {}
    known: dict[Hashable, int] = {}
    waiting = [(fn, False)]
    met = {fn}
    while waiting:
        module, ready = waiting.pop()
        new = [] if ready else [child for child in _children(module) if child not in met]
        if new:
            met.update(new)
            waiting += [(module, True), *((child, False) for child in new)]
            continue
        own, numbers = _look(module)
        inside = [found.get(child) for child in _children(module)]  # None: it is inside of itself
        keys = [id(child) if look is None else look.key for child, look in zip(_children(module), inside, strict=True)]
        parts = [look for look in inside if look is not None]
        counts = (*numbers, *(number for look in parts for number in look.numbers))
        found[module] = _Look(known.setdefault((own, *keys), len(known)), counts, 1 + sum(look.size for look in parts))
    return found


def _children(module: nn.Module) -> list[nn.Module]:
    return [child for child in modules_in(module).values() if child is not None]


def _look(module: nn.Module) -> tuple[Hashable, list[Any]]:
    """What a module itself looks like, and its whole numbers, which may count modules."""
    plain, numbers, named = [], [], []
    for name, value in vars(module).items():
        if type(value) is int:
            numbers.append(value)
            named.append(name)
        elif isinstance(value, _PLAIN) and not name.startswith("_"):
            plain.append((name, value))
    tensors = [
        (name, tensor is None or (tensor.shape, tensor.dtype, tensor.requires_grad))
        for store in (parameters_in(module), buffers_in(module))
        for name, tensor in store.items()
    ]
    hooks = any(hooks_in(module, kind) for kind in KINDS)
    return (
        type(module), tuple(plain), tuple(named), tuple(tensors), tuple(modules_in(module)), hooks and id(module),
    ), numbers  # fmt: skip


def _may_write(module: nn.Module) -> bool:
    """Whether a module of PyTorch's says that it writes to its buffers, or in place."""
    return (module.training and getattr(module, "track_running_stats", False) is True) or (
        getattr(module, "inplace", False) is True
    )


def _apart(
    group: Sequence[nn.Module], looks: Mapping[nn.Module, _Look], above: Mapping[nn.Module, nn.Module]
) -> Iterator[tuple[Hashable, list[nn.Module]]]:
    """The modules of a group by their numbers, without those that count the modules beside each other."""
    beside: dict[nn.Module, list[nn.Module]] = defaultdict(list)
    for module in group:
        beside[above[module]].append(module)
    most = max(map(len, beside.values()))
    kept = [
        i
        for i in range(len(looks[group[0]].numbers))
        if most == 1 or any(len({looks[m].numbers[i] for m in each}) < len(each) for each in beside.values())
    ]
    found: dict[Hashable, list[nn.Module]] = defaultdict(list)
    for module in group:
        found[(looks[module].key, *(looks[module].numbers[i] for i in kept))].append(module)
    yield from found.items()


def _up(module: nn.Module, above: dict[nn.Module, nn.Module]) -> Iterator[nn.Module]:
    """The modules that a module is inside of."""
    while module in above:
        module = above[module]
        yield module

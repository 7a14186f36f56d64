"""Parameters of the meta device get memory and values: each rank its part, with the numbers of one device.

Modules are initialised one after another, inner ones first, as `Module.apply` goes through them. What initialises one
is captured (`propagation/capture/initialisers.py`) and planned for the layouts that its parameters have, so that a rank
computes its parts. What cannot be captured runs whole on every rank, one module at a time, and each keeps its part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from partway.placing import Placing
from partway.propagation.capture.initialisers import holding, initial
from partway.propagation.graph.graph import Graph
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.program.differentiate import differentiate
from partway.propagation.program.lower import lower
from partway.propagation.search.formulate import formulate
from partway.propagation.search.problem import Fallback, Settings
from partway.propagation.search.search import SearchMode, search
from partway.runtime.step import CompiledStep
from partway.strategy import Layout, RuntimeStateError, VerifyError
from partway.strategy.notation import counted

Init = Callable[[nn.Module], object]


def on_meta(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of `module` without memory, by name."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {name: tensor for name, tensor in named.items() if tensor.is_meta}


def check_materialized(module: nn.Module) -> None:
    """Raise RuntimeStateError if some of the parameters are still on the meta device."""
    if missing := on_meta(module):
        raise RuntimeStateError(
            f"{_listed(missing)} on the meta device, without values; call model.materialize(...) with the arguments of "
            "a call before, which gives each rank its part and initialises it"
        )


def _listed(named: Mapping[str, Tensor]) -> str:
    names = list(named)
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{counted(len(names), 'tensor')} ({', '.join(names[:3])}{rest}) {'is' if len(names) == 1 else 'are'}"


def materialize(
    module: nn.Module, layouts: Mapping[str, Layout], place: Placing, settings: Settings, device: torch.device,
    random_numbers: RandomNumbers, init: Init | None,
) -> None:  # fmt: skip
    """Give the parameters and buffers of `module` that are on the meta device memory on `device`, laid out as `layouts`
    says by name (else whole), and values. Raises RuntimeStateError if no initialiser writes one of them; then none of
    those that are left has changed."""
    missing = on_meta(module)
    names: dict[int, str] = {id(tensor): name for name, tensor in missing.items()}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    canonical = {name: names[id(tensor)] for name, tensor in every if id(tensor) in names}
    made: set[str] = set()
    maker = _Maker(layouts, place, settings, device, random_numbers)
    for path, inner, run in _initialisers(module, init):
        prefix = f"{path}." if path else ""
        held: dict[str, str] = {}  # from a tensor's own name to the first one that it has in `inner`
        aliases: dict[str, str] = {}
        for name, own in canonical.items():
            if name.startswith(prefix):
                first = held.setdefault(own, name.removeprefix(prefix))
                if first != name.removeprefix(prefix):
                    aliases[name.removeprefix(prefix)] = first
        if held:
            local = {first: own for own, first in held.items()}
            made |= maker.make(run, inner, local, {n for n, own in local.items() if own in made}, aliases)
    if left := {name: tensor for name, tensor in missing.items() if name not in made}:
        raise RuntimeStateError(
            f"{_listed(left)} on the meta device and written by no module's reset_parameters(); pass "
            "init, a function that initialises the module it is given, as for Module.apply"
        )


def _initialisers(
    module: nn.Module, init: Init | None, path: str = ""
) -> Iterator[tuple[str, nn.Module, Callable[[], object]]]:
    """What initialises each module, inner ones first: `init`, or that of transformers, or the module's own."""
    by_model = getattr(module, "_init_weights", None)
    inherited = init or (by_model if callable(by_model) else None)
    for name, child in module.named_children():
        yield from _initialisers(child, inherited, f"{path}.{name}" if path else name)
    if inherited is not None:
        yield path, module, functools.partial(inherited, module)
        return
    own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    if callable(own):
        yield path, module, own


class _Maker:
    """Runs initialisers for the parts of this process."""

    def __init__(
        self, layouts: Mapping[str, Layout], place: Placing, settings: Settings, device: torch.device,
        random_numbers: RandomNumbers,
    ) -> None:  # fmt: skip
        self.layouts, self.place, self.device, self.random_numbers = layouts, place, device, random_numbers
        self.settings = replace(
            settings, batch_by_default=False, stay_split=False, memory_limit=None, on_unknown_op=Fallback.WARN
        )
        self.whole = Layout.replicated(settings.mesh)

    def make(
        self, run: Callable[[], object], module: nn.Module, local: Mapping[str, str], made: set[str],
        aliases: Mapping[str, str],
    ) -> set[str]:  # fmt: skip
        """Let `run` initialise tensors of `module`, whose names in the model `local` has by those in `module`; `made`
        have values already. Returns the names in the model of those that it wrote."""
        fresh = [name for name in local if name not in made]
        layouts = {name: self.layouts.get(own, self.whole) for name, own in local.items()}
        graph: Graph | None = None
        with contextlib.suppress(RuntimeError, VerifyError):  # what depends on values cannot be captured
            graph = initial(run, module, fresh, sorted(made), aliases, self.device, self.random_numbers)
        if graph is not None:
            values = self._by_parts(graph, module, layouts)
        else:
            values = self._whole(run, module, fresh, sorted(made), aliases, layouts)
        for name, value in values.items():
            for alias in (name, *(other for other, first in aliases.items() if first == name)):
                self.place.hold(module, alias, value)
        return {local[name] for name in values}

    def _by_parts(self, graph: Graph, module: nn.Module, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
        """What the graph of an initialiser makes, of each tensor this process's part."""
        if not graph.outputs:
            return {}
        allowed = {name: ((layout,), "where it lies") for name, layout in layouts.items()}
        problem = formulate(graph, self.settings, allowed)
        program = lower(problem, search(problem, SearchMode.DYNAMIC_PROGRAMMING).choice)
        executor = self.place.executor(self.settings.mesh)
        step = CompiledStep(differentiate(program, (False,) * len(graph.outputs)), executor, lambda wanted: step)
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        given = []
        for placed in program.inputs:
            enter = self.place.enter(placed, False)
            tensor = named[placed.port.name].detach()
            given.append(enter(tensor) if enter else tensor)
        found = step(given)
        parts = {}
        for placed, value in zip(program.outputs, found, strict=True):
            name = placed.port.name
            parts[name] = value if placed.layout == layouts[name] else self.place.part(value, layouts[name])
        return parts

    def _whole(
        self, run: Callable[[], object], module: nn.Module, fresh: list[str], made: list[str],
        aliases: Mapping[str, str], layouts: Mapping[str, Layout],
    ) -> dict[str, Tensor]:  # fmt: skip
        """What an initialiser makes, run on whole tensors. What it does not write stays without values."""
        named = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        tensors = {n: torch.empty(named[n].shape, dtype=named[n].dtype, device=self.device) for n in fresh}
        tensors |= {name: self.place.whole(named[name].detach()).clone() for name in made}
        before = {name: tensor._version for name, tensor in tensors.items()}
        every = {**tensors, **{alias: tensors[name] for alias, name in aliases.items()}}
        with holding(module, every), torch.no_grad():
            run()
        return {
            name: self.place.part(every[name].detach(), layouts[name])
            for name, tensor in tensors.items()
            if every[name] is not tensor or tensor._version != before[name]
        }

"""Give parameters on the meta device memory and values: each rank its part, with the same numbers as on one device.

Modules are initialised one after another, inner ones first, in the order of `Module.apply`. An initialiser is captured
(`propagation/capture/initialisers.py`) and planned for the layouts of its parameters, so that a rank computes only its
parts. One that cannot be captured runs on whole tensors on every rank, one module at a time, and each rank keeps its
part.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from partway.engine.placing import Placing
from partway.propagation.capture.initialisers import holding, initial
from partway.propagation.graph.graph import Graph
from partway.propagation.ops.random_numbers import RandomNumbers
from partway.propagation.problem.formulate import formulate
from partway.propagation.problem.problem import Fallback, Settings
from partway.propagation.program.lower import lower
from partway.propagation.search.search import SearchMode, search
from partway.propagation.torch_internals import version_of
from partway.runtime.loaded import Loaded
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


def materialize(module: nn.Module, maker: PartInitialiser, init: Init | None) -> None:
    """Give the parameters and buffers of `module` on the meta device memory and values. Raises RuntimeStateError if no
    initialiser writes one of them, which then stays unchanged."""
    missing = on_meta(module)
    names: dict[int, str] = {id(tensor): name for name, tensor in missing.items()}
    every = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    canonical = {name: names[id(tensor)] for name, tensor in every if id(tensor) in names}
    written: set[str] = set()
    for path, inner, run in _initialisers(module, init):
        prefix = f"{path}." if path else ""
        inside: dict[str, str] = {}  # from a tensor's name in the model to its first one in `inner`
        aliases: dict[str, str] = {}
        for name, own in canonical.items():
            if name.startswith(prefix):
                first = inside.setdefault(own, name.removeprefix(prefix))
                if first != name.removeprefix(prefix):
                    aliases[name.removeprefix(prefix)] = first
        if inside:
            names_inside = {first: own for own, first in inside.items()}
            written |= maker.make(_Initialiser(run, inner, names_inside, aliases, frozenset(written)))
    if left := {name: tensor for name, tensor in missing.items() if name not in written}:
        raise RuntimeStateError(
            f"{_listed(left)} on the meta device and written by no module's reset_parameters(); pass "
            "init, a function that initialises the module it is given, as for Module.apply"
        )


def _initialisers(
    module: nn.Module, init: Init | None, path: str = ""
) -> Iterator[tuple[str, nn.Module, Callable[[], object]]]:
    """Each module with its path and initialiser, inner ones first: `init`, or that of transformers, or its own."""
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


@dataclass(frozen=True)
class _Initialiser:
    """The initialiser of one module.

    run       the function
    module    the module that it initialises
    names     the names in the model of the tensors without memory, by those in `module`
    aliases   further names of these in `module`, each with the first one
    written   the names in the model of the tensors that have values already
    """

    run: Callable[[], object]
    module: nn.Module
    names: Mapping[str, str]
    aliases: Mapping[str, str]
    written: frozenset[str]

    @property
    def fresh(self) -> list[str]:
        """The names in `module` of the tensors without values."""
        return [name for name, own in self.names.items() if own not in self.written]

    @property
    def valued(self) -> list[str]:
        """The names in `module` of the tensors that the initialiser of an inner module has written."""
        return sorted(name for name, own in self.names.items() if own in self.written)

    def tensors(self) -> dict[str, Tensor]:
        """All parameters and buffers of `module`."""
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}


@dataclass(frozen=True)
class PartInitialiser:
    """Runs initialisers for the parts of this process.

    layouts          those of parameters, by name; other tensors are replicated
    place            the Placing of this process
    settings         of the search that plans an initialiser
    device           the device of the new tensors
    random_numbers   the option of that name
    """

    layouts: Mapping[str, Layout]
    place: Placing
    settings: Settings
    device: torch.device
    random_numbers: RandomNumbers

    def make(self, one: _Initialiser) -> set[str]:
        """Give the tensors of `one` memory and values. Returns the names in the model of those that it wrote."""
        replicated = Layout.replicated(self.settings.mesh)
        layouts = {name: self.layouts.get(own, replicated) for name, own in one.names.items()}
        graph: Graph | None = None
        with contextlib.suppress(RuntimeError, VerifyError):  # code that depends on values cannot be captured
            graph = initial(one.run, one.module, one.fresh, one.valued, one.aliases, self.device, self.random_numbers)
        values = self._whole(one, layouts) if graph is None else self._by_parts(graph, one, layouts)
        for name, value in values.items():
            for alias in (name, *(other for other, first in one.aliases.items() if first == name)):
                self.place.hold(one.module, alias, value)
        return {one.names[name] for name in values}

    def _by_parts(self, graph: Graph, one: _Initialiser, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
        """Run the graph of an initialiser: this process's part of each tensor, by name."""
        if not graph.outputs:
            return {}
        allowed = {name: ((layout,), "where it lies") for name, layout in layouts.items()}
        settings = replace(
            self.settings, batch_by_default=False, stay_split=False, memory_limit=None, on_unknown_op=Fallback.WARN
        )
        problem = formulate(graph, settings, allowed)
        program = lower(problem, search(problem, SearchMode.DYNAMIC_PROGRAMMING).choice)
        executor = self.place.executor(self.settings.mesh)
        loaded = Loaded(program, executor, lambda wanted: loaded)
        tensors, operands = one.tensors(), []
        for placed in program.inputs:
            enter = self.place.enter(placed, False)
            tensor = tensors[placed.port.name].detach()
            operands.append(enter(tensor) if enter else tensor)
        parts = {}
        for placed, value in zip(program.outputs, loaded(operands), strict=True):
            name = placed.port.name
            parts[name] = value if placed.layout == layouts[name] else self.place.part(value, layouts[name])
        return parts

    def _whole(self, one: _Initialiser, layouts: Mapping[str, Layout]) -> dict[str, Tensor]:
        """Run an initialiser on whole tensors: this process's part of each tensor that it writes, by name."""
        like = one.tensors()
        tensors = {n: torch.empty(like[n].shape, dtype=like[n].dtype, device=self.device) for n in one.fresh}
        tensors |= {name: self.place.whole(like[name].detach()).clone() for name in one.valued}
        before = {name: version_of(tensor) for name, tensor in tensors.items()}
        every = {**tensors, **{alias: tensors[name] for alias, name in one.aliases.items()}}
        with holding(one.module, every), torch.no_grad():
            one.run()
        return {
            name: self.place.part(every[name].detach(), layouts[name])
            for name, tensor in tensors.items()
            if every[name] is not tensor or version_of(tensor) != before[name]
        }

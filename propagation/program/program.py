"""The program that every rank runs in one step: a forward and a backward graph of local operators and conversions.

The graphs are the same on every rank; a conversion reads its rank only when it runs. Lowering makes a program without
a backward, and each later pass makes another one from it (`partway/compiler/passes.py`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ...strategy.errors import VerifyError
from ...strategy.layout import Layout
from ...strategy.mesh import Mesh
from ..cost.profile import DeviceProfile
from ..graph.graph import Text
from ..graph.nodes import returned_by
from ..graph.port import Port
from ..graph.printer import named, text_of
from ..ops.collectives import convert
from ..torch_internals import FakeTensorMode
from .any_size import free_sizes
from .collective import PHASES, Collective, Conversion, causes, collective, collectives_in
from .schedule import Schedule, predict
from .segments import Like, pieces_of


@dataclass(frozen=True)
class PlacedPort:
    """An input or output of a program: its port, its global shape, and its layout at rest."""

    port: Port
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of a rank's part, the same on every rank."""
        return self.layout.local_shape(self.shape)

    @property
    def part(self) -> str:
        """A rank's part as text: its shape, that of the whole, and the layout."""
        return f"{list(self.local_shape)} of {list(self.shape)} {self.layout}"

    def __str__(self) -> str:
        return f"{self.port.role.value} {self.port.name} {self.part}"


@dataclass(frozen=True)
class Program:
    """The graphs that one rank runs in one step, on its parts of the inputs.

    forward       inputs -> (outputs..., saved...)
    backward      (saved..., tangents of the differentiated outputs...) -> gradients of the inputs that need one;
                  None where nothing is differentiated
    wanted        whether each output is differentiated
    needed        whether each input gets a gradient
    lowered       inputs -> outputs, as the plan was lowered: what `differentiate` starts from
    conversions   those of all graphs, by tag
    profile       the device and network of predictions
    cost          the weighted cost, forward and backward: that of the plan's choices, or less if two consumers asked
                  for the same conversion
    parts         the parts of the batch, each on its own ranks
    resized       `lowered` for another number of rows of experts (`any_size.py`); None: it has no rows
    """

    mesh: Mesh
    inputs: tuple[PlacedPort, ...]
    outputs: tuple[PlacedPort, ...]
    lowered: fx.GraphModule = field(repr=False)
    conversions: tuple[Conversion, ...]
    profile: DeviceProfile = field(repr=False)
    cost: float
    forward: fx.GraphModule = field(repr=False)
    backward: fx.GraphModule | None = field(repr=False)
    wanted: tuple[bool, ...]
    needed: tuple[bool, ...]
    parts: int = 1
    resized: fx.GraphModule | None = field(default=None, repr=False)

    @classmethod
    def of_forward(
        cls,
        lowered: fx.GraphModule,
        mesh: Mesh,
        inputs: tuple[PlacedPort, ...],
        outputs: tuple[PlacedPort, ...],
        conversions: tuple[Conversion, ...],
        profile: DeviceProfile,
        cost: float,
        parts: int = 1,
    ) -> Program:
        """A program without a backward."""
        return cls(
            mesh=mesh,
            inputs=inputs,
            outputs=outputs,
            lowered=lowered,
            conversions=conversions,
            profile=profile,
            cost=cost,
            forward=lowered,
            backward=None,
            wanted=(False,) * len(outputs),
            needed=(False,) * len(inputs),
            parts=parts,
        )

    @property
    def undifferentiated(self) -> Program:
        """The program of the forward alone, as it was lowered."""
        wanted, needed = (False,) * len(self.outputs), (False,) * len(self.inputs)
        return replace(self, forward=self.lowered, backward=None, wanted=wanted, needed=needed)

    def of_any_size(self, other: Program) -> Program:
        """The program for any numbers of rows of experts, from that for one and `other` for another."""
        mine, others = self.with_values(), other.with_values()
        for phase, module in mine.phases.items():
            free_sizes(module.graph, others.phases[phase].graph)
        return replace(mine, resized=other.lowered)

    @property
    def phases(self) -> dict[str, fx.GraphModule]:
        """The graphs, by the name of their phase."""
        return {"forward": self.forward} | ({"backward": self.backward} if self.backward is not None else {})

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives in the order in which they run, forward first; each with its `members`."""
        return tuple(c for phase in self.phases for c in self._collectives_in(phase).values())

    @property
    def planned_collectives(self) -> tuple[Collective, ...]:
        """The collectives that the plan counts, forward first, whether the program has its backward or not."""
        repeated = [replace(c, again=True) for c in self.conversions if c.repeated]
        every = (
            collective(c, phase, self.mesh, self.profile) for phase in PHASES for c in (*self.conversions, *repeated)
        )
        return tuple(c for c in every if c is not None)

    @cached_property
    def schedule(self) -> Schedule:
        """The predicted schedule, computed at the first access."""
        graphs = {phase: module.graph for phase, module in self.with_values().phases.items()}
        return predict(graphs, self.mesh, self.profile)

    @cached_property
    def places_of_gradients(self) -> tuple[int, ...]:
        """The inputs for which the backward returns a gradient: an input on which no output depends gets none."""
        if self.backward is None:
            return ()
        gradients = iter(returned_by(self.backward.graph))
        return tuple(i for i, needs in enumerate(self.needed) if needs and next(gradients) is not None)

    def with_values(self) -> Program:
        """The program with the local values of its forward in `meta["val"]`. (A differentiated one has them from
        tracing.)"""
        if self.backward is not None:
            return self
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        with FakeTensorMode(), torch.enable_grad():
            device = self.inputs[0].port.node.meta["val"].device if self.inputs else torch.device("cpu")
            inputs = {
                node: Like.whole(placed.local_shape, placed.dtype, device, False)
                for node, placed in zip(self.forward.graph.find_nodes(op="placeholder"), self.inputs, strict=True)
            }
            likes = pieces_of(self.forward.graph, inputs)[1]
            graph.output(graph.graph_copy(self.forward.graph, copies))
            empty = functools.cache(Like.empty)  # many values are alike
            for node, copy in copies.items():
                copy.meta["val"] = _tensor_like(likes[node], empty)
        return replace(self, forward=Text(self.forward, graph))

    def __str__(self) -> str:
        texts = (f"{phase}\n{self.text(phase)}" for phase in self.phases)
        return "\n\n".join([f"on {self.mesh}", *texts])

    def text(self, phase: str, given: Sequence[tuple[str, str]] | None = None, results: Sequence[str] = ()) -> str:
        """A graph as text, with the parts of its inputs, and the costs and causes of its collectives. `given`,
        `results`: other names than usual of the inputs and results of a backward."""
        ports = dict(zip(self.forward.graph.find_nodes(op="placeholder"), self.inputs, strict=True))
        of_collectives = causes(self.conversions, {n: c.cost for n, c in self._collectives_in(phase).items()})

        def notes(node: fx.Node) -> Iterator[str]:
            if node in ports:
                yield ports[node].part
            yield from of_collectives(node)

        if phase == "forward":
            outputs = [placed.port.name for placed in self.outputs]
            return text_of(self.forward.graph, named(placed.port for placed in self.inputs), outputs, notes)
        if given is None:
            saved = returned_by(self.forward.graph)[len(self.outputs) :]
            differentiated = itertools.compress(self.outputs, self.wanted)
            given = [
                *(("saved", ports[node].port.name if node in ports else node.name) for node in saved),
                *((f"gradient of {placed.port.name}", "") for placed in differentiated),
            ]
            results = [f"gradient of {placed.port.name}" for placed in itertools.compress(self.inputs, self.needed)]
        return text_of(self.phases[phase].graph, given, results, notes)

    def _collectives_in(self, phase: str) -> dict[fx.Node, Collective]:
        return collectives_in(self.phases[phase].graph, phase, self.conversions, self.mesh, self.profile)


def _tensor_like(like: Any, empty: Callable[[Like], Any]) -> Any:
    if isinstance(like, Like):
        return empty(like)
    return tuple(_tensor_like(one, empty) for one in like) if isinstance(like, tuple) else like


def verify_program(program: Program) -> Program:
    """Return `program`. Raises VerifyError if its conversions are not those in its list, or do not fit the mesh."""
    mesh, tags = program.mesh, [n.args[5] for n in program.lowered.graph.nodes if n.target is convert]
    if len(set(tags)) != len(tags) or any(not 0 <= tag < len(program.conversions) for tag in tags):
        raise VerifyError("the conversions of the program are not those of its list")
    for c in program.conversions:
        if c.axes != tuple(a for a in mesh.axes if a in c.axes) or mesh.size(*c.axes) != c.size:
            raise VerifyError(
                f"the conversion of {c.tensor} over {','.join(c.axes)} is of {c.size} ranks; the mesh is {mesh}"
            )
    for placed in (*program.inputs, *program.outputs):
        if not placed.layout.fits(placed.shape):
            raise VerifyError(f"{placed.port.name} does not fit its layout {placed.layout}")
    return program

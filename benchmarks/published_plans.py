"""The raw ingredients of a step by a pinned recipe: what every operator computes and moves, and what every collective
sends, in the order in which a rank issues them. Seconds are computed later, from any profile (published_seconds.py).

A model is captured on the meta device with a few layers, its layout is pinned by annotations, and the search chooses
what they leave open. The fates of results are those of the recipe's recomputation. What is recorded is the program
after differentiation, recomputation and fusion, in which the collectives of a block's weights and gradients are one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from published_models import Architecture, LanguageModel
from recipes import block_of, followed, is_attention, is_product, pinned
from torch import fx

from partway.annotations.constrain import constrained_modules
from partway.compiler.driver import device_profile
from partway.compiler.passes import ANNOTATING, SEARCHING, Draft, differentiated_program, lowered, run, settings_of
from partway.compiler.replan_within_memory import held_in_step
from partway.fusion.fuse import fuse_program
from partway.fusion.members import Groups, Member
from partway.fusion.modes import FusionMode, FusionPolicies
from partway.fusion.policy import COLLECTIVES as KINDS
from partway.fusion.policy import Policy
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.propagation.capture.capture import capture
from partway.propagation.cost.cost import LOOKUPS
from partway.propagation.cost.profile import profile_of
from partway.propagation.graph.graph import differentiated
from partway.propagation.graph.nodes import (
    argument,
    bytes_of,
    computed_again,
    is_pointwise,
    is_view,
    module_path,
)
from partway.propagation.graph.port import Role
from partway.propagation.memory.backward_memory import timeline
from partway.propagation.memory.held import Purpose
from partway.propagation.memory.keeping import KeepProblem
from partway.propagation.minsum.eliminate import TABLE_LIMIT, affordable, eliminate_in, elimination_order
from partway.propagation.ops.collectives import convert, convert_group
from partway.propagation.problem.problem import SearchProblem, Vertex
from partway.propagation.program.program import Program
from partway.propagation.program.schedule import COMMUNICATION, Meter
from partway.propagation.search.solution import Solution
from partway.requests.plan_inputs import PlanInputs
from partway.requests.request import Request
from partway.strategy import Mesh

AGAIN = ("none", "attention", "every second product", "every second block", "full")  # what the backward computes again


RANKS = 8
MICROBATCH = 11  # a prime that no size of a model contains: tensors that it divides grow with the microbatch


@dataclass(frozen=True)
class Spec:
    """Everything that the graphs of a step depend on: equal specs have equal ingredients.

    dp, fsdp, tp   the sizes of the mesh's axes, from outside in. Parameters are copied over dp and split over fsdp.
    split_dp       parameters, gradients and states are split over dp, too (ZeRO 1 and 2)
    regather       weights are gathered again for the backward (ZeRO 3)
    sequence_parallel   between the products of a half, tp splits the sequence
    again          what the backward computes again, one of AGAIN
    free_again     views, casts and elementwise results are computed again instead of kept, as torch.compile does
    sum32          gradients are reduced in float32
    microbatch     sequences of one rank in one forward
    """

    model: Architecture
    dp: int
    fsdp: int
    tp: int
    split_dp: bool
    regather: bool
    sequence_parallel: bool
    again: str
    free_again: bool
    sum32: bool
    microbatch: int
    sequence: int
    dtype: str

    @property
    def key(self) -> str:
        """The name of its ingredients in the cache."""
        values = {**asdict(self), **asdict(self.model)}
        values.pop("model")
        return " ".join(f"{name}={value}" for name, value in values.items())

    @property
    def mesh(self) -> Mesh:
        """The mesh, of the axes with more than one rank."""
        sizes = {name: getattr(self, name) for name in ("dp", "fsdp", "tp") if getattr(self, name) > 1}
        return Mesh(sizes or {"dp": 1})

    @property
    def splitting(self) -> tuple[str, ...]:
        """The axes that parameters are split over beside tp."""
        return (("dp",) if self.split_dp and self.dp > 1 else ()) + (("fsdp",) if self.fsdp > 1 else ())

    @property
    def ways(self) -> int:
        """The number of parts that parameters are split into beside tp."""
        return math.prod(getattr(self, name) for name in self.splitting)

    def with_layers(self, layers: int) -> Spec:
        """The same with another number of layers."""
        return replace(self, model=replace(self.model, layers=layers))

    def with_few_ranks(self) -> Spec:
        """The same with RANKS of the axes beside tp and a microbatch of MICROBATCH, from whose ingredients those of
        this one follow: what a rank computes and the payloads of collectives do not depend on the number of ranks, and
        tensors with the batch are proportional to the microbatch."""
        few = {name: min(getattr(self, name), RANKS) for name in ("dp", "fsdp")}
        return replace(self, **few, microbatch=MICROBATCH)


# -- Annotations -------------------------------------------------------------------------------------------------------


def _axes(names: Sequence[str]) -> Any:
    return None if not names else names[0] if len(names) == 1 else tuple(names)


def request_of(spec: Spec) -> Request:
    """The annotations that pin the layout of a recipe: parameters by name, and what goes into and out of modules."""
    tp = "tp" if spec.tp > 1 else None
    batch = _axes([name for name in ("dp", "fsdp") if getattr(spec, name) > 1])
    rest, ways = _axes(spec.splitting), spec.ways
    _axes([*((tp,) if tp else ()), *spec.splitting])
    between = (batch, tp if spec.sequence_parallel else None, None)
    whole, split = (batch, None, None), (batch, None, tp)
    columns, rows = ((tp, rest), (rest, tp)) if tp else ((rest, None), (rest, None))
    even = spec.model.vocab % (ways * spec.tp) == 0
    table = (tp, rest) if tp else (rest, None) if even else (None, rest)
    into = ("*q_proj", "*k_proj", "*v_proj", "*gate_proj", "*up_proj", "lm_head")
    out_of = ("*o_proj", "*down_proj")
    if spec.model.family == "gpt":
        into = tuple(name for name in into if name != "*gate_proj")
    first = {"in_strategy": (whole,), "out_strategy": (split,)}
    modules = {
        **dict.fromkeys(into, first),
        **{name: {"in_strategy": (split,)} for name in out_of},
        **{name: {"in_strategy": (between,)} for name in ("*_layernorm", "model.norm")},
    }
    parameters: dict[str, Any] = {f"{name}.weight": columns for name in into if name != "lm_head"}
    parameters |= {f"{name}.weight": rows for name in out_of}
    parameters |= {"*embed_tokens.weight": table, "*norm.weight": (rest,)}
    if not spec.model.tied:
        parameters["lm_head.weight"] = table
    if spec.model.family == "gpt":
        parameters["*positions.weight"] = (None, rest)
    strategies = {"tokens": (batch, None), "labels": (batch, None)}
    return Request(strategies, parameter_plan=parameters, mesh=spec.mesh, module_plan=modules)


# -- A recipe as a search problem --------------------------------------------------------------------------------------


def followed_by(problem: SearchProblem, again: str) -> KeepProblem:
    """`problem` in which results that `again` names are not kept, and all others may be."""

    def whole(block: int) -> bool:
        return again == "full" or (again == "every second block" and block % 2 == 0)

    def is_again(vertex: Vertex, products: int) -> bool:
        if again == "attention":
            return is_attention(vertex)
        # torchtitan's selective recomputation saves attention and every second product
        saved = is_attention(vertex) or (is_product(vertex) and products % 2 == 1)
        return again == "every second product" and not saved

    return followed(problem, whole, is_again)


def solved(keep: KeepProblem, free_again: bool) -> Solution:
    """The cheapest strategies, and the fates of the recipe; with `free_again` results that cost next to nothing are
    computed again."""
    settings = keep.problem.settings
    at = np.zeros(len(keep.problem.vertices))
    costs = keep.costs(at)
    found = eliminate_in(costs, affordable(costs, elimination_order(costs, TABLE_LIMIT)))
    kept = keep.read_off(found.choice, at)
    if free_again:
        own = keep.at(kept.choice)
        price = 2 * 16e-3 * settings.weights.compute / settings.profile.memory_bandwidth
        costs = own.costs(at, price)
        again = eliminate_in(costs, affordable(costs, elimination_order(costs, TABLE_LIMIT)))
        kept = replace(own.read_off(again.choice, at, price), choice=kept.choice)
    held = timeline(keep, kept)
    return Solution(kept.choice, kept.cost, -math.inf, found.width, keeping=kept.keeping, held=held)


# -- Groups: the weights of a block are one message, and so are their gradients ----------------------------------------


@dataclass(frozen=True)
class _ByBlock:
    """A fusion policy that groups the collectives of the parameters of one block, as FSDP's units do."""

    blocks: Mapping[int, object]  # the unit of the parameter of each conversion, by tag

    config: None = None
    mode: FusionMode = FusionMode.SIZE

    @property
    def policy(self) -> Policy:
        return Policy(collectives=KINDS, problems=lambda config: [], group=self._group, updates=self._group)

    def _group(self, members: Sequence[Member], config: Any = None) -> Groups:
        groups: dict[object, list[int]] = {}
        for place, member in enumerate(members):
            groups.setdefault((member.key, self.blocks.get(member.tag)), []).append(place)
        return tuple(map(tuple, groups.values()))


def _unit(tensor: str) -> object:
    """The unit of a parameter: its block, the embedding, or the output layer with the last norm."""
    number = block_of(tensor)
    if number is not None:
        return number
    return "embedding" if "embed" in tensor or "positions" in tensor else "head"


def by_block(program: Program) -> Program:
    """`program`, in which the collectives of the parameters of a block are one, and so are those of their gradients."""
    blocks = {c.tag: _unit(c.tensor) for c in program.conversions}
    policy: Any = _ByBlock(blocks)
    return fuse_program(program, FusionPolicies(policy, policy, policy))


# -- Ingredients -------------------------------------------------------------------------------------------------------

COLUMNS = (
    "operator", "flops", "moved", "fixed", "written", "held", "still", "dtype", "reads", "axes", "payload", "weights",
    "flags",
)  # fmt: skip


def ingredients(spec: Spec) -> dict[str, Any]:
    """The nodes of the forward and the backward of `spec`, one list for each of COLUMNS:

    operator    the name of the operator, or the kind of the collective
    flops       floating-point operations; of causal attention half of what PyTorch's formula counts
    moved, written, held   bytes read and written, of these written, and of the node's value
    fixed, still    of moved and held, the bytes of tensors that do not grow with the microbatch
    reads       the places of its operands
    axes, payload   of a collective; "" for an operator
    weights     whether a collective gathers weights ("w") or reduces their gradients ("g")
    flags       "p" pointwise, "v" a view or a call without work, "a" computed again, "l" waits for nothing,
                "n" in a norm

    and the parameters of a rank, and the most bytes that it holds in each part of the step beside parameters and states
    (`_most_held`).
    """
    dtype = getattr(torch, spec.dtype)
    request = request_of(spec)
    mesh = spec.mesh
    with torch.device("meta"):
        model = LanguageModel(spec.model, spec.sequence, dtype)
        tokens = torch.empty(spec.microbatch * spec.dp * spec.fsdp, spec.sequence, dtype=torch.long)
    context = ParallelContext(reshard_after_forward=spec.regather, gradient_fp32_sync=spec.sum32, device_profile="h100")
    algo = AlgoParameters()
    with constrained_modules(model, request):
        graph = capture(model, (), {"tokens": tokens, "labels": tokens})
    inputs = PlanInputs(graph, model, request, context, algo, device_profile(graph, request, context))
    settings = replace(settings_of(inputs, mesh), memory_limit=None)
    draft = run((*ANNOTATING, *SEARCHING[:1]), Draft(inputs, mesh, settings))
    draft = replace(draft, problem=pinned(draft.problem, request.module_plan or {}))
    draft = replace(draft, solution=solved(followed_by(draft.problem, spec.again), spec.free_again))
    draft = lowered(draft)
    program = by_block(differentiated_program(inputs, draft.program, differentiated(graph)).program)
    own = [port for port in program.inputs if port.port.role is Role.PARAMETER]
    return {
        "parameters": sum(math.prod(port.local_shape) for port in own),
        "tensors": len(own),
        "held": _most_held(draft, program),
        "phases": {
            "forward": columns_of(program, program.forward.graph),
            "backward": columns_of(program, program.backward.graph) if program.backward is not None else {},
        },
    }


def columns_of(program: Program, graph: fx.Graph) -> dict[str, list[Any]]:
    """The nodes of a graph of `program`: see `ingredients`."""
    meter = Meter(graph, program.mesh, profile_of("h100"))
    parameters = {c.tag: (str(c.source), str(c.target)) for c in program.conversions if c.parameter}
    place = {node: i for i, node in enumerate(graph.nodes)}
    rows = [_row(node, meter, parameters, place) for node in graph.nodes]
    return {name: list(values) for name, values in zip(COLUMNS, zip(*rows, strict=True), strict=True)}


def _row(node: fx.Node, meter: Meter, parameters: Mapping[int, Any], place: Mapping[fx.Node, int]) -> tuple[Any, ...]:
    work = meter.work(node)
    reads = [place[operand] for operand in node.all_input_nodes]
    flags = ("a" if computed_again(node) else "") + ("l" if work.late else "")
    held, still = (meter.held(node), _still(node, meter)) if node.op in ("call_function", "placeholder") else (0, 0)
    dtype = next((str(t.dtype).removeprefix("torch.") for t in _tensors(meter.values.get(node))), "float32")
    if work.lane == COMMUNICATION:
        axes, weights = " ".join(work.axes), _of_weights(node, parameters)
        return (work.kind, 0, 0, 0, 0, held, still, dtype, reads, axes, work.payload, weights, flags)
    name = str(node.target) if node.op == "call_function" else node.op
    if node.target in (convert, convert_group):
        name = work.kind or "nothing"
    if node.op != "call_function" or work.lane is None or is_view(node):
        return (name, 0, 0, 0, 0, held, still, dtype, reads, "", 0, "", flags + "v")
    if node.target in (convert, convert_group):
        flops, moved, written = 0, held + sum(map(meter.held, node.all_input_nodes)), held
        flags += "p"
    else:
        flops, moved, written = meter.figures(node)
        flags += "p" if is_pointwise(node.target) else ""
    fixed = still + sum(_still(operand, meter) for operand in node.all_input_nodes)
    if node.target in LOOKUPS:
        fixed = still
    if "scaled_dot_product" in name:
        flops //= 2 if argument(node, "is_causal") else 1
    flags += "n" if "norm" in module_path(node).rpartition(".")[2] else ""
    return (name, flops, moved, fixed, written, held, still, dtype, reads, "", 0, "", flags)


def _still(node: fx.Node, meter: Meter) -> int:
    """The bytes of a node's value in tensors that do not grow with the microbatch."""
    return sum(bytes_of(t) for t in _tensors(meter.values.get(node)) if t.numel() % MICROBATCH)


def _most_held(draft: Draft, program: Program) -> dict[str, float]:
    """The most bytes that a rank holds beside parameters and states of the optimizer: in the forward, in the backward
    before the last block ("head"), in that of the last and of the first block, and after it ("end")."""
    held = held_in_step(draft.plan, program)
    rest = sum(held.by_purpose[purpose] for purpose in (Purpose.PARAMETERS, Purpose.OPTIMIZER))
    blocks = {v.name: block_of(module_path(v.node)) for v in draft.problem.vertices if v.port is None}
    last = max((block for block in blocks.values() if block is not None), default=0)
    found, here = dict.fromkeys(("forward", "head", "last", "first", "end"), 0.0), "head"
    for moment, size in zip(held.moments, (held.total - rest).tolist(), strict=True):
        block = blocks.get(moment.of)
        if moment.phase == "backward":
            if block is not None:
                here = "last" if block == last else "first" if block == 0 else "between"
            elif moment.of in blocks and here == "first":
                here = "end"
        place = here if moment.phase == "backward" else "forward"
        found[place] = max(found.get(place, 0.0), float(size))
    return found


def _of_weights(node: fx.Node, parameters: Mapping[int, Any]) -> str:
    tags = node.args[5]
    first: Any = tags[0] if isinstance(tags, tuple | list) else tags
    if first not in parameters:
        return ""
    return "w" if node.args[1:3] == parameters[first] else "g"


def _tensors(value: Any) -> list[torch.Tensor]:
    several = value if isinstance(value, tuple | list) else (value,)
    return [tensor for tensor in several if isinstance(tensor, torch.Tensor)]

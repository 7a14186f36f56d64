"""What fits: Llama-3 on 64 to 1,024 devices of 80 GB, beside the plans that people make by hand.

    python benchmarks/fits.py [--only "8B, FSDP"] [--layers 2] [--json out/fits.json]

Models have the shapes of Llama-3 and stand on the meta device, in bfloat16: parameters, gradients, activations and the
two states of Adam. Sequences have 8192 tokens, one for each device. Prices are those of the profile "h100", and a plan
fits if it holds no more than the memory limit, 80 GB less 6 %. Nothing is run, and no process group is there.

"ours" is what `compile` plans by default with the batch annotated. Every other row of Llama-3-8B is a `Recipe`:
annotations pin how parameters lie, what every matrix product reads and gives and how activations lie between the halves
of a block, and `Again` says what the backward computes again. What a recipe leaves open is searched for, in its favour:
the cheapest plan that follows it and fits. Views, casts and elementwise operators (of RMSNorm, of the rotary embedding,
SiLU) are had again for free in every recipe, as `torch.compile` does. So all rows have one cost model, and one search.

A block's stretch is the block, so that what a recipe computes again may be computed of what stands between blocks.
Checkpointing stops where nothing is left to compute again, as PyTorch's does: the last product of a block is not.

Every row is a process of its own. The bars: ours costs no more than the best recipe that fits, as the search weighs it
and as predicted time; its gap is at most 2 %, its search takes at most 3 CPU seconds and all but capture at most 6.
Llama-3-70B and -405B have no bars: meshes are tried one after the other until a plan fits.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from plan_time import PASSES, SEARCH
from recipes import followed, is_attention, is_product, pinned
from script import start

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from partway.annotations.constrain import constrained_modules
from partway.compiler.driver import device_profile
from partway.compiler.passes import (
    ANNOTATING,
    SEARCHING,
    Draft,
    lowered,
    memory_limit,
    run,
    search_on_mesh,
    settings_of,
    timed,
)
from partway.compiler.replan_within_memory import fitted
from partway.options.algo import AlgoParameters
from partway.options.parallel import ParallelContext
from partway.propagation.capture.capture import capture
from partway.propagation.cost.cost import collective_cost
from partway.propagation.memory.backward_memory import timeline
from partway.propagation.memory.keeping import CHEAP, KeepProblem
from partway.propagation.minsum.eliminate import TABLE_LIMIT, affordable, eliminate_in, elimination_order
from partway.propagation.problem.problem import SearchProblem, Vertex
from partway.propagation.search.solution import Solution
from partway.requests.plan_inputs import PlanInputs
from partway.requests.request import Request
from partway.strategy import Mesh, StrategyError

BARS = {"gap": 0.02, "search": 3.0, "beside capture": 6.0}  # relative, CPU seconds, CPU seconds
EVEN = 1e-6  # ours may cost so much more than a recipe: what floats add up to
SEQUENCE = 8192
STEEPER, TRIES = 2.0, 20  # prices of a byte for a recipe: each so many times the one before, and how many


class Model(StrEnum):
    """The shapes of Llama-3."""

    B8 = "Llama-3-8B"
    B70 = "Llama-3-70B"
    B405 = "Llama-3-405B"


SHAPES = {  # hidden size, that of the MLP, heads, layers
    Model.B8: (4096, 14336, 32, 32),
    Model.B70: (8192, 28672, 64, 80),
    Model.B405: (16384, 53248, 128, 126),
}


def llama(model: Model, layers: int) -> LlamaForCausalLM:
    """`model` with so many layers (0: all of its own), from Hugging Face's configuration."""
    hidden, ffn, heads, own = SHAPES[model]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers or own, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=SEQUENCE, use_cache=False,
    )  # fmt: skip
    made = LlamaForCausalLM(config)
    made.bfloat16()
    return made


FITTED = "fitted"  # making the step, and searching again where it holds too much

# -- Recipes -----------------------------------------------------------------------------------------------------------


class Again(StrEnum):
    """What the backward computes again, beside what is free.

    NOTHING     all else is kept
    ATTENTION   what attention computes (Megatron's selective recomputation)
    PRODUCTS    every second matrix product of a block (torchtitan's selective recomputation by operator)
    HALF        every second block, all of it (torchtitan's selective recomputation by layer)
    BLOCKS      all that is in a block (full checkpointing)
    """

    NOTHING = "nothing"
    ATTENTION = "attention"
    PRODUCTS = "every second product"
    HALF = "every second block"
    BLOCKS = "blocks"


@dataclass(frozen=True)
class Layouts:
    """How a recipe splits: the arguments of `compile`."""

    batch: Any
    parameters: Mapping[str, Any]
    modules: Mapping[str, Any]


def _layouts(batch: Any, sequence: Any, columns: Any, rows: Any, table: Any, norms: Any, across: str | None) -> Layouts:
    """`batch`, `sequence`: what splits them; `columns`, `rows`, `table`, `norms`: the strategies of the parameters, of
    q, k, v, gate, up and lm_head, of o and down, of the embedding, of the norms; `across`: what splits what lies
    between the products of a half."""
    between, whole, split = (batch, sequence, None), (batch, None, None), (batch, None, across)
    first = {"in_strategy": (whole,), "out_strategy": (split,)}
    into, out_of = ("*q_proj", "*k_proj", "*v_proj", "*gate_proj", "*up_proj", "lm_head"), ("*o_proj", "*down_proj")
    return Layouts(
        (batch, None),
        {f"{name}.weight": columns for name in into}
        | {f"{name}.weight": rows for name in out_of}
        | {"*embed_tokens.weight": table, "*norm.weight": norms},
        dict.fromkeys(into, first)
        | {name: {"in_strategy": (split,)} for name in out_of}
        | {name: {"in_strategy": (between,)} for name in ("*_layernorm", "model.norm")},
    )


BOTH = ("dp", "tp")
SPLIT = {
    # batch and every parameter over all devices
    "FSDP": _layouts(BOTH, None, (BOTH, None), (BOTH, None), (BOTH, None), (BOTH,), None),
    # the batch over all devices, parameters over those of a node
    "HSDP": _layouts(BOTH, None, ("tp", None), ("tp", None), ("tp", None), ("tp",), None),
    # Megatron: columns, then rows over tp, vocabulary over tp, the sequence over tp between; parameters over dp, too
    "TP, SP, FSDP": _layouts("dp", "tp", ("tp", "dp"), ("dp", "tp"), ("tp", "dp"), ("dp",), "tp"),
    # the same with what lies between halves whole on every rank of tp
    "TP, FSDP": _layouts("dp", None, ("tp", "dp"), ("dp", "tp"), ("tp", "dp"), ("dp",), "tp"),
    # Megatron without FSDP: parameters are copied over dp
    "TP, SP, DP": _layouts("dp", "tp", ("tp", None), (None, "tp"), ("tp", None), (None,), "tp"),
}


@dataclass(frozen=True)
class Recipe:
    """A plan that people make by hand: how it splits, what it computes again, and whether weights that were gathered
    for the forward are gathered again for the backward (None: as is cheapest)."""

    layouts: str
    again: Again
    regather: bool | None = None

    @property
    def name(self) -> str:
        gathered = {True: ", weights gathered again", False: ", weights kept", None: ""}[self.regather]
        return f"{self.layouts}; again: {self.again}{gathered}"


RECIPES = (
    *(Recipe("FSDP", again, regather=True) for again in (Again.BLOCKS, Again.HALF, Again.PRODUCTS, Again.NOTHING)),
    *(Recipe("FSDP", again, regather=False) for again in (Again.BLOCKS, Again.PRODUCTS, Again.NOTHING)),
    *(Recipe("HSDP", again, regather=True) for again in (Again.BLOCKS, Again.NOTHING)),
    *(Recipe("HSDP", again, regather=False) for again in (Again.BLOCKS, Again.NOTHING)),
    *(Recipe("TP, SP, FSDP", again) for again in (Again.ATTENTION, Again.BLOCKS, Again.NOTHING)),
    *(Recipe("TP, FSDP", again) for again in (Again.ATTENTION, Again.BLOCKS)),
    Recipe("TP, SP, DP", Again.ATTENTION),
)


# -- A recipe as a search problem --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """A plan with its fates, and the most bytes that a device holds at a time."""

    solution: Solution
    peak: float


def followed_by(problem: SearchProblem, again: Again) -> KeepProblem:
    """`problem` with the fates that `again` leaves."""

    def whole(block: int) -> bool:
        return again is Again.BLOCKS or (again is Again.HALF and block % 2 == 0)

    def is_again(vertex: Vertex, products: int) -> bool:
        attention = again is Again.ATTENTION and is_attention(vertex)
        return attention or (again is Again.PRODUCTS and is_product(vertex) and products % 2 == 0)

    return followed(problem, whole, is_again)


def cheapest(keep: KeepProblem, limit: float) -> Found:
    """The cheapest plan found that follows a recipe and keeps to the limit, or the one found that holds the least.

    Strategies are those that cost least without a limit. Where that does not fit, a byte that is kept costs more and
    more, and then so only in the first stretches, as few as will do, and in the rest what it cost before.
    """
    settings = keep.problem.settings
    found = _priced(keep, 0.0)
    own, strategies = keep.at(found.solution.choice), found.solution.choice
    price = 2 * CHEAP * settings.weights.compute / settings.profile.memory_bandwidth  # only what is free is had again
    found = least = _priced(own, price, strategies)
    if found.peak <= limit:
        return found
    before = price
    price = max(price, 1e-2 * found.solution.cost / limit)
    for _ in range(TRIES):
        found = _priced(keep, price)
        least = min(least, found, key=lambda each: each.peak)
        if found.peak <= limit:
            break
        before, price = price, price * STEEPER
    else:
        return least
    low, high = 0, keep.count  # stretches at the higher price that do not suffice, that do
    while high - low > 1:
        many = (low + high) // 2
        mixed = _priced(keep, before, more=np.where(np.arange(keep.count) < many, price - before, 0.0))
        low, high = (low, many) if mixed.peak <= limit else (many, high)
        found = min(found, mixed, key=lambda each: each.solution.cost) if mixed.peak <= limit else found
    return found


def _priced(keep: KeepProblem, price: float, strategies: tuple[int, ...] | None = None, more: Any = 0.0) -> Found:
    """The cheapest plan where a byte that is held at the loss has a price, and one that is kept costs so much `more`,
    for each stretch that keeps it. `strategies`: those that `keep` has left, if it leaves one alone."""
    prices = np.zeros(len(keep.problem.vertices))
    prices[-1:] = price
    costs = keep.costs(prices, more)
    found = eliminate_in(costs, affordable(costs, elimination_order(costs, TABLE_LIMIT)))
    kept = keep.read_off(found.choice, prices, np.asarray(more)[list(keep.stretches)] if np.ndim(more) else more)
    held = timeline(keep, kept)
    choice = strategies or kept.choice
    solution = Solution(choice, kept.cost, -math.inf, found.width, keeping=kept.keeping, held=held)
    return Found(solution, held.peak)


# -- Rows --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A row: a model on a mesh of dp x tp, as we plan it or by a recipe. One sequence for each device."""

    model: Model
    sizes: tuple[int, int]
    recipe: Recipe | None = None

    @property
    def name(self) -> str:
        mesh = "x".join(map(str, self.sizes))
        return f"{self.model}, {mesh}, {self.recipe.name if self.recipe else 'ours'}"

    @property
    def devices(self) -> int:
        return math.prod(self.sizes)


MESHES = {  # dp x tp, in the order in which they are tried
    (Model.B70, 64): ((8, 8), (64, 1), (4, 16)),
    (Model.B405, 512): ((64, 8), (32, 16), (512, 1), (16, 32)),
    (Model.B405, 1024): ((128, 8), (64, 16), (1024, 1), (32, 32)),
}
OURS = Case(Model.B8, (8, 8))
BY_HAND = (
    *(Case(Model.B8, (8, 8), recipe) for recipe in RECIPES),
    *(Case(Model.B8, (32, 2), Recipe("TP, SP, FSDP", again)) for again in (Again.ATTENTION, Again.NOTHING)),
)
LARGE = {key: tuple(Case(key[0], sizes) for sizes in meshes) for key, meshes in MESHES.items()}
LARGE_BY_HAND = {
    key: tuple(
        Case(key[0], meshes[0], Recipe("FSDP", again, regather=True))
        for again in (Again.BLOCKS, Again.HALF, Again.PRODUCTS)
    )
    for key, meshes in MESHES.items()
}
CASES = (OURS, *BY_HAND, *(case for every in (LARGE, LARGE_BY_HAND) for key in every for case in every[key]))


@dataclass(frozen=True)
class Row:
    """What one row gave. Bytes are those of one device, seconds those of a step.

    cost        what the search weighs
    gap         how far above the optimum the plan may be, relative; None of a recipe
    compute, communication, again   predicted seconds, of which a step is the sum
    latency     seconds of the communication that do not depend on bytes; fusion, which no row has, takes most of them
    wire        bytes that one rank sends, by phase, kind and axes of the collective
    fates       of the operators that cost most: how many are kept, computed again, or gone
    seconds     CPU seconds of each pass; of a recipe only some
    why         why there is no plan
    """

    peak: float = math.inf
    limit: float = 0.0
    cost: float = math.inf
    gap: float | None = None
    compute: float = math.inf
    communication: float = 0.0
    latency: float = 0.0
    again: float = 0.0
    wire: Mapping[str, float] = field(default_factory=dict)
    fates: Mapping[str, int] = field(default_factory=dict)
    memory: str = ""
    vertices: int = 0
    seconds: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    @property
    def step(self) -> float:
        """The predicted seconds of a step, nothing overlapped."""
        return self.compute + self.communication + self.again

    @property
    def fits(self) -> bool:
        return self.peak <= self.limit

    @property
    def search(self) -> float:
        """CPU seconds of annotations, formulating, all costs and the search."""
        return sum(self.seconds.get(name, 0.0) for name in SEARCH)

    @property
    def beside_capture(self) -> float:
        """CPU seconds of everything but capture."""
        return sum(self.seconds.get(name, 0.0) for name in (*PASSES, FITTED) if name != "capture")


def planned(case: Case, layers: int) -> Row:
    """Plan a row here and now."""
    mesh = Mesh(dict(zip(("dp", "tp"), case.sizes, strict=True)))
    recipe = case.recipe
    layouts = SPLIT[recipe.layouts] if recipe else Layouts(("dp", None), {}, {})
    names = ("input_ids", "labels") if recipe else ("input_ids",)
    request = Request(
        dict.fromkeys(names, layouts.batch), parameter_plan=layouts.parameters, mesh=mesh,
        module_plan=layouts.modules,
    )  # fmt: skip
    with torch.device("meta"):
        model = llama(case.model, layers)
        tokens = torch.empty(case.devices, SEQUENCE, dtype=torch.long)
    context = ParallelContext(reshard_after_forward=recipe.regather if recipe else None)
    algo = AlgoParameters()
    seconds: dict[str, float] = {}
    begin = time.process_time()
    with constrained_modules(model, request):
        graph = capture(model, (), {"input_ids": tokens, "labels": tokens})
    seconds["capture"] = time.process_time() - begin
    inputs = PlanInputs(graph, model, request, context, algo, device_profile(graph, request, context))
    limit = memory_limit(algo.memory_limit, inputs.profile) or math.inf
    around: Any = timed(seconds, clock=time.process_time)
    try:
        draft = (
            _by_recipe(inputs, mesh, recipe.again, limit) if recipe else search_on_mesh(inputs, mesh, math.inf, around)
        )
    except StrategyError as error:
        return Row(limit=limit, seconds=seconds, why=str(error))
    if recipe is not None:
        return _row(lowered(draft, around), limit, seconds)
    begin, before = time.process_time(), sum(seconds.values())
    try:
        made = fitted(draft, around)
    except StrategyError as error:
        return Row(limit=limit, seconds=seconds, why=str(error))
    seconds[FITTED] = time.process_time() - begin - (sum(seconds.values()) - before)
    return _row(made, limit, seconds)


def _by_recipe(inputs: PlanInputs, mesh: Mesh, again: Again, limit: float) -> Draft:
    """The draft of a recipe up to its solution."""
    formulating = SEARCHING[:1]
    settings = replace(settings_of(inputs, mesh), memory_limit=None)
    draft = run((*ANNOTATING, *formulating), Draft(inputs, mesh, settings))
    draft = replace(draft, problem=pinned(draft.problem, inputs.request.module_plan or {}))
    return replace(draft, solution=cheapest(followed_by(draft.problem, again), limit).solution)


def _row(draft: Draft, limit: float, seconds: Mapping[str, float]) -> Row:
    plan, profile = draft.plan, draft.settings.profile
    wire: Counter[str] = Counter()
    for c in plan.collectives:
        wire[f"{c.phase} {c.kind.value} {','.join(c.axes)}"] += c.wire_bytes
    fates: Counter[str] = Counter()
    for operator in plan.operators:
        if re.search("linear|scaled_dot_product", operator.operator):
            kind = operator.operator.split(".")[1].replace("scaled_dot_product_", "")
            fates[f"{kind} {operator.fate}"] += 1
    return Row(
        peak=plan.memory.total,
        limit=limit,
        cost=draft.solution.cost,
        gap=None if math.isinf(draft.solution.bound) else draft.solution.cost / draft.solution.bound - 1,
        compute=sum(operator.seconds for operator in plan.operators),
        communication=sum(c.predicted_time for c in plan.collectives),
        latency=sum(collective_cost(c.kind, c.payload_bytes, plan.mesh, c.axes, profile)[0] for c in plan.collectives),
        again=sum(operator.again for operator in plan.operators),
        wire=dict(sorted(wire.items())),
        fates=dict(sorted(fates.items())),
        memory=str(plan.memory),
        vertices=len(draft.problem.vertices),
        seconds=seconds,
    )


def in_own_process(case: Case, layers: int) -> Row:
    """`planned`, in a process of its own."""
    command = [sys.executable, __file__, "--one", case.name, "--layers", str(layers)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with exit status {done.returncode}")
    return Row(**json.loads(done.stdout.splitlines()[-1]))


# -- The table ---------------------------------------------------------------------------------------------------------


def misses(ours: Row, by_hand: Iterable[Row]) -> tuple[str, ...]:
    """The bars that our plan of Llama-3-8B is above."""
    fitting = [row for row in by_hand if row.fits]
    cost, step = (min((of(row) for row in fitting), default=math.inf) for of in (lambda r: r.cost, lambda r: r.step))
    checks = {
        "fits": ours.fits,
        "cost": ours.cost <= cost * (1 + EVEN),
        "predicted time": ours.step <= step * (1 + EVEN),
        "gap": ours.gap is not None and ours.gap <= BARS["gap"],
        "search": ours.search <= BARS["search"],
        "beside capture": ours.beside_capture <= BARS["beside capture"],
    }
    return tuple(name for name, held in checks.items() if not held)


def main(
    only: Annotated[str, typer.Option(help="run the rows whose name contains this")] = "",
    layers: Annotated[int, typer.Option(min=0, help="of every model; 0: those of its own")] = 0,
    every: Annotated[bool, typer.Option("--every", help="all meshes, and not only the first that fits")] = False,
    out: Annotated[Path, typer.Option("--json", help="where to write the figures")] = Path("out/fits.json"),
    one: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Plan all rows, print them, and exit with status 1 where ours misses a bar."""
    if one:
        print(json.dumps(asdict(planned(next(case for case in CASES if case.name == one), layers))))
        return
    found: dict[Case, Row] = {}
    groups = [(OURS, *BY_HAND), *(group for key in MESHES for group in (LARGE[key], LARGE_BY_HAND[key]))]
    for group in groups:
        for case in (case for case in group if only in case.name):
            found[case] = row = in_own_process(case, layers)
            _say(case, row)
            if case in itertools.chain.from_iterable(LARGE.values()) and row.fits and not every:
                break
    if not found:
        raise typer.BadParameter(f"no row contains {only!r}; the rows are: {'; '.join(case.name for case in CASES)}")
    Console(width=200).print(_table(found))
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"name": case.name, **asdict(row)} for case, row in found.items()]
    out.write_text(json.dumps({"torch": torch.__version__, "layers": layers, "rows": rows}, indent=1) + "\n")
    print(f"wrote {out}")
    if OURS in found:
        missed = misses(found[OURS], [row for case, row in found.items() if case.recipe])
        print(f"ours misses {', '.join(missed)}" if missed else "ours holds all bars")
        raise typer.Exit(1 if missed else 0)


def _say(case: Case, row: Row) -> None:
    """What a reader can check by hand."""
    print(case.name, flush=True)
    if row.why:
        print(f"    {row.why}")
        return
    print(f"    {row.memory}")
    print(f"    {', '.join(f'{count} {fate}' for fate, count in row.fates.items())}")
    for key, size in row.wire.items():
        print(f"    {size / 1e9:8.3f} GB {key}")
    took = ", ".join(f"{name} {spent:.2f}" for name, spent in row.seconds.items())
    print(f"    {row.vertices} vertices; CPU s: {took}", flush=True)


def _table(found: Mapping[Case, Row]) -> Table:
    limit = next(iter(found.values())).limit
    title = f"one step on one H100; a plan fits if it holds at most {limit / 1e9:.1f} GB; torch {torch.__version__}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("plan", max_width=84)
    names = (
        "GB",
        "cost",
        "step s",
        "compute",
        "communication",
        "latency",
        "again",
        "sent GB",
        "gap",
        "search",
        "beside capture",
    )
    for name in ("fits", *names):
        table.add_column(name, justify="right", no_wrap=True)
    for case, row in found.items():
        if row.why:
            table.add_row(case.name, "no", *[""] * 9, f"{row.search:.2f}", "")
            continue
        gap = "" if row.gap is None else "proven" if row.gap <= 1e-9 else f"{100 * row.gap:.2g} %"
        ours = case.recipe is None
        table.add_row(
            case.name, "yes" if row.fits else "no", f"{row.peak / 1e9:.1f}", f"{row.cost:.5f}", f"{row.step:.4f}",
            f"{row.compute:.4f}", f"{row.communication:.4f}", f"{row.latency:.4f}", f"{row.again:.4f}",
            f"{sum(row.wire.values()) / 1e9:.1f}", gap, f"{row.search:.2f}" if ours else "",
            f"{row.beside_capture:.2f}" if ours else "",
        )  # fmt: skip
    return table


if __name__ == "__main__":
    start(main)

"""The facts on a page beside the plan itself: the tree of its modules, the place of each collective, the layouts of
tensors on the devices, and the known alternatives. All of it is plain data, for the page's script.

Nodes have numbers: operators from 0 on in the order of the plan, then its inputs, then its outputs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from partway.propagation.graph import Role
from partway.propagation.plan import Alternatives, PlanData, Producer, ProducerKind, placed_reads
from partway.propagation.program import Collective
from partway.show.page.outline import Group, module_of, outline
from partway.show.pictures.drawing import svg_of
from partway.show.pictures.parts import parts_of
from partway.strategy import Kind, StrategyError, shown

PICTURES = 240  # drawn layouts of tensors, the most frequent ones
DRAWN_DEVICES = 65_536  # with more devices a picture is in words
CODES = {  # the meaning of a code on an axis, and its colour; for others the first letter counts
    "S0": ("splits dim 0", "#8fbdf0"),
    "S1": ("splits dim 1", "#7fd3c6"),
    "S2": ("splits dim 2", "#c3a8ee"),
    "S3": ("splits dim 3", "#f2a9c4"),
    "S": ("splits a dim beyond", "#c9d67f"),
    "R": ("the same on every rank", "#d4d9e1"),
    "B": ("the same; gradients are added up", "#e6e1d3"),
    "P": ("addends of the value", "#f6b566"),
    "T": ("rows of a rank's tokens", "#a5d6a7"),
    "E": ("rows of a rank's experts", "#e57373"),
    "C": ("slots of tokens that were sent once", "#b39b7d"),
}
KINDS = {  # the colour of each kind of collective
    Kind.ALL_REDUCE: "#c8324a",
    Kind.ALL_GATHER: "#2468c4",
    Kind.REDUCE_SCATTER: "#7a48bd",
    Kind.ALL_TO_ALL: "#16805f",
    Kind.ALL_TO_ALLV: "#3a6b1e",
    Kind.EXCHANGE: "#a86500",
}
_ROWS = 8  # rows, and columns, of a picture
_TYPE = re.compile(r"(\w+)\[([\d, ]*)\]")

Codes = tuple[str, ...]


@dataclass(frozen=True)
class Said:
    """The known alternatives in words: by the number of a collective, and by annotation. `otherwise`: why there are no
    more."""

    of_collectives: Mapping[int, Sequence[str]] = field(default_factory=dict)
    of_annotations: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""


def said(plan: PlanData, known: Alternatives | None, count: int) -> Said:
    """The statements of `known`, the alternatives of `plan`, about the `count` most expensive collectives, counting
    those of repeated layers once, and about as many annotations. Raises StrategyError for an invalid count."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 0:
        raise StrategyError(
            f"alternatives is {shown(count)} ({type(count).__name__}); write for how many collectives to find what the "
            "plan without them would cost: 0 (none) or more"
        )
    if not count:
        return Said(otherwise="What caused it was not asked for: save_html(..., alternatives=8) asks.")
    if known is None:
        return Said(
            otherwise="The plan was read from a file: what caused a collective, and what the plan without it would "
            "cost, needs the model. The page that the program which plans it saves says so."
        )
    dearest = sorted(range(len(plan.collectives)), key=lambda i: -plan.collectives[i].predicted_time)
    distinct: dict[Any, int] = {}
    for i in dearest:
        distinct.setdefault(like(plan.collectives[i]), i)
    keys = [t.name for t in (*plan.inputs, *plan.outputs) if t.annotation]
    keys += [f"constraint:{o.name}" for o in plan.operators if o.annotation]
    written = {key: one for key in keys if (one := known.annotation_of(key))}
    asked = list(dict.fromkeys(written.values()))[:count]
    texts = {one: known.of_annotation(one) for one in asked}
    return Said(
        {i: known.of_collective(plan.collectives[i]) for i in list(distinct.values())[:count]},
        {key: texts[one] for key, one in written.items() if one in texts},
        f"It is not among the {count} that cost most; save_html(..., alternatives={len(distinct)}) asks for all.",
    )


def like(c: Collective) -> tuple[str, ...]:
    """The key that collectives of repeated layers share."""
    return c.phase, c.kind, ",".join(c.axes), pattern(c.tensor), pattern(c.path), str(c.payload_bytes)


def pattern(name: str) -> str:
    """A name without the numbers of layers: `h.*.attn` for `h.0.attn`, `addmm` for `addmm_3`."""
    return re.sub(r"_\d+\b", "", re.sub(r"(?<![^.])\d+(?![^.])", "*", name))


def facts(plan: PlanData, known: Said) -> dict[str, Any]:
    """All facts. `graph`: why there are no edges, or nothing; `unsaid`: why some collectives have no alternatives."""
    tree = _Tree(outline(plan))
    crossings, why = _crossings(plan)
    return {
        "groups": tree.rows,
        "of": tree.of,
        "of_inputs": [tree.by_path(module_of(t)) for t in plan.inputs],
        "of_outputs": [tree.by_path(module_of(t)) if t.role is not Role.RESULT else 0 for t in plan.outputs],
        "crossings": crossings,
        "graph": why,
        "alike": _alike(plan.collectives),
        "layouts": _layouts(plan),
        "said": {str(i): list(lines) for i, lines in known.of_collectives.items()},
        "annotations": dict(known.of_annotations),
        "unsaid": known.otherwise,
        "codes": {code: colour for code, (_, colour) in CODES.items()},
        "kinds": {kind.value: colour for kind, colour in KINDS.items()},
    }


class _Tree:
    """The groups of an outline as rows (parent, kind, name, label), each after its parent, and the group of each
    operator. The children of a stack are alike."""

    def __init__(self, root: Group) -> None:
        self.rows: list[tuple[int, str, str, str]] = []
        found: dict[int, int] = {}
        self._paths: dict[str, int] = {}
        self._add(root, -1, found)
        self.of = [found[number] for number in range(len(found))]

    def _add(self, group: Group, parent: int, found: dict[int, int]) -> None:
        here = len(self.rows)
        self.rows.append((parent, group.kind, group.name, group.label))
        if group.kind == "module":
            self._paths[group.name] = here
        for child in group.children:
            if isinstance(child, int):
                found[child] = here
            else:
                self._add(child, here, found)

    def by_path(self, path: str) -> int:
        """The group of the module at `path`, or of the innermost shown module around it."""
        while path and path not in self._paths:
            path = path.rpartition(".")[0]
        return self._paths.get(path, 0)


def _crossings(plan: PlanData) -> tuple[list[tuple[int, int] | None], str]:
    """For each collective the two nodes between which it lies; and the reason if there are none."""
    numbers = {o.name: i for i, o in enumerate(plan.operators)}
    numbers |= {f"input {t.name}": len(numbers) + i for i, t in enumerate(plan.inputs)}
    numbers |= {f"output {t.name}": len(numbers) + i for i, t in enumerate(plan.outputs)}
    places: dict[int, tuple[int, int] | None] = {}
    try:
        reads = placed_reads(plan)
    except StrategyError as error:
        return [], str(error)
    for read, collectives in reads:
        producer = read.producer
        kind = "input " if producer.kind is ProducerKind.INPUT else ""
        constant = producer.kind is ProducerKind.CONSTANT
        for c in collectives:
            places[id(c)] = None if constant else (numbers[f"{kind}{producer.name}"], numbers[read.reader])
    return [places.get(id(c)) for c in plan.collectives], ""


def _alike(collectives: Sequence[Collective]) -> list[int]:
    """For each collective the number of the first one like it, in a repeated layer."""
    first: dict[Any, int] = {}
    return [first.setdefault(like(c), i) for i, c in enumerate(collectives)]


def _layouts(plan: PlanData) -> dict[str, dict[str, str]]:
    """The layouts of tensors, by type and codes (`float32[16, 64] S0 R`): the shape on a device, and a picture or, if
    that is not drawn, words."""
    counts = Counter(_tensors(plan))
    drawn = {key for key, _ in counts.most_common(PICTURES)} if plan.mesh.device_num <= DRAWN_DEVICES else set()
    return {f"{kind} {' '.join(codes)}": _layout(plan, kind, codes, (kind, codes) in drawn) for kind, codes in counts}


def _layout(plan: PlanData, kind: str, codes: Codes, draw: bool) -> dict[str, str]:
    if not (match := _TYPE.fullmatch(kind)):
        return {}
    dtype, sizes = match.groups()
    shape = tuple(int(size) for size in sizes.split(",") if size.strip())
    try:
        parts = parts_of(plan.layout_of(codes), shape)
    except StrategyError:  # it has no elements, or the plan was edited
        return {"local": kind}
    words = "; ".join(parts.meanings())
    local = f"{'' if parts.even else 'at most '}{dtype}{list(parts.local_shape)}"
    return {"local": local, "words": words, **({"svg": svg_of(kind, parts, most=_ROWS)} if draw else {})}


def _tensors(plan: PlanData) -> Iterator[tuple[str, Codes]]:
    """The type and the layout of every tensor, where it is made and where it is read."""
    types = {t.name: f"{t.dtype}{list(t.shape)}" for t in plan.inputs}
    made = {o.name: results_of(o.result, o.types) for o in plan.operators}

    def type_of(producer: Producer) -> str:
        match producer.kind:
            case ProducerKind.INPUT:
                return types.get(producer.name, "")
            case ProducerKind.OPERATOR:
                results = made.get(producer.name, ())
                return results[producer.result] if 0 <= producer.result < len(results) else ""
            case ProducerKind.CONSTANT:
                return ""

    for t in (*plan.inputs, *plan.outputs):
        yield f"{t.dtype}{list(t.shape)}", t.codes
    for o in plan.operators:
        yield from zip(made[o.name], o.results, strict=False)
        yield from ((type_of(producer), codes) for producer, codes in zip(o.producers or (), o.operands, strict=False))


def results_of(result: str, types: Sequence[str] | None) -> Sequence[str]:
    """The types of an operator's results; for a plan of an earlier version, that of its single result."""
    return types if types is not None else (result,)

"""The files of a call, in the order of the passes: what each shows, and from which level on it is there.

`NN_stage.txt` is what the plan was made of; `NN_stage.DETAIL.txt` (from level 2 on) is what stood there before a later
pass changed it, or what was tried on a mesh that was not taken.
"""

from __future__ import annotations

from dataclasses import dataclass

from partway.graphs.asked import Level


@dataclass(frozen=True)
class Stage:
    """A file: its name without the ending, what it shows, the level from which on it is there, and what of its words is
    explained."""

    name: str
    shows: str
    level: Level = Level.STAGES
    words: tuple[str, ...] = ()

    def head(self) -> list[str]:
        """How the file begins."""
        return [f"# {self.name}: {self.shows}", *(f"# {line}" for line in self.words)]


LAYOUTS = (
    "A layout such as [dp:S0 tp:R] says what a rank holds over each mesh axis: S0 its slice of dim 0, R the whole,",
    "P a partial sum (the value is the sum of all ranks'), B the whole where each rank's gradient is a partial sum",
)
_STRATEGIES = (
    "a strategy has for each tensor one entry for each dim: the axes that split it, or None; where ranks hold partial",
    "sums, one placement for each axis. `splits dp:m` says which index of the operator's rule dp splits",
    *LAYOUTS,
)
_CONVERSIONS = (
    *LAYOUTS,
    "all_reduce, all_gather, ... over an axis are conversions between layouts; slice, pad and keep send nothing, and",
    "`unchanged` is another layout of the same numbers. Bytes and shapes are those of one rank",
)

CAPTURED = Stage("00_captured", "the call as torch.export captured it, on whole tensors")
EXPANDED = Stage("01_expanded", "the same with operators that are not local, such as means, written as sums")
ABSORBED = Stage("02_absorbed", "the same where convolutions take over the padding of their operands", Level.PASSES)
PRUNED = Stage("03_pruned", "the graph that is planned: views are reshapes, dead operators are gone", Level.PASSES)
ANNOTATED = Stage("04_annotated", "the layouts that annotations allow", Level.PASSES, LAYOUTS)
FORMULATED = Stage(
    "05_formulated", "the strategies that each operator may have, the cheapest first", Level.PASSES, _STRATEGIES
)
SEARCHED = Stage(
    "06_searched", "the graph that is planned, with the strategy of each operator and what it causes", words=_STRATEGIES
)
LOWERED = Stage(
    "07_lowered", "the forward of one rank on its parts, with the conversions between layouts", words=_CONVERSIONS
)
FORWARD = Stage(
    "08_forward", "the forward of one rank as it is fused next, with what it saves for the backward", words=_CONVERSIONS
)
BACKWARD = Stage("09_backward", "the backward of one rank as it is fused next", words=_CONVERSIONS)
FUSED = Stage(
    "10_fused",
    "what every rank runs: collectives of parameters are grouped, and issued where they stand",
    words=_CONVERSIONS,
)

WAITING = Stage(
    "10_fused", "a backward that keeps gradients of micro-batches, or adds what was kept", words=_CONVERSIONS
)

BY_HAND = Stage("", "a collective that ranks call by hand, as this rank calls it")
BY_HAND_GRADIENT = Stage(".gradient", "the gradients of what the rank has, from those of what it gets")

OF_CAPTURE = {"expand_operators": EXPANDED, "absorb": ABSORBED, "prune": PRUNED}  # by their first pass
OF_PLANNING = {  # by the field of the draft that a pass makes
    "annotations": ANNOTATED, "problem": FORMULATED, "solution": SEARCHED, "local": LOWERED, "plan": SEARCHED,
}  # fmt: skip
OF_STEP = (FORWARD, BACKWARD)  # of a step; FUSED is of the program
EVERY = (
    CAPTURED, EXPANDED, ABSORBED, PRUNED, ANNOTATED, FORMULATED, SEARCHED, LOWERED, FORWARD, BACKWARD, FUSED,
)  # fmt: skip

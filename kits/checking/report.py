"""The report of `check_manual`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from partway.checking.records import Line


class Mistake(StrEnum):
    """The kind of a mistake."""

    MISSING_SUM = "a sum is missing"
    GRADIENT = "a gradient that is a partial sum is used as whole"
    TWICE = "a sum of what is replicated"
    LOCAL_COUNT = "a mean by the local count"
    ON_EVERY_RANK = "what is replicated is added to a partial sum"
    OF_A_SLICE = "a slice is used as if it were whole"
    SLICES = "slices are reduced as if they were partial sums"
    MEAN_OF_PARTS = "a mean of partial sums"
    LOCAL_SIZE = "a constant of the local size is the same on every rank"
    LAYOUT = "another layout than out_strategy says"


@dataclass(frozen=True)
class Finding:
    """A mistake.

    mistake   its kind
    line      its line in the person's code
    value     the value at that line
    is_       the placement that it has
    needs     the placement that is needed there
    write     the fix
    outputs   the results that it makes wrong
    """

    mistake: Mistake
    line: Line
    value: str
    is_: str
    needs: str
    write: str
    outputs: tuple[str, ...] = ()

    def __str__(self) -> str:
        told = {"at": str(self.line), "value": self.value, "is": self.is_, "needs": self.needs, "write": self.write}
        lines = [f"    {name:<7}{text}" for name, text in told.items() if text]
        wrong = f"{', '.join(self.outputs)} {'is' if len(self.outputs) == 1 else 'are'} wrong"
        return "\n".join([f"{self.mistake}, so {wrong}", *lines])


@dataclass(frozen=True)
class ResultDifference:
    """The difference of a result from that of one device: the largest of an element, and the largest element."""

    output: str
    difference: float
    largest: float
    right: bool

    def __str__(self) -> str:
        verdict = "is right" if self.right else "is wrong"
        return f"{self.output} {verdict}: it differs by {self.difference:.3g}, of up to {self.largest:.3g}"


@dataclass(frozen=True)
class ManualReport:
    """Whether a program of one rank computes the values of one device.

    function      its name
    against       the reference of the comparison
    differences   of each result
    findings      why results are wrong
    unknown       questions without an answer
    """

    function: str
    against: str
    differences: tuple[ResultDifference, ...]
    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]

    @property
    def right(self) -> bool:
        """Whether every result is that of one device."""
        return all(difference.right for difference in self.differences)

    def __bool__(self) -> bool:
        return self.right

    def __str__(self) -> str:
        head = f"{self.function} {'computes' if self.right else 'does not compute'} what {self.against} does"
        parts = ["\n".join([head, *(f"    {difference}" for difference in self.differences)])]
        parts += [str(finding) for finding in self.findings]
        if self.unknown:
            parts.append("\n".join(["cannot tell", *(f"    {text}" for text in self.unknown)]))
        return "\n\n".join(parts)

"""Why a result is wrong: the first value that is none of one device's, or that is not what it should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partway.checking.measured import Measured
from partway.checking.records import Line, Record
from partway.checking.report import Finding, Mistake
from partway.strategy import Layout, Mesh, Partial, Replicate, Shard

_ADDS = ("aten.add", "aten.sub", "aten.rsub", "aten.addmm", "aten.baddbmm")
_DIVIDES = ("aten.div", "aten.true_divide")


@dataclass(frozen=True)
class Measurements:
    """What the values of a rank are.

    records   what the first rank computed
    known     for records that have a counterpart on one device what they are; None for nothing of it
    """

    mesh: Mesh
    records: Sequence[Record]
    known: Mapping[int, Measured | None]

    def findings(self, number: int | None, wanted: Layout) -> Iterator[Finding]:
        """Why the result in the record `number` is not what `wanted` says."""
        if number is None:
            return
        found = self.known.get(number)
        if found is None:
            seen = set()
            for culprit in self._culprits(number):
                finding = self._of_culprit(culprit)
                if (finding.mistake, finding.line) not in seen:
                    seen.add((finding.mistake, finding.line))
                    yield finding
        elif found.factor != 1 and found.factor != self._count(found):
            yield self._of_factor(self._origin(number))
        else:
            yield self._of_layout(number, found, wanted)

    # -- Values that are something, and not what is needed

    def _of_layout(self, number: int, found: Measured, wanted: Layout) -> Finding:
        pairs = list(zip(self.mesh.axes, found.placements, wanted.placements, strict=True))
        pairs = [pair for pair in pairs if self.mesh.size(pair[0]) > 1 and pair[1] != pair[2]]
        addends = [axis for axis, placement, other in pairs if placement == Partial() and other != Partial()]
        record = self.records[number]
        is_ = found.told(self.mesh)
        needs = f"{Measured(tuple(_plain(p) for p in wanted.placements)).told(self.mesh)}, as out_strategy says"
        if addends:
            first = self._origin_of_addend(number, addends)
            mistake = Mistake.GRADIENT if record.backward else Mistake.MISSING_SUM
            op = "sum" if found.factor == 1 else "mean"  # of means of slices
            split = next((w for axis, _, w in pairs if axis in addends and isinstance(w, Shard)), None)
            return Finding(
                mistake, self.records[first].line, self._word(first), is_, needs,
                _sum(addends, op) if split is None else f"pw.ops.reduce_scatter(x, {op!r}, {split.dim}, {_group(addends)})",
            )  # fmt: skip
        axis, placement, other = pairs[0] if pairs else (self.mesh.axes[0], Replicate(), Replicate())
        match placement, other:
            case Shard(), Replicate():
                write = f"pw.ops.all_gather(x, {placement.dim}, {_group([axis])}), or out_strategy: {placement.dim} is split"
            case Replicate(), Shard():
                write = (
                    f"the slice of dim {other.dim} that pw.axis_index({axis!r}) says, or out_strategy without {axis}"
                )
            case Replicate(), Partial():
                write = "an out_strategy that says whole"
            case _:
                write = ""
        return Finding(Mistake.LAYOUT, record.line, self._word(number), is_, needs, write)

    def _of_factor(self, number: int) -> Finding:
        record, found = self.records[number], self.known[number]
        assert found is not None
        operands = [m for i in record.operands if (m := self.known.get(i)) is not None]
        of = operands[0].told(self.mesh) if operands else "alike on all ranks"
        is_ = found.told(self.mesh)
        if record.collective and found.factor > 1:
            axes = record.axes or self.mesh.axes
            count = " * ".join(f"pw.axis_size({axis!r})" for axis in axes)
            if record.backward:
                return Finding(
                    Mistake.TWICE, record.line, "the gradient of it", is_,
                    "one objective: that of all ranks is differentiated, and each rank has all of this one",
                    f'pw.ops.all_reduce(x, "mean", {_group(axes)}), or the result divided by {count}',
                )  # fmt: skip
            return Finding(
                Mistake.TWICE, record.line, self._word(record.operands[0] if record.operands else number), of,
                f"an addend over {','.join(axes)}", f'no {_name(record)} here, or op="mean"',
            )  # fmt: skip
        if record.collective:
            return Finding(
                Mistake.MEAN_OF_ADDENDS, record.line, self._word(record.operands[0]), of,
                'the value itself of every rank, for op="mean"', _sum(record.axes or self.mesh.axes),
            )  # fmt: skip
        return Finding(
            Mistake.LOCAL_COUNT, record.line, self._word(number), is_,
            "to be divided by the count of all ranks",
            'pw.ops.all_reduce(x, "mean", ...) where this is summed, or a division by the whole count',
        )  # fmt: skip

    def _origin(self, number: int) -> int:
        """Where a value first is too large."""
        while True:
            before = [i for i in self.records[number].operands if (m := self.known.get(i)) and m.factor != 1]
            if not before:
                return number
            number = before[0]

    def _origin_of_addend(self, number: int, axes: Sequence[str]) -> int:
        """Where a value first is an addend over `axes`."""
        places = [self.mesh.axes.index(axis) for axis in axes]
        while True:
            before = [
                i
                for i in self.records[number].operands
                if (m := self.known.get(i)) and any(m.placements[place] == Partial() for place in places)
            ]
            if not before:
                return number
            number = before[0]

    # -- Values that are nothing

    def _culprits(self, number: int) -> list[int]:
        """The values on the way to one that are nothing of what one device has, though all that they are made of is."""
        reached, waiting = {number}, [number]
        while waiting:
            for operand in self.records[waiting.pop()].operands:
                if operand not in reached:
                    reached.add(operand)
                    waiting.append(operand)
        return [i for i in sorted(reached) if self._is_culprit(i)]

    def _is_culprit(self, number: int) -> bool:
        record = self.records[number]
        if number not in self.known or self.known[number] is not None or not record.operands:
            return False
        if record.collective and not record.reduction and "all_gather" not in record.operator:
            return False  # what is moved is nothing for a while
        return all(self.known.get(operand) is not None for operand in record.operands)

    def _of_culprit(self, number: int) -> Finding:
        record = self.records[number]
        operands = {i: m for i in record.operands if (m := self.known.get(i)) is not None}
        large = [i for i, m in operands.items() if m.factor != 1]
        if large:
            return self._of_factor(self._origin(large[0]))
        addends = {i: self._axes(m, Partial()) for i, m in operands.items() if self._axes(m, Partial())}
        name = _name(record)
        if record.collective:
            return self._of_collective(record, operands)
        if addends and len(addends) < len(operands) and record.operator.startswith(_ADDS):
            other = next(i for i in operands if i not in addends)
            axes = next(iter(addends.values()))
            return Finding(
                Mistake.ON_EVERY_RANK, record.line, self._word(other), operands[other].told(self.mesh),
                f"to be added once, and is added by every rank of {','.join(axes)} before the sum",
                f"{_sum(axes)} of the other operand first, and then add it",
            )  # fmt: skip
        if len(addends) > 1 and record.operator.startswith(_DIVIDES):
            axes = list(addends.values())[-1]
            return Finding(
                Mistake.LOCAL_COUNT, record.line, self._word(record.operands[-1]),
                operands[record.operands[-1]].told(self.mesh), f"{name}: the sum and the count of all ranks",
                f"{_sum(axes)} of both, and divide then",
            )  # fmt: skip
        if addends:
            first, axes = next(iter(addends.items()))
            return Finding(
                Mistake.MISSING_SUM, record.line, self._word(first), operands[first].told(self.mesh),
                f"{name}: the whole, for it is not linear", f"{_sum(axes)} before it",
            )  # fmt: skip
        return self._of_slice(record, operands)

    def _of_collective(self, record: Record, operands: Mapping[int, Measured]) -> Finding:
        number, found = next(iter(operands.items()))
        name, axes = _name(record), record.axes or self.mesh.axes
        kind = Mistake.SLICES if any(self._axes(found, p) for p in _slices(found)) else Mistake.LAYOUT
        needs = (
            f"{name}: a slice of the dim that it gathers"
            if "all_gather" in name
            else f"{name}: an addend over {','.join(axes)}"
        )
        return Finding(kind, record.line, self._word(number), found.told(self.mesh), needs, "")

    def _of_slice(self, record: Record, operands: Mapping[int, Measured]) -> Finding:
        split = next(((i, m) for i, m in operands.items() if _slices(m)), None)
        if split is None:
            number = record.operands[0]
            return Finding(
                Mistake.UNEXPLAINED, record.line, self._word(number), operands[number].told(self.mesh),
                f"{_name(record)} computes something else on every rank", "",
            )  # fmt: skip
        number, found = split
        dim = next(iter(_slices(found))).dim
        axes = self._axes(found, Shard(dim))
        return Finding(
            Mistake.OF_A_SLICE, record.line, self._word(number), found.told(self.mesh),
            f"{_name(record)}: all of dim {dim}",
            f"pw.ops.all_gather(x, {dim}, {_group(axes)}) before it, or a reduction of what it computes",
        )  # fmt: skip

    def _count(self, found: Measured) -> int:
        """How many ranks have addends of a value."""
        return self.mesh.size(*self._axes(found, Partial()))

    def _axes(self, found: Measured, placement: Partial | Shard) -> list[str]:
        return [axis for axis, p in zip(self.mesh.axes, found.placements, strict=True) if p == placement]

    def _word(self, number: int) -> str:
        record = self.records[number]
        if record.operator.startswith("argument "):
            return f"the {record.operator}"
        sizes = list(record.value.shape)
        return f"the result {sizes} of {_name(record)}{' in the backward pass' if record.backward else ''}{_at(record.line)}"


def _slices(found: Measured) -> list[Shard]:
    return [p for p in found.placements if isinstance(p, Shard)]


def _plain(placement: object) -> Replicate | Shard | Partial:
    match placement:
        case Shard():
            return Shard(placement.dim)
        case Partial():
            return placement
        case _:
            return Replicate()


def _name(record: Record) -> str:
    return record.operator.removeprefix("aten.").removeprefix("partway.").partition(".")[0]


def _at(line: Line) -> str:
    return f", line {line.number}" if line.number else ""


def _group(axes: Sequence[str]) -> str:
    return f"group={axes[0]!r}" if len(axes) == 1 else f"group={tuple(axes)!r}"


def _sum(axes: Sequence[str], op: str = "sum") -> str:
    return f'pw.ops.all_reduce(x, "{op}", {_group(axes)})'

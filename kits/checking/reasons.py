"""Find why a result is wrong: the first value that matches no layout of the reference although its inputs do; or, if
all match, the value that is not laid out as is needed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from partway.checking.measured import Measured, Placed
from partway.checking.records import TensorRecord
from partway.checking.report import Finding, Mistake
from partway.strategy import PARTIAL, REPLICATE, Layout, Mesh, Partial, Replicate, Shard

_ADDS = ("aten.add", "aten.sub", "aten.rsub", "aten.addmm", "aten.baddbmm")
_DIVIDES = ("aten.div", "aten.true_divide")
_MOVES = (
    "aten.split", "aten.slice", "aten.select", "aten.view", "aten._unsafe_view", "aten.reshape", "aten.cat",
    "aten.repeat", "aten.expand", "aten.roll", "aten.flip", "aten.gather", "aten.index", "aten.embedding", "aten.clone",
    "aten.chunk", "aten.narrow", "aten.copy", "aten.constant_pad_nd", "aten.t.", "aten.transpose", "aten.permute",
    "aten.squeeze", "aten.unsqueeze",
)  # fmt: skip


@dataclass(frozen=True)
class Measurements:
    """The measured values of a rank.

    records   the values that the first rank computed
    known     for records with a counterpart on one device: all possible placements, the likeliest first; empty if none
              match
    """

    mesh: Mesh
    records: Sequence[TensorRecord]
    known: Mapping[int, tuple[Measured, ...]]

    def findings(self, number: int | None, wanted: Layout) -> Iterator[Finding]:
        """Explain why the result in the record `number` does not have the layout `wanted`; empty if that is unknown."""
        if number is None or number not in self.known:
            return
        found = self._what(number)
        if found is None:
            yield from filter(None, map(self._of_culprit, self.culprits(number)))
        elif self._scaled(number):
            yield self._of_factor(self._origin(number))
        else:
            yield self._of_layout(number, found, wanted)

    def culprits(self, number: int) -> list[int]:
        """The first values on the way to a record that match no layout of the reference although their inputs do.
        Matching values are not traced further. Empty if some values are unknown, as in a ring: there a value may match
        nothing for a while, without a mistake."""
        reached, waiting, culprits = {number}, [number], list[int]()
        while waiting:
            at = waiting.pop()
            if at not in self.known:
                return []
            lost = [i for i in self.records[at].operands if self._what(i) is None]
            if not lost:
                culprits.append(at)
            waiting += [i for i in lost if i not in reached]
            reached.update(lost)
        return sorted(culprits)

    # -- Values that match a layout, but not the needed one

    def _of_layout(self, number: int, found: Measured, wanted: Layout) -> Finding:
        if (mean := self._mean_of_addends(number)) is not None:
            return self._of_factor(mean)
        pairs = list(zip(self.mesh.axes, found.placements, wanted.placements, strict=True))
        pairs = [pair for pair in pairs if self.mesh.size(pair[0]) > 1 and pair[1] != pair[2]]
        addends = [axis for axis, placement, other in pairs if placement == PARTIAL and other != PARTIAL]
        needs = f"{Measured(tuple(_plain(p) for p in wanted.placements)).told(self.mesh)}, as out_strategy says"
        if addends:
            first = self._first_addend(number, addends)
            record, what = self.records[first], self._what(first)
            assert what is not None
            mistake = Mistake.LOCAL_COUNT if what.of_means(self.mesh) else Mistake.MISSING_SUM
            mistake = Mistake.GRADIENT if record.backward else mistake
            op = "mean" if found.of_means(self.mesh) else "sum"
            split = next((other for axis, _, other in pairs if axis in addends and isinstance(other, Shard)), None)
            write = _sum(addends, op)
            if split is not None:
                write = f'pw.ops.reduce_scatter(x, "{op}", {split.dim}, {_group(addends)})'
            return Finding(mistake, record.line, self._word(first), what.told(self.mesh), needs, write)
        axis, placement, other = pairs[0] if pairs else (self.mesh.axes[0], REPLICATE, REPLICATE)
        match placement, other:
            case Shard(), Replicate():
                write = (
                    f"pw.ops.all_gather(x, {placement.dim}, {_group([axis])}), or {axis} at dim {placement.dim} of "
                    "out_strategy"
                )
            case Replicate(), Shard():
                write = (
                    f"the slice of dim {other.dim} that pw.axis_index({axis!r}) says, or out_strategy without {axis}"
                )
            case Replicate(), Partial():
                write = "an out_strategy that says whole"
            case _:
                write = "an out_strategy that says what it is"
        line = self.records[number].line
        return Finding(Mistake.LAYOUT, line, self._word(number), found.told(self.mesh), needs, write)

    def _of_factor(self, number: int) -> Finding:
        """The value in the record `number` has a factor other than 1, unlike its inputs."""
        record, found = self.records[number], self._scaled(number) or self._small(number)
        assert found is not None
        axes, at = record.axes or self.mesh.axes, next(iter(record.operands), number)
        operand = self._what(at) or found
        if not record.collective:
            for mean in filter(None, map(self._mean_of_addends, record.operands)):
                return self._of_factor(mean)
            return Finding(
                Mistake.LOCAL_COUNT,
                record.line,
                self._word(number),
                found.told(self.mesh),
                "to be divided by the count of all ranks",
                "a division by the count of all ranks",
            )
        if record.reduction == "mean":
            return Finding(
                Mistake.MEAN_OF_PARTS,
                record.line,
                self._word(at),
                operand.told(self.mesh),
                'the value itself of every rank, for op="mean"',
                _sum(axes),
            )
        if operand.of_means(self.mesh):
            return self._of_means(at, f"a partial sum over {','.join(axes)}, for the sum in line {record.line.number}")
        if record.backward:
            count = " * ".join(f"pw.axis_size({axis!r})" for axis in axes)
            return Finding(
                Mistake.TWICE,
                record.line,
                "the gradient of it",
                found.told(self.mesh),
                "one objective: that of all ranks is differentiated, and each rank has all of this one",
                f"{_sum(axes, 'mean')}, or the objective divided by {count}",
            )
        addends = [axis for axis in axes if axis in operand.axes(PARTIAL, self.mesh)]
        return Finding(
            Mistake.TWICE,
            record.line,
            self._word(at),
            operand.told(self.mesh),
            f"a partial sum over {','.join(axes)}",
            _sum(addends) if addends else f'no {_name(record)} here, or op="mean"',
        )

    def _of_means(self, number: int, needs: str) -> Finding:
        """The value in the record `number` is a mean of each rank's own part."""
        what = self._what(number)
        assert what is not None
        axes = what.axes(PARTIAL, self.mesh)
        first = self._first_addend(number, axes)
        return Finding(
            Mistake.LOCAL_COUNT,
            self.records[first].line,
            self._word(first),
            what.told(self.mesh),
            needs,
            f"{_sum(axes, 'mean')} of it, or a division by the count of all ranks before the sum",
        )

    def _origin(self, number: int) -> int:
        """The record where a value first has a factor other than 1."""
        while before := [i for i in self.records[number].operands if self._scaled(i) is not None]:
            number = before[0]
        return number

    def _mean_of_addends(self, number: int) -> int | None:
        """The collective that made a value too small, even if ranks can also be said to have addends."""
        while self._small(number):
            if self.records[number].reduction == "mean":
                return number
            before = [i for i in self.records[number].operands if self._small(i)]
            if not before:
                return None
            number = before[0]
        return None

    def _first_addend(self, number: int, axes: Sequence[str]) -> int:
        """The record where a value is first an addend over `axes`."""
        while before := [
            i
            for i in self.records[number].operands
            if (m := self._what(i)) and set(m.axes(PARTIAL, self.mesh)) & {*axes}
        ]:
            number = before[0]
        return number

    # -- Values that match no layout

    def _of_culprit(self, number: int) -> Finding | None:
        record = self.records[number]
        operands = {i: what for i in record.operands if (what := self._what(i)) is not None}
        if not operands:
            return Finding(
                Mistake.LOCAL_SIZE,
                record.line,
                self._word(number),
                "what every rank makes for itself",
                "the whole, or that part of it that the rank stands for",
                "the whole size times pw.axis_size, or what starts at pw.axis_index times the local size",
            )
        if record.collective:
            return self._of_collective(record, operands)
        for i in operands:
            if (mean := self._mean_of_addends(i)) is not None:
                return self._of_factor(mean)
        addends = {i: axes for i, what in operands.items() if (axes := what.axes(PARTIAL, self.mesh))}
        if addends and record.operator.startswith(_DIVIDES) and record.operands[-1] in addends:
            i, part = record.operands[-1], operands.get(record.operands[0])
            mistake = Mistake.MISSING_SUM if part and part.slices else Mistake.LOCAL_COUNT
            return Finding(
                mistake,
                record.line,
                self._word(i),
                operands[i].told(self.mesh),
                f"{_name(record)}: what all ranks have together",
                f"{_sum(addends[i])} of what is divided by",
            )
        if scaled := [i for i in operands if self._scaled(i)]:
            return self._of_factor(self._origin(scaled[0]))
        if means := [i for i, what in operands.items() if what.of_means(self.mesh)]:
            return self._of_means(means[0], f"the whole, for {_name(record)} in line {record.line.number}")
        if addends and len(addends) < len(operands) and record.operator.startswith(_ADDS):
            other = next(i for i in operands if i not in addends)
            axes = next(iter(addends.values()))
            return Finding(
                Mistake.ON_EVERY_RANK,
                record.line,
                self._word(other),
                operands[other].told(self.mesh),
                f"to be added once, and every rank of {','.join(axes)} adds it to its partial sum",
                f"{_sum(axes)} of the partial sums first, and then add it",
            )
        if addends:
            first, axes = next(iter(addends.items()))
            return Finding(
                Mistake.MISSING_SUM,
                record.line,
                self._word(first),
                operands[first].told(self.mesh),
                f"{_name(record)}: the whole, for it is not linear",
                f"{_sum(axes)} before it",
            )
        return None if record.operator.startswith(_MOVES) else self._of_slice(record, operands)

    def _of_collective(self, record: TensorRecord, operands: Mapping[int, Measured]) -> Finding | None:
        number, found = next(iter(operands.items()))
        axes = record.axes or self.mesh.axes
        split = [axis for axis in axes if isinstance(found.placements[self.mesh.axes.index(axis)], Shard)]
        if not record.reduction or not split:
            return None
        dims = " and ".join(str(placement.dim) for placement in dict.fromkeys(found.slices))
        others = found.axes(PARTIAL, self.mesh)
        write = _sum(others, "mean" if found.of_means(self.mesh) else "sum") if others else ""
        return Finding(
            Mistake.SLICES,
            record.line,
            self._word(number),
            found.told(self.mesh),
            f"{_name(record)}: a partial sum over {','.join(axes)}",
            write or f"pw.ops.all_gather(x, {dims}, {_group(split)}), or no collective where it stays split",
        )

    def _of_slice(self, record: TensorRecord, operands: Mapping[int, Measured]) -> Finding | None:
        split = [(i, what) for i, what in operands.items() if what.slices]
        if not split:
            return None
        number, found = split[-1]
        dim = found.slices[0].dim
        return Finding(
            Mistake.OF_A_SLICE,
            record.line,
            self._word(number),
            found.told(self.mesh),
            f"{_name(record)}: all of dim {dim}",
            f"pw.ops.all_gather(x, {dim}, {_group(found.axes(Shard(dim), self.mesh))}) before it, or a reduction of "
            "what it computes",
        )

    # -- The measurement of a record

    def _what(self, number: int) -> Measured | None:
        """The likeliest measurement of a value; None if nothing matches, or it is unknown."""
        return next(iter(self.known.get(number, ())), None)

    def _scaled(self, number: int) -> Measured | None:
        """The measurement of a value with a factor other than 1, except for a mean."""
        what = self._what(number)
        return what if what and what.factor != 1 and not what.of_means(self.mesh) else None

    def _small(self, number: int) -> Measured | None:
        """The measurement of a value as too small, if it can also be an addend."""
        what = self._what(number)
        if what is None or (what.factor == 1 and PARTIAL not in what.placements):
            return None
        return next((m for m in self.known[number] if m.factor < 1 and PARTIAL not in m.placements), None)

    def _word(self, number: int) -> str:
        record = self.records[number]
        if record.operator.startswith("argument "):
            return f"the {record.operator}"
        where = " in the backward pass" if record.backward else ""
        line = f", line {record.line.number}" if record.line.number else ""
        return f"the result {list(record.value.shape)} of {_name(record)}{where}{line}"


def _plain(placement: object) -> Placed:
    match placement:
        case Shard():
            return Shard(placement.dim)
        case Partial():
            return placement
        case _:
            return REPLICATE


def _name(record: TensorRecord) -> str:
    return record.operator.removeprefix("aten.").removeprefix("partway.").partition(".")[0]


def _group(axes: Sequence[str]) -> str:
    return f"group={axes[0]!r}" if len(axes) == 1 else f"group={tuple(axes)!r}"


def _sum(axes: Sequence[str], op: str = "sum") -> str:
    return f'pw.ops.all_reduce(x, "{op}", {_group(axes)})'

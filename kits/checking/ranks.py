"""Run the program of one rank on all ranks of a mesh, each in a thread; the threads meet in collectives."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from partway.checking.records import Line, Recorder, TensorRecord, axes_of, tensors_in
from partway.propagation.graph import Call
from partway.propagation.ops import by_hand
from partway.strategy import CaptureError, Mesh, Place, placed


@dataclass(frozen=True)
class Run:
    """The records of one rank, the tensors that it returned, and the record of each of these."""

    records: Sequence[TensorRecord]
    outputs: Sequence[Tensor]
    numbers: Sequence[int | None]
    drawn: Sequence[Line] = field(default=())


def run_ranks(fn: Callable[..., Any], call: Call, parts: Sequence[Sequence[Tensor]], mesh: Mesh) -> tuple[Run, ...]:
    """Run `fn` on each rank of `mesh`, with its `parts` of the tensors of `call`. Raises the errors of `fn`, and
    CaptureError if ranks do not meet in the same collectives."""
    meeting = _Meeting(mesh)
    runs: dict[int, Run] = {}

    def run(rank: int) -> None:
        try:
            runs[rank] = _run(fn, call, parts[rank], Place(mesh, rank), meeting)
            meeting.leave(rank)
        except BaseException as error:
            meeting.fail(error)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(mesh.device_num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if meeting.failed is not None:
        raise meeting.failed
    return tuple(runs[rank] for rank in range(mesh.device_num))


def _run(fn: Callable[..., Any], call: Call, parts: Sequence[Tensor], place: Place, meeting: _Meeting) -> Run:
    recorder = Recorder(lambda operator, args: meeting.meet(place.rank, operator, args))
    leaves = [part.clone().requires_grad_(part.is_floating_point() or part.is_complex()) for part in parts]
    args, kwargs = call.structure.build(list(leaves))
    for name, leaf in zip(call.names, leaves, strict=True):
        recorder.given(name, leaf)
    with placed(place), torch.enable_grad(), recorder.recording():
        outputs = tensors_in(fn(*args, **kwargs))
    numbers = [recorder.number_of(output) for output in outputs]
    return Run(recorder.records, [output.detach() for output in outputs], numbers, recorder.drawn)


class _Meeting:
    """The meeting point of the ranks. `failed` is the error that ended it early."""

    def __init__(self, mesh: Mesh) -> None:
        self.failed: BaseException | None = None
        self._mesh = mesh
        self._changed = threading.Condition()
        self._waiting: dict[int, tuple[Any, Sequence[Any]]] = {}
        self._results: dict[int, Any] = {}
        self._left: set[int] = set()

    def leave(self, rank: int) -> None:
        """Mark that the program of a rank has ended."""
        with self._changed:
            self._left.add(rank)
            self._look()

    def fail(self, error: BaseException) -> None:
        """Mark that the program of a rank has raised `error`; the first one counts."""
        with self._changed:
            self.failed = self.failed or error
            self._changed.notify_all()

    def meet(self, rank: int, operator: Any, args: Sequence[Any]) -> Any:
        """Take part in a collective, and return this rank's result."""
        with self._changed:
            self._waiting[rank] = operator, args
            ranks = self._mesh.group(rank, *axes_of(operator, args))
            calls = [self._waiting.get(other) for other in ranks]
            there = [each for each in calls if each is not None and _alike(each, (operator, args))]
            if len(there) == len(ranks):
                for other, result in zip(ranks, _JOINT[operator]([each[1] for each in there]), strict=True):
                    self._results[other] = result
                    del self._waiting[other]
                self._changed.notify_all()
            else:
                self._look()
            while rank not in self._results and self.failed is None:
                self._changed.wait()
            if rank not in self._results:
                raise CaptureError("another rank has failed")
            return self._results.pop(rank)

    def _look(self) -> None:
        """End the meeting if all ranks wait or have ended, and none can go on."""
        if self._waiting and len(self._waiting) + len(self._left) == self._mesh.device_num and not self._results:
            told = [f"rank {rank} calls {_told(*call)}" for rank, call in sorted(self._waiting.items())]
            told += [f"rank {rank} has ended" for rank in sorted(self._left)]
            self.failed = CaptureError(
                f"ranks do not meet: {'; '.join(told)}; let all ranks of a group call the same collectives"
            )
            self._changed.notify_all()


def _alike(one: tuple[Any, Sequence[Any]], other: tuple[Any, Sequence[Any]]) -> bool:
    return one[0] is other[0] and axes_of(*one) == axes_of(*other)


def _told(operator: Any, args: Sequence[Any]) -> str:
    name = operator.name().removeprefix("partway::")
    return f"{name} over {','.join(axes_of(operator, args))}"


# -- The results of collectives: from the arguments of all ranks, in the order of their positions


def _all_reduce(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    total = by_hand.REDUCTIONS[calls[0][1]](torch.stack([call[0] for call in calls]))
    return [total.clone() for _ in calls]


def _all_gather(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    whole = torch.cat([call[0] for call in calls], calls[0][1])
    return [whole.clone() for _ in calls]


def _reduce_scatter(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    _, op, dim, _, sizes, _ = calls[0]
    total = by_hand.REDUCTIONS[op](torch.stack([call[0] for call in calls]))
    return [piece.clone() for piece in total.split(sizes, dim)]


def _broadcast(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    return [calls[calls[0][1]][0].clone() for _ in calls]


def _reduce(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    total = torch.stack([call[0] for call in calls]).sum(0)
    return [total.clone() if i == calls[0][1] else torch.zeros_like(total) for i in range(len(calls))]


def _all_to_all(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    pieces = [call[0].split(call[4], call[1]) for call in calls]
    return [torch.cat([each[i] for each in pieces], calls[0][2]) for i in range(len(calls))]


def _permute(calls: Sequence[Sequence[Any]]) -> list[Tensor]:
    pairs = calls[0][1]
    source = dict(zip(pairs[1::2], pairs[::2], strict=True))
    return [calls[source[i]][0].clone() if i in source else torch.zeros_like(c[0]) for i, c in enumerate(calls)]


def _send_receive(calls: Sequence[Sequence[Any]]) -> list[list[Tensor]]:
    sent: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
    for i, (xs, targets, *_) in enumerate(calls):
        for x, target in zip(xs, targets, strict=True):
            sent[i, target].append(x)
    received = []
    for i, (_, _, sources, sizes, ndims, *_) in enumerate(calls):
        came = []
        for source, shape in zip(sources, by_hand.shapes_of(sizes, ndims), strict=True):
            if not sent[source, i] or list(sent[source, i][0].shape) != shape:
                raise CaptureError(f"rank {i} of a group expects a tensor {shape} from rank {source}, which sends none")
            came.append(sent[source, i].popleft().clone())
        received.append(came)
    if rest := sorted(pair for pair, tensors in sent.items() if tensors):
        raise CaptureError(f"rank {rest[0][0]} of a group sends a tensor to rank {rest[0][1]}, which expects none")
    return received


_JOINT: Mapping[Any, Callable[[Sequence[Sequence[Any]]], list[Any]]] = {
    by_hand.all_reduce: _all_reduce,
    by_hand.all_gather: _all_gather,
    by_hand.reduce_scatter: _reduce_scatter,
    by_hand.broadcast: _broadcast,
    by_hand.reduce: _reduce,
    by_hand.all_to_all: _all_to_all,
    by_hand.permute: _permute,
    by_hand.send_receive: _send_receive,
}

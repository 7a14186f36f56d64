"""A log of each rank's runs, compared in the background: a rank that drifts from the others is found within a second.

Ranks agree before a plan is followed (`agreement.py`). After that a call must cost no collective, but one rank may
still be given another batch, be seeded again, or leave out a step, and nothing hangs: the numbers are just wrong. So
each run writes a line into its rank's ledger: the program, the state of the random generator if it draws, a sample of
the inputs if all ranks are given the same, whether an optimizer has stepped since the call before. A line costs
microseconds. A thread computes checksums of the lines, twice a second, and compares them with those of the first rank.
The next run of every rank raises an error with any difference; if none comes, it is written to stderr. All ranks share
a ledger of the programs that they run, and each group one of the collectives that are called by hand in it.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...propagation.torch_internals import is_batched, version_of
from ..torch_internals import local_part_of

_PERIOD = 0.5  # seconds between two comparisons
_SAMPLE = 64  # elements of an input
_LAST = 2.0  # seconds that the end of a process waits for rank 0's last lines
_END = "end"

_SAYS = {
    "runs": "ran another program (or left out a step) than {first}, at {where}",
    "calls": "called another collective than {first}, at {where}",
    "random": "drew from a random generator in another state than {first}, at {where}",
    "inputs": "was given inputs of other values than {first}, at {where}",
    "gradients": "went on otherwise with a result that is whole on every rank than {first}, at {where}",
    "parts": "was given another part of the batch than {first}, at {where}",
    "steps": "stepped its optimizer (or wrote to parameters or buffers) between other calls than {first}, at {where}",
    "copies": "holds other values than {first} of {where}",
    "writes": "wrote otherwise than {first} to a tensor that is split, at {where}",
    "settings": "has an optimizer of other settings than {first}, at {where}",
    "kept": "has new gradients, or none, of other parameters than {first}, at {where}",
}
_CHANGES = "change parameters, gradients, buffers and the states of optimizers on every rank, or on none"
_FIXES = {
    "runs": "make the same calls, in the same modes and the same order, on every rank",
    "calls": "let all ranks of a group call collectives in one order, on tensors of one shape and dtype",
    "random": "seed every rank alike, and draw what is a rank's own from a torch.Generator of its own",
    "steps": "step the optimizer, and write to parameters and buffers, on every rank or on none",
    "gradients": "compute a loss outside of the model alike on every rank: of pw.data.whole_batch(labels) where each "
    "has its own part",
    "parts": "they share a part: give them the same samples, as pw.data.distributed_sampler(dataset, part) does",
    "inputs": "give every rank the same whole batch, or set dataset_strategy where each has its own part",
    "copies": _CHANGES,
    "writes": _CHANGES,
    "kept": "set gradients to None or to zero on every rank, or on none",
    "settings": "make optimizers and schedulers alike on every rank, and step them alike",
}


class Ledger:
    """The lines of this rank, one of `ranks`, which share the ledger `name`. `store` is a connection of its own; `tell`
    tells all ranks the difference; `besides` runs at each comparison of the thread."""

    def __init__(
        self,
        store: Any,
        rank: int,
        ranks: Sequence[int],
        tell: Callable[[str], None],
        name: str = "ledger",
        besides: Callable[[], None] | None = None,
    ) -> None:
        self._store, self._rank, self._first, self._tell = store, rank, ranks[0], tell
        self._size, self._name, self._besides = len(ranks), name, besides
        self._lines: list[tuple[str, Any, Any]] = []  # not summed up yet: the kind, the data, and where for people
        self._own: list[tuple[str, Any]] = []  # not compared yet: the checksum, and where
        self._page = 0  # of rank 0's pages
        self._ended = self._over = False  # rank 0's last line is handed out, or read; no more comparisons
        self._work = threading.Lock()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def ran(self, identity: int, where: str, draws: bool) -> None:
        """Record the run of a program, identified by `identity`."""
        self._lines.append(("runs", identity, where))
        if draws:
            self._lines.append(("random", torch.get_rng_state(), where))
        self._start()

    def called(self, what: str) -> None:
        """Record a collective called by hand, identified by `what`."""
        self._lines.append(("calls", zlib.crc32(what.encode()), what))
        self._start()

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._compare, name="partway ledger", daemon=True)
            self._thread.start()

    def given(self, tensors: Sequence[Tensor], where: str) -> None:
        """Record that a call is given `tensors`, whole."""
        self._lines.append(("inputs", [s for t in tensors if (s := sample(t)) is not None], where))

    def came_back(self, gradient: Tensor | None, where: str) -> None:
        """Record the `gradient` of a result that is whole on every rank; None: the result was not used. A gradient that
        stands for several at once is not sampled."""
        found = sample(gradient) if gradient is not None and not is_batched(gradient) else None
        self._lines.append(("gradients", [found] if found is not None else [], where))

    def shared(self, tensor: Tensor, where: str) -> None:
        """Record that a call is given `tensor`, the part that these ranks share."""
        self._lines.append(("parts", [s] if (s := sample(tensor)) is not None else [], where))
        self._start()

    def stepped(self, written: tuple[int, ...], where: str) -> None:
        """Record the writes to parameters since the call before, as counted by `WriteCounts`."""
        self._lines.append(("steps", written, where))

    def holds(self, what: Tensor | int, where: str) -> None:
        """Record a sample or a checksum of data that the ranks hold alike."""
        self._lines.append(("copies", what, where))
        self._start()

    def settings(self, setting: Any, where: str) -> None:
        """Record a `setting` with which an optimizer steps: numbers and texts."""
        self._lines.append(("settings", setting, where))
        self._start()

    def kept(self, gradients: tuple[int, ...], where: str) -> None:
        """Record the `gradients` with which an optimizer steps: each is new (0), the object of a step before (1), or
        None (2)."""
        self._lines.append(("kept", gradients, where))
        self._start()

    def writes(self, what: tuple[Any, ...]) -> None:
        """Record a write to a split tensor: the operator, its operand's shape and its numbers."""
        self._lines.append(("writes", what, what))
        self._start()

    def end(self, failed: bool) -> None:
        """Compare the rest, as far as the last lines of the others come in time; the process or its group ends. After
        it has `failed` the rest is not compared: the ranks did not get equally far."""
        self._ends.set()
        if self._thread is None or failed:
            return
        self._thread.join(_LAST)
        end = time.monotonic() + _LAST
        while not self._turn(last=True) and time.monotonic() < end:
            time.sleep(0.01)

    def close(self) -> None:
        """End the ledger while the process goes on."""
        self.end(failed=False)
        self._store.close()

    def _compare(self) -> None:
        while not (self._ends.wait(_PERIOD) or self._over):
            self._turn()
            if self._besides is not None:
                with suppress(RuntimeError):  # the store has gone
                    self._besides()

    def _turn(self, last: bool = False) -> bool:
        """Sum up the new lines, and compare them. Returns whether nothing is left to do."""
        with self._work:
            if self._over:
                return True
            try:
                return self._hand_out(last) if self._rank == self._first else self._read(last)
            except RuntimeError:  # the store has gone
                self._over = True
                return True

    def _sum_up(self) -> list[tuple[str, Any]]:
        count = len(self._lines)  # another thread goes on writing
        checksums = [(f"{what}:{_checksum(of):08x}", where) for what, of, where in self._lines[:count]]
        del self._lines[:count]
        return checksums

    def _hand_out(self, last: bool) -> bool:
        ended, self._ended = self._ended, last
        checksums = [checksum for checksum, _ in self._sum_up()] + [_END] * (last and not ended)
        if checksums:
            self._store.set(f"{self._name}/{self._page}", " ".join(checksums))
            self._page += 1
        return last and not self._store.check([f"{self._name}/{self._page - 1}"])  # whether all have read it

    def _read(self, last: bool) -> bool:
        self._own += self._sum_up()
        if self._ended and self._differs([_END]):
            return True
        while (self._own or last) and not self._ended and self._store.check([f"{self._name}/{self._page}"]):
            page = self._store.get(f"{self._name}/{self._page}").decode().split()
            ended = page[-1] == _END
            if not last and len(page) - ended > len(self._own):
                return False  # this rank is behind
            if self._differs(page):
                return True
            if self._store.add(f"{self._name}/{self._page}/read", 1) == self._size - 1:
                self._store.delete_key(f"{self._name}/{self._page}")
                self._store.delete_key(f"{self._name}/{self._page}/read")
            self._page += 1
            self._ended = ended
        self._over = self._ended and last
        return self._ended or not (self._own or last)

    def _differs(self, page: list[str]) -> bool:
        """Compare a page of rank 0's with our first lines, and remove those. Returns whether they differ."""
        for theirs in page:
            if theirs == _END and not self._own:
                return False
            ours, where = self._own.pop(0) if self._own else (_END, "")
            if theirs != ours:
                self._over = True
                self._tell(self._described(theirs, ours, where))
                return True
        return False

    def _described(self, theirs: str, ours: str, where: Any) -> str:
        kinds = [text.partition(":")[0] for text in (theirs, ours)]
        kind = kinds[0] if kinds[0] == kinds[1] else "runs"
        if kind == "runs":  # one rank ran an action that the other did not
            kind = "writes" if "writes" in kinds else "steps" if "settings" in kinds else kind
        if _END in kinds:
            more, fewer = (self._rank, self._first) if theirs == _END else (self._first, self._rank)
            kind = next(kind for kind in kinds if kind != _END)
            if kind != "calls":
                return f"rank {more} ran more than rank {fewer} before that ended; {_FIXES['runs']}"
            return f"rank {more} called more collectives than rank {fewer} before that ended; {_FIXES[kind]}"
        if isinstance(where, tuple):
            operator, *about = where
            where = f"{operator} of {', '.join(map(str, about))}"
        said = _SAYS[kind].format(first=f"rank {self._first}", where=where)
        return f"rank {self._rank} {said}; {_FIXES[kind]}"


class WriteCounts:
    """Counts the writes to the parameters and buffers of a function since its call before."""

    def __init__(self) -> None:
        self._before: list[tuple[Tensor, int]] | None = None

    def __call__(self, held: Sequence[tuple[str, Tensor]]) -> tuple[int, ...]:
        """The writes to each of the named tensors `held`, including those to this rank's part of it; 0 in the first
        call. -1: the tensor is another one than before."""
        now = [(t, _version(t)) for _, t in held]
        before, self._before = self._before or now, now
        pairs = zip(before, now, strict=False)  # of equal length unless modules were replaced
        return tuple(m - n if t is u else -1 for (t, n), (u, m) in pairs)


def _version(tensor: Tensor) -> int:
    """The number of in-place writes to a tensor and its part."""
    part = version_of(local_part_of(tensor)) if isinstance(tensor, DTensor) else 0
    return version_of(tensor) + part


def sample(tensor: Tensor, turn: int = 0) -> Tensor | None:
    """A copy of a few elements of a plain tensor on the CPU, independent of its strides; None if they are not cheap to
    copy, or not there. Another `turn` takes other elements of a contiguous tensor."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__  # pyright: ignore[reportAttributeAccessIssue] # it is static
    if not plain or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return None
    tensor = tensor.detach()
    step = max(1, tensor.numel() // _SAMPLE)
    if tensor.is_contiguous():
        return tensor.view(-1)[turn % step :: step].clone()
    return tensor[_places(tensor.shape, step)]


@lru_cache(maxsize=256)
def _places(shape: torch.Size, step: int) -> tuple[Tensor, ...]:
    """The indices of every `step`-th element, along each dim."""
    return torch.unravel_index(torch.arange(0, shape.numel(), step), shape)


def checksum(tensor: Tensor, start: int = 0) -> int:
    """A checksum of the bits of all elements in their order, continuing from `start`."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)
    return zlib.crc32(flat.view(torch.uint8).cpu().numpy().data, start)


def _checksum(of: Any) -> int:
    if isinstance(of, int):
        return of
    if isinstance(of, tuple | str):
        return zlib.crc32(repr(of).encode())
    total = 0
    for tensor in [of] if isinstance(of, Tensor) else of:
        total = checksum(tensor, total)
    return total

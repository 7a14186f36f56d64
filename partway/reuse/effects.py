"""The side effects of a function in Python: undone after its capture, and repeated by each call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from partway.propagation.capture.hooks import Noted
from partway.propagation.graph.structure import flatten, name_of
from partway.reuse.snapshot import Snapshot, Write
from partway.reuse.state import State
from partway.strategy import CaptureError


class Effects:
    """The places that a function writes while it is captured: attributes of modules and objects, variables, elements of
    lists and dicts. After the capture the old values are restored; each call then writes its own values there."""

    def __init__(self, fn: Callable[..., Any], state: State) -> None:
        self._fn, self._state = fn, state
        self._outside = Snapshot(fn, state.reached)
        self._before: Snapshot | None = None
        self.writes: tuple[Write, ...] = ()

    def begin(self) -> None:
        """Take a snapshot before the function runs."""
        self._before = Snapshot(self._fn, self._state.reached)

    def end(self) -> list[Any]:
        """Restore the snapshot after the function has run, and return the values that it wrote. Raises CaptureError for
        writes that a call cannot repeat."""
        assert self._before is not None
        replaced, changed = self._before.replaced(), next(self._before.changed(), None)
        pairs = zip(self._before.parameters(), self._outside.parameters(), strict=True)
        self.writes = tuple(self._before.writes({id(stand_in): parameter for stand_in, parameter in pairs}))
        self._before.restore()
        if replaced:
            raise CaptureError(
                f"{name_of(self._fn)} replaces {', '.join(replaced)} while it runs, which a plan cannot do; keep what "
                "it computes in a buffer (register_buffer), or change parameters and modules between calls"
            )
        if changed is not None:
            label, drawn = changed
            raise CaptureError(
                f"{name_of(self._fn)} draws random numbers of {label}, and they would be the same in every call; draw "
                "them with torch (torch.rand([]) may decide a branch), or outside the sharded function"
                if drawn
                else f"{name_of(self._fn)} changes {label}, which later calls would not do; change it outside the "
                "sharded function, or keep what changes in an attribute or a buffer"
            )
        return [write.value for write in self.writes]

    def abort(self) -> None:
        """Restore the snapshot after the function raised an error."""
        if self._before is not None:
            self._before.restore()

    def finish(self) -> None:
        """After the capture, restore the lists and dicts that torch.export has replaced by copies."""
        self._outside.restore()

    def noted(self) -> Noted:
        """A snapshot of the current values."""
        return Snapshot(self._fn, self._state.reached)

    @property
    def kept(self) -> frozenset[str]:
        """The labels of the places to which it writes tensors."""
        return frozenset(write.label for write in self.writes if flatten(write.value)[0])

    def check(self, constants: Mapping[str, Tensor]) -> None:
        """Raise CaptureError if the function reads a tensor from a place to which it writes another one. `constants`:
        the tensors that it took from outside."""
        assert self._before is not None
        for write in self.writes:
            old = flatten(self._before.old.get(write.label))[0]
            if any(one is constant for one in old for constant in constants.values()):
                raise CaptureError(
                    f"{name_of(self._fn)} keeps a tensor in {write.label} from one call to the next, which would stay "
                    "what it was at the first; make it a buffer (register_buffer) or an argument that is returned, or "
                    "empty it before each call"
                )

    def put(self, values: Sequence[Any]) -> None:
        """Write the values of a call to the places that the function writes."""
        for write, value in zip(self.writes, values, strict=True):
            write.put(value)

"""`LossMonitor`: prints the losses of a training in MindSpore's format, and raises an error for NaN and Inf."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from partway.requests import whole
from partway.runtime import get_group_size
from partway.runtime.ranks import gathered, named
from partway.strategy import LossError, RuntimeStateError, counted, shown
from partway.strategy.basics import lasting

_SHORTEST = {torch.float64: np.float64, torch.float16: np.float16}  # others are shown as float32


@dataclass(frozen=True, slots=True)
class _Step:
    """A completed step: its position, counted from 0, and its loss on this rank."""

    epoch: int
    step: int
    loss: Tensor

    def __str__(self) -> str:
        return f"epoch {self.epoch + 1}, step {self.step + 1}"


class LossMonitor:
    """Prints the loss of a training loop, one line every `per_print_times` steps:

    monitor = pw.LossMonitor()
    for epoch in range(epochs):
        for images, labels in loader:
            loss = model(images, labels)
            ...
            monitor(loss, epoch=epoch)  # epoch: 1 step: 1, loss is 2.3025851

    per_print_times   a line for every so many steps of an epoch
    steps             the number of steps of an epoch. Epochs then follow from the numbers of the steps, and a line at
                      the end of each says how long it took
    samples           the number of samples of a step, on all ranks together: for samples a second
    rates             True: every line also shows the time of a step and, with `steps`, the progress of the epoch

    **The loss is the global one**, the same in the log of every rank. A sharded model returns it. Under a launcher the
    ranks compare the losses that they were given. If they differ, each rank has the loss of a part of the batch: the
    mean is printed, which is the global loss for equal parts, and the line says that it is a mean.

    **NaN and Inf** raise a LossError on every rank, with the epoch, the step and the rank. Every step is checked: by
    default at once, else with the next line, so that a step without a line waits for no device and for no rank.
    `finish()` checks the steps after the last line.

    Under a launcher every rank calls it, at every step. A line costs a meeting of the ranks, some milliseconds.

    Raises RuntimeStateError for wrong arguments, and if ranks are at different steps.
    """

    def __init__(
        self, per_print_times: int = 1, *, steps: int | None = None, samples: int | None = None, rates: bool = False
    ) -> None:
        _check("per_print_times", per_print_times, "steps from one line to the next")
        for name, value, what in (("steps", steps, "steps of an epoch"), ("samples", samples, "samples of a step")):
            if value is not None:
                _check(name, value, what)
        self._every, self._steps, self._samples, self._rates = per_print_times, steps, samples, rates
        self._epoch, self._step = 0, -1
        self._waiting: list[_Step] = []  # not checked yet
        self._line, self._whole = _Pace(), _Pace()  # since the last line, and in this epoch

    def __call__(self, loss: Tensor | float, *, epoch: int | None = None, step: int | None = None) -> None:
        """Take the loss of the completed step, a tensor of one element or a float.

        epoch, step   the position of the step, counted from 0, as in `enumerate` and Resume. Left out, they continue by
                      themselves: a step after the last, or the first of another epoch. With `steps` and without an
                      epoch, `step` may count through all epochs, as that of Resume does.
        """
        self._advance(epoch, step)
        self._waiting.append(_Step(self._epoch, self._step, _scalar(loss)))
        first = self._line.since is None
        for pace in (self._line, self._whole):
            pace.steps += not first
        ends = self._step + 1 == self._steps
        prints = (self._step + 1) % self._every == 0
        line = self._look() if prints or ends else ""
        now = time.perf_counter()
        if prints:
            _say(f"{line}{self._rate(now)}")
        if ends and self._whole.steps:
            took = f"{counted(self._whole.steps, 'step')} in {lasting(self._whole.seconds(now))}"
            _say(f"epoch: {self._epoch + 1}, {took}, {self._speed(self._whole, now)}")
        if prints or first:
            self._line = _Pace(now)
        if ends or first:
            self._whole = _Pace(now)

    def finish(self) -> None:
        """Check the steps since the last line, after the training. Every rank calls it."""
        if self._waiting:
            self._look()

    # -- the position of the training

    def _advance(self, epoch: int | None, step: int | None) -> None:
        for name, value in (("epoch", epoch), ("step", step)):
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                raise RuntimeStateError(f"{name} is {shown(value)}; it is counted from 0, as range and enumerate count")
        if step is None:
            step = 0 if epoch not in (None, self._epoch) else self._step + 1
            if epoch is None and step == self._steps:
                epoch, step = self._epoch + 1, 0
        elif epoch is None and self._steps is not None:
            epoch, step = divmod(step, self._steps)
        if self._steps is not None and step >= self._steps:
            raise RuntimeStateError(
                f"step is {step}, and an epoch has {self._steps} steps, counted from 0; give the LossMonitor the steps "
                "of an epoch, or leave out epoch where step counts through all of them"
            )
        self._epoch, self._step = self._epoch if epoch is None else epoch, step

    # -- the losses

    def _look(self) -> str:
        """Compare the waiting losses with those of the other ranks. Returns the line of the last of them."""
        steps, self._waiting = self._waiting, []
        losses = [float(each.loss) for each in steps]  # here this process waits for its device
        last = steps[-1]
        if get_group_size() > 1:
            which = f"loss of {last}" if len(steps) == 1 else f"losses of {len(steps)} steps up to {last}"
            every = gathered(f"look at the {which}", losses)
        else:
            every = [losses]
        for each, values in zip(steps, zip(*every, strict=True), strict=True):
            _check_finite(each, values)
        return _line(last, [values[-1] for values in every])

    # -- the speed

    def _rate(self, now: float) -> str:
        """The rates in a line."""
        if not self._rates or not self._line.steps:
            return ""
        said = f", {self._speed(self._line, now)}"
        if self._steps is not None:
            left = (self._steps - self._step - 1) * self._line.seconds(now) / self._line.steps
            said += f", {100 * (self._step + 1) // self._steps} % of the epoch, {lasting(left)} left"
        return said

    def _speed(self, pace: _Pace, now: float) -> str:
        seconds = pace.seconds(now) / pace.steps
        return f"{lasting(seconds)} a step" + (
            f", {self._samples / seconds:.3g} samples a second" if self._samples else ""
        )


@dataclass(slots=True)
class _Pace:
    """The number of steps since a time. It starts when the first step ends, since that one also plans."""

    since: float | None = None
    steps: int = 0

    def seconds(self, now: float) -> float:
        """The seconds that they took."""
        assert self.since is not None
        return max(now - self.since, 1e-9)


def _check(name: str, value: object, what: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise RuntimeStateError(f"{name} is {shown(value)}; it is a number of {what}, an int of 1 or more")


def _scalar(loss: object) -> Tensor:
    """A loss as a tensor that nothing else writes to."""
    if isinstance(loss, float):
        return torch.tensor(loss, dtype=torch.float64)
    if not isinstance(loss, Tensor):
        fix = "give the loss alone, as in loss, logits = model(...)" if isinstance(loss, tuple | list) else "give that"
        raise RuntimeStateError(f"the loss is a {type(loss).__name__}, not a tensor of one element or a float; {fix}")
    if loss.numel() != 1 or not loss.is_floating_point():
        dtype = str(loss.dtype).removeprefix("torch.")
        raise RuntimeStateError(
            f"the loss is {dtype}{list(loss.shape)}, not one real number; give its mean over the batch: loss.mean()"
        )
    held: Tensor = whole(loss.detach()).clone()
    return held


def _check_finite(each: _Step, values: Sequence[float]) -> None:
    """Raise LossError unless the losses of the ranks are finite."""
    bad = [rank for rank, value in enumerate(values) if not math.isfinite(value)]
    if not bad:
        return
    where = "" if len(values) == 1 else f" on {named(bad)}" if len(bad) < len(values) else " on every rank"
    batch = f"the batch of {named(bad)}" if len(bad) < len(values) else "the batch"
    raise LossError(
        f"the loss of {each} is {values[bad[0]]}{where}; look for values in {batch} that are NaN or Inf and for labels "
        "that are not classes, and take a lower learning rate or clip gradients if it has grown before"
    )


def _line(last: _Step, values: Sequence[float]) -> str:
    """MindSpore's line for the loss of a step on every rank."""
    kind = _SHORTEST.get(last.loss.dtype, np.float32)

    def text(value: float) -> str:
        return str(kind(value))

    least, most = min(values), max(values)
    alike = least == most
    line = (
        f"epoch: {last.epoch + 1} step: {last.step + 1}, loss is {text(least if alike else sum(values) / len(values))}"
    )
    return line if alike else f"{line} (the mean of {len(values)} ranks' own, from {text(least)} to {text(most)})"


def _say(line: str) -> None:
    """Print a line at once, for a log that is read while it is written."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()

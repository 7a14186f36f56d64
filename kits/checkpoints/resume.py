"""`Resume`: a training loop that continues from its last checkpoint, however it was ended and is started again."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from partway.checkpoints import folder as folders
from partway.checkpoints.contents import RANDOM, random_states, set_random_state
from partway.checkpoints.loading import load
from partway.checkpoints.ranks import Ranks
from partway.checkpoints.saving import save, wait
from partway.runtime import default_store, launched, timeout_of
from partway.runtime.launching import AGAIN, leave
from partway.runtime.ranks import AnsweringStore
from partway.strategy import RuntimeStateError, shown

_STOP = "partway/stop"
_BEGAN, _NOW = f"{RANDOM}began.", f"{RANDOM}now."
_GENERATORS = ("generator", "sampler.generator", "batch_sampler.generator", "batch_sampler.sampler.generator")


class Resume:
    """A training loop that saves as it goes, and continues from the last good checkpoint when it is started again: by
    torchrun's restarts, by a scheduler, by hand, on the same number of processes or another.

    training = pw.Resume("checkpoints", model, optimizer, every=100)
    for step in training.steps(10_000):
        ...  # one step

    or, over a data loader:

    training = pw.Resume("checkpoints", model, optimizer, loader=loader, every=100)
    for epoch, batch in training.batches(epochs=3):
        ...

    path, model, optimizer   as `save` takes them
    loader   a data loader. With one that has a state_dict (torchdata's StatefulDataLoader) training continues within an
             epoch, with the next batch, and later epochs are shuffled as without the interruption; a plain one is
             refused, since it would start over
    every    steps from one checkpoint to the next; the last step is saved, too
    keep     how many checkpoints to keep
    asynchronous   True: they are written while the training goes on
    state    further objects to restore: anything with state_dict() and load_state_dict(), such as a scheduler or a
             GradScaler

    `step` and `epoch` are the position of the training; `resumed` says whether it has found a checkpoint. Random
    generators are restored, so that an interrupted run has the losses of an uninterrupted one.

    On SIGTERM, which launchers and clusters send before they end a job, all ranks finish the same step, save, and exit
    with status 143. Under a launcher every rank makes one, and takes the same steps.

    Raises RuntimeStateError for wrong arguments, and the errors of `load` for a checkpoint of another model.
    """

    def __init__(
        self, path: str | os.PathLike[str], model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer] | None = None, *, loader: Any = None, every: int = 100,
        keep: int | None = 2, asynchronous: bool = False, **state: Any,
    ) -> None:  # fmt: skip
        folders.check_path(path)
        if not isinstance(every, int) or isinstance(every, bool) or every < 1:
            raise RuntimeStateError(f"every is {shown(every)}; it is a number of steps, an int of 1 or more")
        if taken := sorted({"step", "epoch"} & state.keys()):
            raise RuntimeStateError(f"Resume keeps {' and '.join(taken)} itself; give your own values other names")
        self._state = state if loader is None else {"loader": loader, **state}
        for name, value in self._state.items():
            if not (hasattr(value, "state_dict") and hasattr(value, "load_state_dict")):
                fix = "use torchdata's StatefulDataLoader" if name == "loader" else "give what has a state of its own"
                raise RuntimeStateError(f"{name} has no state_dict() and load_state_dict() to go on with; {fix}")
        self.path, self.every, self.keep, self.asynchronous = Path(path), every, keep, asynchronous
        self.step = self.epoch = 0
        self._model, self._optimizer = model, optimizer
        self._loader: Any = loader
        _check_generators(loader)
        self.resumed = Ranks().first(f"look for a checkpoint in {path}", self._is_there)
        self._saved, self._within = -1, self.resumed
        self._began: dict[str, Any] = {}  # the random states at the start of the epoch
        if self.resumed:
            found = load(self.path, model, optimizer, **self._state)
            self.step = self._saved = found["step"]
            self.epoch = found["epoch"]
            self._began = _named(found, _BEGAN)
            self._set_random(_named(found, _NOW))
        self._told = False  # to end
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._terminate)

    def _is_there(self) -> bool:
        return self.path.is_dir() and bool(folders.checkpoints(self.path))

    def steps(self, total: int) -> Iterator[int]:
        """The numbers of the remaining steps of `total`."""
        while self.step < total:
            yield self.step
            self._done(last=self.step + 1 == total)
        wait()

    def batches(self, epochs: int) -> Iterator[tuple[int, Any]]:
        """The remaining epochs of `epochs`, each with the next batch of the loader."""
        if self._loader is None:
            raise RuntimeStateError("there is no loader to take batches from; give Resume one")
        while self.epoch < epochs:
            sampler: Any = getattr(self._loader, "sampler", None)
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(self.epoch)
            for batch in self._stream():
                yield self.epoch, batch
                self._done()
            self.epoch += 1
        if self._saved != self.step:
            self.save()
        wait()

    def _stream(self) -> Iterator[Any]:
        """The remaining batches of this epoch. A loader and its sampler draw random numbers when they start. To
        continue within an epoch they start with the numbers of the first time; then all generators get the states of
        the checkpoint."""
        now = self._random()
        if self._within:
            self._set_random(self._began)
        else:
            self._began = now
        stream: Iterator[Any] = iter(self._loader)
        if self._within:
            self._set_random(now)
        self._within = False
        return stream

    def _random(self) -> dict[str, Any]:
        """The states of all random generators."""
        return random_states() | {name: one.get_state() for name, one in _generators(self._loader).items()}

    def _set_random(self, states: Mapping[str, Any]) -> None:
        own = _generators(self._loader)
        for name, state in states.items():
            if name in own:
                own[name].set_state(state)
            else:
                set_random_state(name, state)

    def save(self) -> None:
        """Save a checkpoint now; every rank calls it."""
        here: dict[str, Any] = {"step": self.step, "epoch": self.epoch, **self._state}
        here |= {f"{_BEGAN}{name}": state for name, state in self._began.items()}
        here |= {f"{_NOW}{name}": one.get_state() for name, one in _generators(self._loader).items()}
        save(self.path, self._model, self._optimizer, keep=self.keep, asynchronous=self.asynchronous, **here)  # type: ignore[call-overload]
        self._saved = self.step

    def _done(self, last: bool = False) -> None:
        """Count a step, and save or end if it is time."""
        self.step += 1
        ends = self._ends()
        if ends or last or self.step % self.every == 0:
            self.save()
        if ends:
            wait()
            leave("SIGTERM" if self._told else None)
            raise SystemExit(AGAIN)

    # -- the requested end

    def _terminate(self, number: int, frame: Any) -> None:
        self._told = True
        if launched():
            # ranks are within a step of each other, so none has done this one yet
            _store(dist.group.WORLD).compare_set(_STOP, "", str(self.step + 2))

    def _ends(self) -> bool:
        """Whether to end after the current step: all ranks end after the same one."""
        if not launched():
            return self._told
        store = _store(dist.group.WORLD)
        return bool(store.check([_STOP])) and self.step >= int(store.get(_STOP))


def _generators(loader: Any) -> dict[str, torch.Generator]:
    """The random generators of a loader and its samplers, by their attributes."""

    def at(path: str) -> Any:
        return functools.reduce(lambda value, name: getattr(value, name, None), path.split("."), loader)

    return {path: found for path in _GENERATORS if isinstance(found := at(path), torch.Generator)}


def _check_generators(loader: Any) -> None:
    """Raise RuntimeStateError if a loader and its sampler share a generator from which the sampler draws more than once
    an epoch. Torchdata restores the sampler's generator as of the start of the epoch, without the draws of the loader
    between."""
    sampler: Any = getattr(loader, "sampler", None)
    generator = getattr(sampler, "generator", None)
    if generator is None or generator is not loader.generator or not type(sampler).__module__.startswith("torchdata."):
        return
    if sampler.replacement or sampler.num_samples > len(sampler.data_source):
        raise RuntimeStateError(
            "the loader and its sampler draw from one generator, the sampler more than once an epoch: it cannot go on "
            "within an epoch; give the sampler its own generator"
        )


def _named(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


@functools.lru_cache(maxsize=1)
def _store(world: Any) -> AnsweringStore:
    """The store by which the ranks of the process group have met."""
    return AnsweringStore(default_store(), timeout_of(world).total_seconds())

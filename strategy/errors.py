"""Every exception that Partway raises on purpose.

    PartwayError
    ├── StrategyError (ValueError)      a strategy, layout, mesh or annotation that cannot be satisfied
    ├── ContextError (ValueError)       an unknown or wrong option of the parallel context
    ├── CaptureError (RuntimeError)     a function that cannot be captured as one static graph
    ├── OperatorError (ValueError)      an operator without a rule where that is not allowed, or a collective with
    │                                   operands that it does not take
    ├── VerifyError (AssertionError)    a broken invariant: a bug in Partway, not in the caller's code
    ├── DataError (ValueError)          an image, a window, a part or a list of shards that cannot be read or cut
    ├── LossError (ValueError)          the loss of a step is NaN or Inf
    └── RuntimeStateError (RuntimeError) processes, devices or parameters are not as the plan needs them

Warnings are UserWarnings: `UnknownOperatorWarning` names an operator that has no rule and is replicated,
`WholeReadWarning` an image whose format does not allow reading only a part of it, `ExpertLoadWarning` devices that got
more rows than was planned, and `UntestedTorchWarning` a version of PyTorch with which Partway is not tested.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .basics.units import human


class PartwayError(Exception):
    """Base of all exceptions of this package."""


class StrategyError(PartwayError, ValueError):
    """A strategy, layout, mesh or annotation cannot be satisfied; `problems` lists every reason."""

    def __init__(self, message: str, problems: Iterable[Problem] = ()) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([message, *(f"  - {problem}" for problem in self.problems)]))


class DoesNotFitError(StrategyError):
    """No plan was found within the memory limit.

    where      the mesh, and the plans that were searched
    least      the bytes that the smallest plan found holds
    limit      the memory limit, in bytes
    heaviest   what takes the most memory, and how much
    advice     alternatives, as sentences
    """

    def __init__(self, where: str, least: float, limit: float, heaviest: str, advice: str = "") -> None:
        self.where, self.least, self.limit, self.heaviest, self.advice = where, least, limit, heaviest, advice
        super().__init__(
            f"no plan was found {where} that holds less than {human(least, 4)} on a device (parameters, gradients, "
            f"optimizer states, activations and what operators work with), and memory_limit is {human(limit, 4)}; "
            f"a limit of {human(self.enough, 4)} would do. The heaviest: {heaviest}" + (f". {advice}" if advice else "")
        )

    @property
    def enough(self) -> float:
        """A sufficient limit, in bytes: a little more than `least`, so that it still suffices with four digits."""
        return self.least * 1.001

    def changed(self, least: float, limit: float, advice: str = "") -> DoesNotFitError:
        """This error with other figures, and with advice."""
        return DoesNotFitError(self.where, least, limit, self.heaviest, advice)

    def __reduce__(self) -> tuple[type[DoesNotFitError], tuple[str, float, float, str, str]]:
        return type(self), (self.where, self.least, self.limit, self.heaviest, self.advice)


class ContextError(PartwayError, ValueError):
    """An option of the parallel context is unknown, of a wrong type, or has a wrong value."""


class CaptureError(PartwayError, RuntimeError):
    """The function or module could not be captured as one static graph."""


class OperatorError(PartwayError, ValueError):
    """An operator has no rule and `on_unknown_op="error"` forbids running it replicated, or a collective of
    `partway.ops` does not take its operands."""


class VerifyError(PartwayError, AssertionError):
    """A graph, plan or program breaks its own invariants: a bug in Partway."""


class DataError(PartwayError, ValueError):
    """An image, a window of it, a rank's part or a list of shards cannot be read or cut as asked."""


class LossError(PartwayError, ValueError):
    """The loss of a step, on this rank or on another, is NaN or Inf."""


class RuntimeStateError(PartwayError, RuntimeError):
    """The processes, the devices or the parameters are not as the plan needs them."""


class UnknownOperatorWarning(UserWarning):
    """An operator has no rule: its operands are gathered and it runs replicated."""


class WholeReadWarning(UserWarning):
    """An image is stored so that reading a part of it reads much more than that part."""


class ExpertLoadWarning(UserWarning):
    """A device got more rows for its experts than `expert_load` allows for."""


class UntestedTorchWarning(UserWarning):
    """The installed version of PyTorch is older or newer than those that Partway is tested with."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason why an annotation cannot be satisfied: where it is, what is wrong, what to write instead."""

    where: str
    what: str
    fix: str

    def __str__(self) -> str:
        return f"{self.where}: {self.what}; {self.fix}"


def raise_problems(title: str, problems: Iterable[Problem]) -> None:
    """Raise one StrategyError that lists all `problems`, or return if there are none."""
    every = tuple(problems)
    if every:
        raise StrategyError(title, every)


def shown(value: object, most: int = 200) -> str:
    """The repr of a value that a person wrote, for a message; the middle of a long one is left out."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an int with more digits than Python writes, or deeply nested lists
        text = f"a {type(value).__name__} that is too large to be shown"
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 4 :]}"

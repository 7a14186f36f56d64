"""`rule`: how an operator of the user splits. Like operators, rules are one table for the whole process.

A rule is settled when it is given: its operators are found and it is checked against them. Only a rule whose operator
is defined later is looked up by name whenever rules are read, without changing anything.
"""

from __future__ import annotations

import inspect
import marshal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace as renewed
from types import FunctionType
from typing import Any, TypeVar

import torch

from partway.propagation.rules.custom import Rows, schema_problems, text_problems
from partway.propagation.rules.row import Row
from partway.propagation.rules.rule import Localize
from partway.propagation.rules.table import EXPANSIONS, has_row
from partway.propagation.torch_internals import (
    CustomOpDef,
    OpOverload,
    OpOverloadPacket,
    all_operator_names,
    defined_by,
    schema_of,
)
from partway.strategy import Problem, StrategyError, raise_problems
from partway.strategy.basics.suggest import did_you_mean
from partway.strategy.errors import shown

T = TypeVar("T", bound=Callable[..., Any])


def rule(
    operator: Any,
    text: str,
    *,
    reduce: str = "",
    whole: str = "",
    linear: Sequence[Any] = (),
    contraction: bool = False,
    local: Localize | None = None,
    replace: bool = False,
) -> OperatorRule:
    """Define how an operator splits, by the dims that its operands and results share.

        @pw.rule("my::bmm", "b m k, b k n -> b m n", reduce="k", linear=(0, 1))
        @torch.library.custom_op("my::bmm", mutates_args=())
        def bmm(x: Tensor, w: Tensor) -> Tensor: ...

    operator     "my::op" (every overload that the text fits), "my::op.overload", a torch.library.custom_op or an
                 operator of torch.ops; an operator given by name may be defined later, before the first plan
    text         a spec for each tensor argument, and for each result: a letter or name for each dim. Dims of one name
                 are split together. `1`: a dim that cannot be split; `...`: any leading dims, which may broadcast;
                 `(b s)`: a dim merged from two, major first; `+n`: an operand that enters a sum once, as a bias does.
                 A list of tensors has one spec, that of each of its tensors; an optional argument has one too
    reduce       names of dims that are summed over: a rank with a part of them computes a partial sum.
                 A dim that is missing in the results and not named here stays whole
    whole        names of dims that cannot be split
    linear       the operands in which the operator is linear, so that partial sums may pass through it: `(0, 1)` for a
                 product; ("0 1",) for one that is linear in both together, as a sum is
    contraction  whether it multiplies and adds over all its dims; its cost is computed accordingly
    local        emits the call of a rank if it differs from the global call, as for an argument that holds a size: a
                 function of an Emitter (`emit.call`, `emit.shapes`, `emit.split`, `emit.position`) and of the args
                 and kwargs of the call on local parts
    replace      whether this rule replaces the operator's existing one

    Used as a decorator, above a torch.library.custom_op or above the function that is `local`, it returns the decorated
    object. In a `with` statement the rule holds only in its block; `.remove()` removes it.

    On a rank's parts, the operator must compute its part of the whole result, and its derivative (register_autograd)
    its part of the whole gradient. Shards are full: a size that an axis does not divide stays whole.

    Raises StrategyError with all problems; a name that no operator has is refused by the next plan.
    """
    problems = [*_type_problems(text, reduce, whole, linear)]
    raise_problems("the arguments of rule are wrong:", problems)
    row = Row(text, reduce, whole, tuple(map(str, linear)), contraction, local)
    name = operator if isinstance(operator, str) else str(schema_of(_overloads(operator)[0]).name)
    raise_problems(f"the rule of {name} is wrong:", (Problem(repr(text), what, _SEE) for what in text_problems(row)))
    new = OperatorRule(operator, row, replace)
    new._settle()
    _every.append(new)
    _changed()
    return new


_SEE = "see the docstring of partway.rule"


def _type_problems(text: object, reduce: object, whole: object, linear: object) -> Iterable[Problem]:
    for name, value in (("text", text), ("reduce", reduce), ("whole", whole)):
        if not isinstance(value, str):
            yield Problem(
                name, f"is {shown(value)} ({type(value).__name__})", "write a str of names, separated by blanks"
            )
    entries = linear if isinstance(linear, Sequence) and not isinstance(linear, str) else [None]
    if not all(isinstance(entry, int | str) and not isinstance(entry, bool) for entry in entries):
        fix = 'write a tuple of operands, such as (0, 1), or ("0 1",) for operands in which it is linear together'
        yield Problem("linear", f"is {shown(linear)}", fix)


class OperatorRule:
    """A rule of an operator: a decorator, and a context manager that removes it at the end of the block."""

    def __init__(self, operator: Any, row: Row, replace: bool) -> None:
        self.operator, self.row, self._replace = operator, row, replace
        self._operators: tuple[OpOverload, ...] = ()

    def __call__(self, fn: T) -> T:
        """Decorate the operator, or the function that emits its local form."""
        given: Any = fn
        if isinstance(given, CustomOpDef | OpOverload | OpOverloadPacket):
            self._settle()
            if _overloads(given)[0] not in self._operators:
                self.remove()
                raise StrategyError(f"the rule of {self.operator} decorates the operator {_overloads(given)[0]}")
        elif inspect.isfunction(given):
            self.row = renewed(self.row, local=given)
            _changed()
        else:
            self.remove()
            raise StrategyError(f"rule decorates an operator or a function that writes its local form, not {shown(fn)}")
        return fn

    def __enter__(self) -> OperatorRule:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def remove(self) -> None:
        """Remove the rule; the one that it replaced, if any, holds again."""
        if self in _every:
            _every.remove(self)
            _changed()

    def operators(self) -> tuple[OpOverload, ...]:
        """The operators of the rule; none while no operator has its name. Raises StrategyError for a rule that fits
        none of them, or that conflicts with another rule without `replace`."""
        if self._operators:
            return self._operators
        fits, problems = self._fits()
        earlier = [one for one in fits if self._meets_another(one)] if not self._replace else []
        if earlier:
            problems = [Problem(str(one), "has a rule already", "pass replace=True") for one in earlier]
        if problems and (earlier or not fits):
            raise_problems(f"{self.row.text!r} cannot be the rule of {self.operator}:", problems)
        return fits

    def _settle(self) -> None:
        """Keep the operators found so far. Raises StrategyError as `operators` does, and then removes the rule."""
        try:
            operators = self.operators()
        except StrategyError:
            self.remove()
            raise
        if operators != self._operators:
            self._operators = operators
            _changed()

    def _fits(self) -> tuple[tuple[OpOverload, ...], list[Problem]]:
        """The operators whose schema it fits, and why it does not fit the others."""
        problems = {one: [*schema_problems(self.row, one)] for one in _overloads(self.operator)}
        return (
            tuple(one for one, wrong in problems.items() if not wrong),
            [Problem(str(one), what, f"it is {schema_of(one)}") for one, wrong in problems.items() for what in wrong],
        )

    def _meets_another(self, operator: OpOverload) -> bool:
        others = [other for other in _every if other is not self]
        rows = [other.row for other in others if operator in (other._operators or other._fits()[0])]
        return any(row != self.row for row in rows) if rows else has_row(operator) or operator in EXPANSIONS

    def __repr__(self) -> str:
        return f"<rule {self.row.text!r} of {', '.join(map(str, self._operators)) or self.operator}>"


def _overloads(operator: Any) -> list[OpOverload]:
    """The operators that `operator` refers to; none for a name that is not defined yet. Raises StrategyError for any
    other value."""
    if isinstance(operator, OpOverload):
        return [operator]
    if isinstance(operator, OpOverloadPacket):
        return [getattr(operator, name) for name in operator.overloads()]
    if isinstance(operator, CustomOpDef):
        return [defined_by(operator)]
    if not isinstance(operator, str) or operator.count("::") != 1:
        raise StrategyError(
            f"rule is given {shown(operator)} for its operator; write its name, as in 'my::op' or 'my::op.overload', "
            "or give the operator itself"
        )
    namespace, _, name = operator.partition("::")
    base, _, overload = name.partition(".")
    try:
        packet = getattr(getattr(torch.ops, namespace), base)
        return [getattr(packet, overload)] if overload else _overloads(packet)
    except AttributeError:
        return []


# -- The rules of this process

_every: list[OperatorRule] = []
_changes: list[None] = []


def _changed() -> None:
    _changes.append(None)


def version() -> int:
    """A number that changes whenever the result of `rules` does."""
    return len(_changes)


def rules() -> Rows:
    """The rows of all operators with a user's rule; the latest rule holds. Raises StrategyError for a rule whose
    operator does not exist, or does not fit it.

    It changes no state: the operator of an unsettled rule is looked up by name each time."""
    operators = {each: each.operators() for each in _every}
    names = [each.operator for each, overloads in operators.items() if not overloads]
    problems = [Problem(f"rule of {name!r}", "there is no such operator", _suggestion(name)) for name in names]
    raise_problems("rules were given to operators that do not exist:", problems)
    return {operator: each.row for each, overloads in operators.items() for operator in overloads}


def _suggestion(name: str) -> str:
    return did_you_mean(name, all_operator_names(), "define it, or remove() the rule")


def text_of(rows: Mapping[Any, Row]) -> str:
    """The text of everything in `rows` that a plan depends on, with the code of local forms."""
    return "\n".join(sorted(f"{operator} {row!r} {_code(row.local)}" for operator, row in rows.items()))


def _code(local: Any) -> object:
    if not isinstance(local, FunctionType):
        return local
    cells = [cell.cell_contents for cell in local.__closure__ or ()]
    return marshal.dumps(local.__code__), local.__defaults__, local.__kwdefaults__, cells

"""The cases that prove the rows of the rule table (`test_table.py`): a module for each family, with its name.

A case is a call of one operator, with the factors that one axis may split in it. `real(4, 2)` and its like stand for
operands of that size; `index(high, ...)` for one of whole numbers below `high`.
"""

from dataclasses import dataclass, field, replace
from importlib import import_module
from pkgutil import iter_modules

import torch


def real(*shape):
    return ("real", shape)


def positive(*shape):
    return ("positive", shape)


def unit(*shape):
    return ("unit", shape)


def fixed(*shape):
    return ("fixed", shape)


def definite(*shape):
    return ("definite", (*shape, shape[-1]))


def constant(*shape):
    return ("constant", (*shape, shape[-1]))


def fixed_unit(*shape):
    return ("fixed unit", shape)


def index(high, *shape):
    return ("index", shape, high)


def mask(*shape):
    return ("mask", shape)


def make(spec, generator):
    kind, shape = spec[:2]
    if kind == "index":
        return torch.randint(0, spec[2], shape, generator=generator)
    if kind == "mask":
        return torch.rand(shape, generator=generator) > 0.4
    x = torch.rand(shape, generator=generator, dtype=torch.float64)
    if kind in ("definite", "constant"):
        return (x @ x.mT + torch.eye(shape[-1])).requires_grad_(kind == "definite")
    x = {"real": 2 * x - 1, "positive": x + 0.5, "unit": 0.1 + 0.8 * x, "fixed": x + 0.5, "fixed unit": x}[kind]
    return x.requires_grad_("fixed" not in kind)


@dataclass(frozen=True)
class Case:
    """A call of `target` that `fn` makes, and the factors that one axis may split in it."""

    target: object
    splits: str
    fn: object
    args: tuple
    linear: int = field(default=0)  # how many options let Partial pass
    like_others: bool = field(default=False)  # by a rule that other cases try too, so that this one is slow


def case(target, splits, fn, *args, linear=0):
    return Case(target, splits, fn, args, linear)


def like_others(*cases):
    return [replace(one, like_others=True) for one in cases]


def tensors_of(one, seed=0):
    """The operands of a case."""
    generator = torch.Generator().manual_seed(seed)
    return tuple(make(spec, generator) for spec in one.args)


def cases_by_family():
    """The cases of each module of this package."""
    return {module.name: import_module(f"{__name__}.{module.name}").CASES for module in iter_modules(__path__)}

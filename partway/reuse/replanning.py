"""Why a call was planned again: the sizes, flags or modes that differ from the calls that have a plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from partway.runtime.launching.process import get_rank

_log = logging.getLogger("partway")
_planning = logging.getLogger("partway.planning")
FIRST = 3  # the first number of plans that is logged; the next is twice the last and one
SAID = 4  # the most differences in a message


class Signature(NamedTuple):
    """Everything that a plan depends on, beside the state that the function reads.

    structure    the containers and plain values of the arguments
    tensors      of each tensor: shape, dtype, device, whether it requires a gradient, its placement, its attributes
    answers      the memory order of tensors, and whether gradients are enabled, if code asks for that
    training     of each module: whether it is in training
    parameters   of each parameter: type, whether it requires a gradient, dtype, shape
    inference    whether the plan has no backward
    modes        the settings of torch itself
    options      those of Partway, and the rules that users wrote
    """

    structure: tuple[Any, ...]
    tensors: tuple[tuple[Any, ...], ...]
    answers: tuple[Any, Any]
    training: tuple[bool, ...]
    parameters: tuple[Any, ...]
    inference: bool
    modes: tuple[Any, ...]
    options: tuple[Any, ...]


_ANSWERS = ("the memory order of a tensor", "no_grad or inference_mode, for which the code asks,")
_TENSOR = ("", "the dtype", "the device", "requires_grad", "the layout", "the attributes")
_OTHERS = {
    "structure": "a plain argument, or which arguments are given",
    "training": "the training mode of a module",
    "parameters": "requires_grad, the dtype or the shape of a parameter",
    "inference": "whether a gradient is taken",
    "modes": "a mode of torch, as autocast or the default dtype",
    "options": "an option or a rule of Partway",
}


def note_replanning(
    name: str,
    names: Sequence[str],
    now: Signature,
    known: Sequence[Signature],
    count: int,
    served: bool,
    refused: str,
) -> None:
    """Log that the function `name`, with tensors called `names`, was planned again, after `count` times, and why: the
    differences from the most similar of the `known` calls. `served`: whether the new plan is for all sizes of the
    dims that change; `refused`: why it is not."""
    if now in known:  # the state of the function has changed, of which PlannedCalls warns
        return
    warns = count >= FIRST and not (count + 1) & count and not get_rank()  # 3, 7, 15, ...
    if not known or not (warns or _planning.isEnabledFor(logging.INFO)):
        return
    alike = [before for before in known if len(before.tensors) == len(now.tensors)] or known
    found = min((list(_differences(names, now, before)) for before in reversed(alike)), key=len)
    _planning.info("%s is planned for call %d: %s", name, count + 1, "; ".join(_first(found)))
    if not warns:
        return
    sizes = all(one.startswith("dim ") for one in found)
    if sizes and served:
        return
    fix = "pad to a few sizes, or leave out the last batch" if sizes else "keep it as it was"
    why = f" (one plan cannot serve all sizes: {refused})" if sizes and refused else ""
    _log.warning(
        "%s is planned for the %dth time: %s%s. Every new call is captured and planned, which takes seconds; %s",
        name,
        count + 1,
        "; ".join(_first(found)),
        why,
        fix,
    )


def _first(found: Sequence[str]) -> Sequence[str]:
    """The first differences as text; the tensors of a cache, for example, all change in the same way."""
    return found if len(found) <= SAID else [*found[:SAID], f"{len(found) - SAID} differences more"]


def _differences(names: Sequence[str], now: Signature, before: Signature) -> Iterator[str]:
    """The differences of two signatures, as text."""
    alike = len(now.tensors) == len(before.tensors)
    if alike:
        for name, one, other in zip(names, now.tensors, before.tensors, strict=True):
            yield from _of_tensor(name, one, other)
    for field, words in _OTHERS.items():
        if getattr(now, field) != getattr(before, field) and (alike or field != "structure"):
            yield f"{words} has changed"
    for words, one, other in zip(_ANSWERS, now.answers, before.answers, strict=True):
        if one != other and alike:
            yield f"{words} has changed"
    if not alike:
        yield f"{len(now.tensors)} tensors are given in place of {len(before.tensors)}"


def _of_tensor(name: str, now: tuple[Any, ...], before: tuple[Any, ...]) -> Iterator[str]:
    if len(now[0]) != len(before[0]):
        yield f"{name!r} has {len(now[0])} dims, and had {len(before[0])}"
    else:
        for dim, (size, was) in enumerate(zip(now[0], before[0], strict=True)):
            if size != was:
                yield f"dim {dim} of {name!r} is {size}, and was {was}"
    for words, one, other in zip(_TENSOR[1:], now[1:], before[1:], strict=True):
        if one != other:
            yield f"{words} of {name!r} has changed"

"""Parse the text of a command line into arguments of `compile`.

    mesh       dp=2,tp=4             {"dp": 2, "tp": 4}
    strategy   dp,None               ("dp", None)           one entry per dim
               (dp,tp),None          (("dp", "tp"), None)   several axes of one dim
               2,1                   (2, 1)                 split counts
               ()  auto              ()  None               of a tensor without dims; the search decides
    input      float32[16,64]        a tensor on the meta device
               mask=bool[16]         the same, as the argument `mask`
    bytes      40GB  4e10  inf       40e9  4e10  inf

This module checks only the syntax. Strategies are checked later: whether the mesh has their axes and the tensor as many
dims.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from partway.strategy.basics.suggest import did_you_mean, either
from partway.strategy.errors import StrategyError, shown
from partway.strategy.notation import Name

T = TypeVar("T")
Entry = Name | int
Strategy = tuple[Entry, ...] | None

AUTO = "auto"
_UNITS = {"": 1.0, "B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_TOKEN = re.compile(r"\s*(\w+|[(),])")
_INPUT = re.compile(r"(?:(?P<name>[A-Za-z_]\w*)=)?(?P<dtype>[A-Za-z_]\w*)\[(?P<sizes>[\d,\s]*)\]")


def mesh_of(text: str) -> dict[str, int]:
    """The axes and sizes of `dp=2,tp=4`. Raises StrategyError."""
    axes: dict[str, int] = {}
    for number, part in enumerate(text.split(","), 1):
        name, equals, size = (each.strip() for each in part.partition("="))
        if not (equals and name and size.isdecimal()):
            raise StrategyError(
                f"--mesh {shown(text)}: axis {number}, {shown(part.strip())}, is not NAME=SIZE; write the axes as in "
                "dp=2,tp=4"
            )
        if name in axes:
            raise StrategyError(f"--mesh {shown(text)}: the axis {shown(name)} is there twice; give each its own name")
        axes[name] = int(size)
    return axes


def strategy_of(option: str, text: str) -> Strategy:
    """The strategy that `dp,None` stands for. Raises StrategyError, naming the place of the first mistake."""
    if text.strip() == AUTO:
        return None
    if text.replace(" ", "") == "()":
        return ()
    tokens = list(_tokens(option, text))
    entries, rest = _listed(option, text, tokens, _entry)
    if rest:
        word, at = rest[0]
        raise _unread(option, text, at, f"{word!r} {'closes nothing' if word == ')' else 'is not after a comma'}")
    return tuple(entries)


Token = tuple[str, int]  # a word or a sign, and the place of its first character


def _tokens(option: str, text: str) -> Iterator[Token]:
    place = 0
    while found := _TOKEN.match(text, place):
        place = found.end()
        yield found[1], found.start(1)
    if left := text[place:].strip():
        raise _unread(option, text, text.index(left, place), f"{left[0]!r} is no part of a strategy")


def _listed(
    option: str, text: str, tokens: list[Token], one: Callable[[str, str, list[Token]], tuple[T, list[Token]]]
) -> tuple[list[T], list[Token]]:
    """The items between commas, and the remaining tokens."""
    made: list[T] = []
    while True:
        entry, tokens = one(option, text, tokens)
        made.append(entry)
        if not tokens or tokens[0][0] != ",":
            return made, tokens
        tokens = tokens[1:]


def _entry(option: str, text: str, tokens: list[Token]) -> tuple[Entry, list[Token]]:
    """The entry of one dim, and the remaining tokens."""
    if tokens and tokens[0][0] == "(":
        axes, rest = _listed(option, text, tokens[1:], _axis)
        if not rest or rest[0][0] != ")":
            raise _unread(option, text, rest[0][1] if rest else len(text), "a ')' is missing")
        return tuple(axes), rest[1:]
    word, at = _word(option, text, tokens)
    if word == "None":
        return None, tokens[1:]
    return int(word) if word.isdecimal() else _name(option, text, word, at), tokens[1:]


def _axis(option: str, text: str, tokens: list[Token]) -> tuple[str, list[Token]]:
    word, at = _word(option, text, tokens)
    if word == "None":
        raise _unread(option, text, at, "None stands in parentheses, which are for several axes of one dim")
    return _name(option, text, word, at), tokens[1:]


def _word(option: str, text: str, tokens: list[Token]) -> Token:
    if not tokens or tokens[0][0] in "(),":
        raise _unread(option, text, tokens[0][1] if tokens else len(text), "an entry is missing")
    return tokens[0]


def _name(option: str, text: str, word: str, at: int) -> str:
    if not word.isidentifier():
        raise _unread(option, text, at, f"{word!r} is neither the name of an axis nor a number of parts")
    return word


def _unread(option: str, text: str, at: int, why: str) -> StrategyError:
    return StrategyError(
        f"{option} {shown(text)}: {why} (character {at + 1}); write an entry per dim, an axis, several in parentheses "
        "or None, such as dp,None or (dp,tp),None; or auto"
    )


def input_of(text: str, dtypes: Iterable[str]) -> tuple[str, str, tuple[int, ...]]:
    """The name ("" if it has none), the dtype and the shape of `float32[16,64]`. Raises StrategyError."""
    found = _INPUT.fullmatch(text.strip())
    sizes = [size.strip() for size in found["sizes"].split(",")] if found and found["sizes"].strip() else []
    if found is None or not all(size.isdecimal() for size in sizes):
        raise StrategyError(
            f"--input {shown(text)} is not DTYPE[SIZES]; write it as in float32[16,64], int64[8,128] or mask=bool[16]"
        )
    known = list(dtypes)
    if found["dtype"] not in known:
        meant = did_you_mean(found["dtype"], known, "write one of PyTorch's, such as float32, bfloat16 or int64")
        raise StrategyError(f"--input {shown(text)}: there is no dtype {found['dtype']!r}; {meant}")
    return found["name"] or "", found["dtype"], tuple(int(size) for size in sizes)


def bytes_of(option: str, text: str) -> float:
    """The bytes of `40GB`, `4e10` or `inf`. Raises StrategyError."""
    found = re.fullmatch(r"\s*(inf|[\d.]+(?:e\+?\d+)?)\s*([A-Za-z]*)\s*", text, re.IGNORECASE)
    try:
        size = float(found[1]) * _UNITS[found[2].upper()] if found else math.nan
    except (ValueError, KeyError):
        size = math.nan
    if not size > 0:
        units = either([unit for unit in _UNITS if unit])
        raise StrategyError(f"{option} {shown(text)} is no number of bytes above 0; write 40e9, inf or 40GB ({units})")
    return size

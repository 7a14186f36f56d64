"""Compare the inputs and the outcome of planning on all ranks: where they differ, collectives do not match, and the
ranks at best wait forever.

Each fact is a text and, for data that no text holds, a checksum. The ranks meet (`watch.py`) and compare one checksum a
fact; they exchange texts only for facts that differ. Then every rank raises the same error, with all differences.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...strategy.errors import RuntimeStateError
from .ledger import checksum
from .watch import watch

_SAME = "run the same program on every rank"
_OWN = re.compile(r" at 0x[0-9a-f]+|(?<=cuda):\d+")  # parts of a text that differ from process to process
_LISTED = 8  # differences that an error lists
_SHOWN = 300  # characters of a text that an error shows


@dataclass(frozen=True)
class Fact:
    """A fact that must be the same on all ranks: its name, its text for people, a checksum of more than that, and the
    fix if it differs. `follows`: it is reported only if no fact with a smaller number differs."""

    name: str
    text: str
    checksum: str = ""
    fix: str = _SAME
    follows: int = 0

    @property
    def digest(self) -> str:
        """A few characters that differ where the fact does."""
        return hashlib.sha256(_OWN.sub("", f"{self.text}\n{self.checksum}").encode()).hexdigest()[:16]


def facts_of(named: Mapping[str, Tensor], fix: str, follows: int = 1) -> Iterator[Fact]:
    """The facts that tensors have these shapes, dtypes and bits."""
    for name, tensor in named.items():
        dtype = str(tensor.dtype).removeprefix("torch.")
        yield Fact(name, f"{dtype}{list(tensor.shape)}", str(checksum(tensor)), fix, follows)


@contextmanager
def agreement(purpose: str, detail: str = "", among: Sequence[int] | None = None) -> Iterator[list[Fact]]:
    """Compare the facts that the block puts in the list when it ends: they must be the same on all ranks, or on the
    ranks `among`; every one of them enters it. `purpose` completes "ranks would ...", as in "plan a call of MLP";
    `detail` is further text for the messages of other ranks.

    Raises the same RuntimeStateError on every rank, with the ranks that differ and how; if the block fails on some
    ranks but not on all, RuntimeStateError on the others.
    """
    facts: list[Fact] = []
    try:
        with watch().planning(f"is about to {purpose}{detail}"):
            yield facts
    except Exception as error:
        with suppress(RuntimeStateError):  # from the ranks that did not fail
            _agree(purpose, [], f"{type(error).__name__}: {error}", detail, among)
        raise
    _agree(purpose, facts, "", detail, among)


def agree(purpose: str, facts: Iterable[Fact], among: Sequence[int] | None = None) -> None:
    """`agreement` on existing `facts`."""
    with agreement(purpose, among=among) as own:
        own.extend(facts)


def gathered(purpose: str, mine: Any, among: Sequence[int] | None = None) -> list[Any]:
    """Gather the JSON values of all ranks (or of the ranks `among`), by rank; each of them calls it.

    Raises RuntimeStateError, on every rank, if some are elsewhere in the program.
    """
    own = watch()
    with _giving_up(among):
        verdict = json.loads(own.meet(purpose, _answer(purpose, value=mine), _listed, among=among))
        if verdict["error"]:
            raise RuntimeStateError(verdict["error"])
    values: list[Any] = verdict["values"]
    return values


def _listed(answers: dict[int, str]) -> str:
    """Rank 0's verdict on values: its verdict on the facts, and the values by rank."""
    verdict = json.loads(_compared(answers))
    return json.dumps({**verdict, "values": [json.loads(text).get("value") for text in answers.values()]})


def _answer(purpose: str, refused: str = "", facts: Iterable[Fact] = (), **more: Any) -> str:
    """The text that a rank hands in at a meeting."""
    digests = {fact.name: [fact.follows, fact.digest] for fact in facts}
    return json.dumps({"purpose": purpose, "refused": refused, "facts": digests, **more})


@contextmanager
def _giving_up(among: Sequence[int] | None) -> Iterator[None]:
    """Make a meeting that fails in the block fail on every rank of it."""
    try:
        yield
    except RuntimeStateError as error:
        own = watch()
        own.gave_up(error)
        own.part(among)
        raise


def _agree(purpose: str, facts: list[Fact], refused: str, detail: str, among: Sequence[int] | None) -> None:
    own = watch()
    with _giving_up(among):
        verdict = json.loads(own.meet(purpose, _answer(purpose, refused, facts), _compared, detail, among))
        if verdict["differ"]:
            told = {fact.name: [fact.text, fact.fix, fact.digest] for fact in facts if fact.name in verdict["differ"]}
            about = f"say how the ranks differ that would {purpose}"
            verdict["error"] = own.meet(about, json.dumps(told), _described, among=among)
        if verdict["error"]:
            raise RuntimeStateError(verdict["error"])


def _compared(answers: dict[int, str]) -> str:
    """Rank 0's verdict: an error for all, or the names of the facts that differ."""
    each_rank: dict[int, Any] = {rank: json.loads(text) for rank, text in answers.items()}
    purposes = {rank: each["purpose"] for rank, each in each_rank.items()}
    error = ""
    if len(set(purposes.values())) > 1:
        lines = "\n".join(f"  rank {rank} would {purpose}" for rank, purpose in purposes.items())
        error = f"the ranks are at different points of the program; {_SAME}:\n{lines}"
    refused = {rank: each["refused"] for rank, each in each_rank.items() if each["refused"]}
    if not error and refused and len(refused) < len(each_rank):
        rank, why = next(iter(refused.items()))
        error = f"rank {rank} could not {purposes[rank]}, and other ranks could; {_SAME}:\n{why}"
    names = {name: follows for each in each_rank.values() for name, (follows, _) in each["facts"].items()}
    first = next(iter(each_rank.values()))["facts"]
    differ = [name for name in names if any(each["facts"].get(name) != first.get(name) for each in each_rank.values())]
    least = min((names[name] for name in differ), default=0)
    told = [name for name in differ if names[name] == least]
    return json.dumps({"error": error, "differ": [] if refused or error else told})


def _described(answers: dict[int, str]) -> str:
    """Describe how ranks differ, for people; the first rank that differs from the first one stands for all."""
    facts: dict[int, Any] = {rank: json.loads(text) for rank, text in answers.items()}
    first, lines = next(iter(facts)), list[str]()
    for name in dict.fromkeys(name for each in facts.values() for name in each):
        texts = {rank: each[name][0] if name in each else None for rank, each in facts.items()}
        fix = next(each[name][1] for each in facts.values() if name in each)
        digests = {rank: each[name][2] if name in each else None for rank, each in facts.items()}
        rank = next(rank for rank, digest in digests.items() if digest != digests[first])
        other = f"has other values on rank {rank} than on rank {first}"
        lines.append(f"{name} {_difference(texts[first], texts[rank], first, rank) or other}; {fix}")
    if len(lines) == 1:
        return lines[0]
    shown = [f"  - {line}" for line in lines[:_LISTED]]
    more = [f"  - and {len(lines) - _LISTED} more"] if lines[_LISTED:] else []
    return "\n".join(["the ranks differ:", *shown, *more])


def _difference(one: str | None, other: str | None, first: int, rank: int) -> str:
    """How the texts of two ranks differ; "" if they do not."""
    if one == other:
        return ""
    if one is None or other is None:
        has, lacks = (first, rank) if other is None else (rank, first)
        return f"is there on rank {has} and not on rank {lacks}"
    ours, theirs = one.splitlines() or [""], other.splitlines() or [""]
    where = ""
    if len(ours) > 1 or len(theirs) > 1:
        line = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        line = min(len(ours), len(theirs)) if line is None else line
        ours, theirs = ([*lines[line : line + 1], "nothing more"] for lines in (ours, theirs))
        where = f"differs, first in line {line + 1}: it "
    alike = next((i for i, (a, b) in enumerate(zip(ours[0], theirs[0], strict=False)) if a != b), 0)
    return f"{where}is {_cut(ours[0], alike)} on rank {first} and {_cut(theirs[0], alike)} on rank {rank}"


def _cut(text: str, alike: int) -> str:
    """An excerpt of a long `text` around the place where it differs from another, after `alike` characters."""
    start = max(0, min(alike - _SHOWN // 2, len(text) - _SHOWN))
    return "..." * (start > 0) + text[start : start + _SHOWN] + "..." * (start + _SHOWN < len(text))

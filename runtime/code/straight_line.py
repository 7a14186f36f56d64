"""Generates a Python function from instructions, once per graph: straight-line code, in which only an assignment
separates two operators."""

from __future__ import annotations

import linecache
import os
import re
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol, TypeVar

from ...strategy.placement import Kind
from .instructions import Code, ConvertLayout, Instruction, Mark, Relayout
from .strides import check_laid_out, laid_out, strides_of

K = TypeVar("K")
Run = Callable[[list[Any]], list[Any]]
Bind = Callable[[Any], str]  # gives a value a name in the text of a function


@dataclass(frozen=True, slots=True)
class Trail:
    """The instructions of a function's lines, kept in its globals, so that a frame or a traceback locates a rank."""

    code: Code
    lines: Mapping[int, Instruction]
    ranks: Callable[[Relayout], tuple[int, ...]]

    def at(self, line: int) -> tuple[Instruction | None, str]:
        """The instruction of a line, and its description."""
        step = self.lines.get(line)
        return step, self.code.describe(step) if step else f"the {self.code.phase}"

    def peers(self, step: Instruction | None) -> tuple[int, ...]:
        """The ranks that take part in `step`; none if it is no collective."""
        return self.ranks(step.relayout) if isinstance(step, ConvertLayout) and step.communicates else ()


def trail_of(frame: FrameType) -> Trail | None:
    """The trail of the function that a frame runs, if it was generated here."""
    trail = frame.f_globals.get("trail")
    return trail if isinstance(trail, Trail) else None


class Dialect(Protocol):
    """How an executor writes instructions. `late`: awaited ones return an object to wait for, not the value."""

    late: bool

    def express(self, step: Instruction, bind: Bind) -> str:
        """The value of `step` as a Python expression; `bind` names objects besides slots and constants."""
        ...

    def ranks(self, c: Relayout) -> tuple[int, ...]:
        """The ranks of processes that a conversion waits for."""
        ...


def compile_code(code: Code, dialect: Dialect, mark: Mark | None = None) -> Run:
    """The function that runs `code`: from the list of the values of its inputs, which it empties, to those of its
    outputs. `mark(step, value, awaited)` is called after each instruction, and after each wait for one."""
    return compile_steps(code, code.instructions, range(code.inputs), code.outputs, dialect, mark)


def compile_steps(
    code: Code,
    steps: Sequence[Instruction],
    takes: Sequence[int],
    gives: Sequence[int | None],
    dialect: Dialect,
    mark: Mark | None = None,
    names: Sequence[str] = (),
) -> Run:
    """The function of `steps` of `code`: from the list of the values of `names` and of the slots `takes`, which it
    empties, to those of the slots `gives`. Each value is freed after its last use."""
    known: dict[str, Any] = dict(code.constants)

    def bind(value: Any) -> str:
        name = f"c{len(known)}"
        known[name] = value
        return name

    check = _checks(code, bind)
    dead = _last_uses(steps, takes, gives)
    arguments = [*names, *(f"v{slot}" for slot in takes)]
    lines = ["def run(inputs):"]
    lines += [f"    {', '.join(arguments)}, = inputs", "    inputs.clear()"] if arguments else ()
    for slot in takes:
        lines += check(slot, f"input {slot}", slot >= code.inputs)
    lines += _let_go(dead[-1])
    pending: dict[int, Instruction] = {}
    where: dict[int, Instruction] = {}

    def wait_for(slot: int) -> Iterator[str]:
        if slot in pending:
            step = where[len(lines) + 1] = pending.pop(slot)
            yield f"    v{slot} = v{slot}.wait()"
            yield from check(slot, step.name, True)
            if mark:
                yield f"    {bind(mark)}({bind(step)}, None, True)"

    for i, step in enumerate(steps):
        relayouts = {slot: other.relayout for slot, other in pending.items() if isinstance(other, ConvertLayout)}
        issued = step.relayout if isinstance(step, ConvertLayout) else None
        for slot in (*step.operands, *overdue(issued, relayouts)):
            lines.extend(wait_for(slot))
        where[len(lines) + 1] = step
        lines.append(f"    v{step.out} = {dialect.express(step, bind)}  # {step.name}")
        if not step.communicates and not (dialect.late and step.awaited):
            lines += check(step.out, step.name, step.follows)
        if mark:
            lines.append(f"    {bind(mark)}({bind(step)}, v{step.out}, False)")
        lines += _let_go(dead[i])
        if dialect.late and step.awaited:
            pending[step.out] = step
    for output in gives:
        lines.extend(wait_for(output) if output is not None else ())
    lines.append(f"    return [{', '.join('None' if output is None else f'v{output}' for output in gives)}]")
    known["trail"] = Trail(code, where, dialect.ranks)
    return _function("\n".join(_in_few_variables(lines)) + "\n", known, code.phase)


def overdue(issued: Relayout | None, pending: Mapping[K, Relayout]) -> list[K]:
    """The pending collectives to wait for before `issued` is issued: at most two may hold memory that their results do
    not need."""
    if issued is None or not _holds_what_it_sends(issued):
        return []
    return [slot for slot, other in pending.items() if _holds_what_it_sends(other)][:-1]


def _holds_what_it_sends(c: Relayout) -> bool:
    """Whether a collective holds whole tensors, or copies, until it is waited for: for gradients that may be at the
    end, when they are first read."""
    return c.kind is Kind.REDUCE_SCATTER or (c.kind is Kind.ALL_REDUCE and c.grouped)


def _checks(code: Code, bind: Bind) -> Callable[[int, str, bool], Iterator[str]]:
    """A function that writes the lines that give a slot its traced strides. If it is known to have them (`exact`), it
    writes none, or, with PARTWAY_VERIFY=1, a line that raises if it has not."""
    fix = bind(laid_out)
    verify = bind(check_laid_out) if os.environ.get("PARTWAY_VERIFY") == "1" else ""

    def lines(slot: int, name: str, exact: bool) -> Iterator[str]:
        strides = strides_of(code.traced.get(slot))
        if strides is None:
            return
        if not exact:
            yield f"    if v{slot}.stride() != {strides}: v{slot} = {fix}(v{slot}, {strides})"
        if verify and slot not in code.unsized:
            yield f"    {verify}(v{slot}, {bind(code.traced[slot])}, {name!r})"

    return lines


def _last_uses(
    steps: Sequence[Instruction], takes: Sequence[int], gives: Sequence[int | None]
) -> Mapping[int, Sequence[int]]:
    """For each i the slots that the i-th of `steps` reads last; for -1 those that none reads."""
    last = dict.fromkeys(takes, -1)
    for i, step in enumerate(steps):
        last.update(dict.fromkeys((*step.operands, step.out), i))
    kept, by_step = set(gives), defaultdict(list)
    for slot, i in last.items():
        if slot not in kept:
            by_step[i].append(slot)
    return by_step


def _let_go(slots: Sequence[int]) -> Iterator[str]:
    if slots:
        yield f"    del {', '.join(f'v{slot}' for slot in slots)}"


_VARIABLE = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|#.*|\bv(\d+)\b""")


def _in_few_variables(lines: Sequence[str]) -> Iterator[str]:
    """`lines` with variables reused after their values are freed. A frame has room for all its variables, and if it is
    large, Python maps memory for each call from it, which takes longer than a small kernel."""
    variables: dict[str, int] = {}
    free: list[int] = []

    def renamed(match: re.Match[str]) -> str:
        slot = match[1]
        if slot is None:
            return match[0]
        if slot not in variables:
            variables[slot] = free.pop() if free else len(variables)
        return f"v{variables[slot]}"

    for line in lines:
        yield _VARIABLE.sub(renamed, line)
        if line.startswith("    del "):
            free += (variables.pop(slot) for slot in _VARIABLE.findall(line))


def _function(text: str, names: dict[str, Any], phase: str) -> Run:
    """Compile `text` to its function `run`; tracebacks show its lines."""
    file = f"<partway {phase} {id(names):x}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    exec(compile(text, file, "exec"), names)
    run: Run = names.pop("run")  # popped from its own globals, so that only its callers keep it alive
    weakref.finalize(run, linecache.cache.pop, file, None)
    return run

"""Rules that users give to operators (`partway.rule`): checks of their text, the Rule of a call, and the suggested line
for an operator without a rule.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ...strategy.errors import OperatorError
from ..graph.nodes import at_source, describe, module_path, name_of_call, operator_name, shape, tensor_of, values_of
from ..ops.python.functions import run
from ..torch_internals import OpOverload, schema_of
from .row import Row, parse_row, schema_tensors, specified_results, specs_of, tokens_of
from .rule import Rule

Rows = Mapping[Any, Row]  # the rows that users gave, by operator
_FACTOR = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


# -- the rule by itself


def text_problems(row: Row) -> Iterator[str]:
    """The problems of `row` that do not depend on its operator."""
    if row.text.count("->") != 1:
        yield f"{row.text!r} is not of the form 'operands -> results', as in 'm k, k n -> m n'"
        return
    operands, results = specs_of(row.text)
    factors = [{f for spec in side for f in _factors(spec)} for side in (operands, results)]
    for spec in (*operands, *results):
        yield from _spec_problems(spec.removeprefix("+"))
    for spec in results:
        if spec.startswith("+"):
            yield f"'+' stands before the result {spec!r}; it is for operands, such as a bias"
    if unknown := sorted(factors[1] - factors[0]):
        yield f"{_listed(unknown)} of a result is in no operand; write 1 for a dim that cannot be split"
    for option, text in (("reduce", row.reduce), ("whole", row.whole)):
        if unknown := sorted(set(text.split()) - factors[0]):
            yield f"{option}={text!r} names {_listed(unknown)}, which is in no operand"
    everywhere = {f for f in row.reduce.split() if f in factors[0] and all(f in _factors(spec) for spec in results)}
    if everywhere:
        yield f"reduce={row.reduce!r} names {_listed(sorted(everywhere))}, which every result has: nothing is summed"
    for text in row.linear:
        if wrong := [p for p in text.split() if not p.isdigit() or int(p) >= len(operands)]:
            yield f"linear names operand {', '.join(wrong)}; they are 0 to {len(operands) - 1}"


def _factors(spec: str) -> list[str]:
    return re.findall(rf"\.\.\.|{_FACTOR.pattern}", spec)


def _spec_problems(spec: str) -> Iterator[str]:
    inside = [part for token in tokens_of(spec) for part in token.strip("()").split()]
    if wrong := [part for part in inside if part not in ("...", "1") and not _FACTOR.fullmatch(part)]:
        yield f"{' '.join(wrong)!r} in {spec!r} is not a factor: a name, 1, ..., or a merged dim such as (a b)"
    if twice := [part for part, times in Counter(_factors(spec)).items() if times > 1]:
        yield f"{_listed(twice)} is twice in {spec!r}: a factor is one dim of a tensor"
    if any(token.startswith("(") and {"...", "1"} & set(token.strip("()").split()) for token in tokens_of(spec)):
        yield f"a merged dim of {spec!r} holds more than factors"


def _listed(factors: Sequence[str]) -> str:
    return " and ".join(map(repr, factors))


# -- the rule of an operator


def schema_problems(row: Row, operator: OpOverload) -> Iterator[str]:
    """The reasons why `row` cannot be the rule of `operator`."""
    schema = schema_of(operator)
    if schema.is_mutable:
        yield "it writes to its operands; a rule is for an operator that returns new values"
        return
    operands, results = specs_of(row.text)
    taken = [a.name for a in schema.arguments if "Tensor" in str(a.type)]
    returned = [r for r in schema.returns if "Tensor" in str(r.type)]
    if len(taken) != len(operands):
        yield f"it takes {len(taken)} tensors ({', '.join(taken)}), and the text names {len(operands)}"
    if len(returned) != len(results):
        yield f"it returns {len(returned)} tensors, and the text names {len(results)}"


# -- the rule of a call


def own_rule(row: Row, node: fx.Node) -> Rule:
    """The Rule of a user's `row` for one call. Factors are split evenly: it is unknown what the operator does with the
    padding of an uneven shard.

    Raises OperatorError where the row does not fit the sizes of the call."""
    problems = list(_size_problems(row, node))
    if problems:
        raise OperatorError(
            f"the rule {row.text!r} of {operator_name(node)} does not fit its call {node.name} in "
            f"{module_path(node) or 'the function'}: {'; '.join(problems)}{at_source(node)}"
        )
    rule = parse_row(row, node)
    return replace(rule, even=frozenset(rule.sizes))


def _size_problems(row: Row, node: fx.Node) -> Iterator[str]:
    specs, result_specs = specs_of(row.text)
    tensors = [
        (name if len(passed) == 1 else f"{name}[{i}]", spec.lstrip("+"), shape(tensor))
        for spec, (name, passed) in zip(specs, schema_tensors(node), strict=True)
        for i, tensor in enumerate(passed)
    ]
    results = specified_results(result_specs, node)
    tensors += [(f"result {i}" if results[1:] else "the result", spec, size) for i, (spec, size) in enumerate(results)]
    seen: dict[str, tuple[int, str]] = {}
    merged = []
    for words, spec, size in tensors:
        tokens = tokens_of(spec)
        rest = len(size) - len(tokens)
        if rest < -1 or (rest != 0 and "..." not in tokens):
            yield f"{words} {list(size)} has {len(size)} dims, and {spec!r} names {len(tokens)}"
            continue
        i = tokens.index("...") if "..." in tokens else len(tokens)
        for token, extent in zip((*tokens[:i], *tokens[i + 1 :]), (*size[:i], *size[i + rest + 1 :]), strict=True):
            if token.startswith("("):
                merged.append((words, token, size, extent))
            elif token != "1":
                before, where = seen.setdefault(token, (extent, f"{words} {list(size)}"))
                if before != extent:
                    yield f"{token!r} is {before} in {where} and {extent} in {words} {list(size)}"
    for words, token, size, extent in merged:
        parts = token.strip("()").split()
        known = [seen[part][0] for part in parts if part in seen]
        if extent % max(math.prod(known), 1) or (len(known) == len(parts) and math.prod(known) != extent):
            of = ", ".join(f"{part}={seen[part][0]}" for part in parts if part in seen)
            yield f"{token} of {words} {list(size)} is {extent}, which {of} does not make"


# -- operators without a rule


def sketch(node: fx.Node) -> str:
    """A suggested line that gives the operator of a call a rule, with one factor for each size among its tensors."""
    letters: dict[int, list[str]] = {}

    def named(size: Sequence[int], operand: bool) -> str:
        used: Counter[int] = Counter()
        words = []
        for extent in size:
            known = letters.setdefault(extent, [])
            if operand and extent != 1 and used[extent] == len(known):
                known.append("abcdefghijklmnopqrstuvwxyz"[sum(map(len, letters.values())) % 26])
            words.append(known[used[extent]] if used[extent] < len(known) else "1")
            used[extent] += 1
        return " ".join(words)

    specs = [named(shape(given[0]), True) if given else "..." for _, given in schema_tensors(node)]
    results = [tensor_of(v) for v in values_of(node)]
    given = [named(tuple(t.shape), False) for t in results if isinstance(t, torch.Tensor)]
    listed = isinstance(node.meta["val"], list)
    name = operator_name(node).replace(".", "::", 1).removesuffix(".default")
    return f'pw.rule("{name}", "{", ".join(specs)} -> {", ".join(given[:1] if listed else given)}")'


def without_rule(nodes: Sequence[fx.Node], so: str) -> str:
    """A text with a line for each of `nodes`, which says that it has no rule and what follows (`so`)."""
    lines, others = [], [node for node in nodes if node.target is not run]
    for name in [name_of_call(node) for node in nodes if node.target is run]:
        what = f"{name} writes to its operands, which no rule can say"
        if name == str(run):
            what = "a branch, or a loop that ends by a value (torch.cond, while_loop), is not an operator with a rule"
        lines.append(what + so)
    lines += [
        f"{operator_name(node)} (node {node.name}, {describe(node)}, in {module_path(node) or 'the function'}) has no "
        f"rule{so}. Give it one, such as {sketch(node)}"
        for node in others
    ]
    if others:
        lines.append(
            "(dims of one letter are split together; here dims of one size have one: write what the operator does)"
        )
    return "\n".join(lines)

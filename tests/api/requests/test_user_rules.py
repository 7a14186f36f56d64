"""`rule`: an operator of the user's own splits as told, with exact gradients, and what is wrong with a rule is said."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import partway as pw
from partway.requests.user_rules import rules, version

MESH = {"dp": 2, "tp": 2}
EXACT = 1e-12
BATCH = (("dp", None, None), None)
BMM = "b m k, b k n -> b m n"


@torch.library.custom_op("partway_tests::bmm", mutates_args=())
def bmm(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


@bmm.register_fake
def _(x: Tensor, w: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], w.shape[2])


def _bmm_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, w = ctx.saved_tensors
    return bmm(grad, w.mT.contiguous()), bmm(x.mT.contiguous(), grad)


bmm.register_autograd(_bmm_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))


@torch.library.custom_op("partway_tests::blend", mutates_args=())
def blend(xs: list[Tensor], shift: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The sum of all, scaled and shifted, and the sums of its rows."""
    total = torch.stack(xs).sum(0) * scale
    total = total if shift is None else total + shift
    return total, total.sum(-1)


@blend.register_fake
def _(xs: list[Tensor], shift: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(xs[0]), xs[0].new_empty(xs[0].shape[:-1])


def _blend_backward(ctx: Any, grad: Tensor, sums: Tensor) -> tuple[list[Tensor], Tensor | None, None]:
    grad = grad + sums.unsqueeze(-1)
    shift = grad.sum(tuple(range(grad.dim() - 1))) if ctx.shifted else None
    return [grad * ctx.scale] * ctx.count, shift, None


def _blend_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.count, ctx.shifted, ctx.scale = len(inputs[0]), inputs[1] is not None, inputs[2]


blend.register_autograd(_blend_backward, setup_context=_blend_context)


@torch.library.custom_op("partway_tests::count", mutates_args=())
def count(x: Tensor, rows: int) -> Tensor:
    """The columns' sums over so many rows, each divided by their number."""
    return x.sum(0) / rows


@count.register_fake
def _(x: Tensor, rows: int) -> Tensor:
    return x.new_empty(x.shape[1])


@torch.library.custom_op("partway_tests::flat", mutates_args=())
def flat(x: Tensor, parts: int) -> list[Tensor]:
    """`x` with its first two dims merged, times 0, 1, 2, ..."""
    return [x.flatten(0, 1) * i for i in range(parts)]


@flat.register_fake
def _(x: Tensor, parts: int) -> list[Tensor]:
    return [x.new_empty(x.shape[0] * x.shape[1], *x.shape[2:]) for _ in range(parts)]


@torch.library.custom_op("partway_tests::write", mutates_args=("x",))
def write(x: Tensor) -> None:
    x.add_(1)


@torch.library.custom_op("partway_tests::shapeless", mutates_args=())
def shapeless(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("partway_tests::nested", mutates_args=())
def nested(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return x * 2, [x * 3]


@nested.register_fake
def _(x: Tensor) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(x), [torch.empty_like(x)]


def random(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


def assert_same(fn: Callable[..., Any], given: list[Tensor], **options: Any) -> pw.Plan:
    """Values and gradients are those of one device. Returns the plan."""
    again = [x.detach().clone().requires_grad_(x.requires_grad) for x in given]
    sharded = pw.shard(fn, mesh=MESH, **options)
    found, expected = sharded(*again), fn(*given)
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
    for results in (found, expected):
        if any(one.requires_grad for one in (results if isinstance(results, tuple | list) else [results])):
            sum((one**2).sum() for one in (results if isinstance(results, tuple | list) else [results])).backward()
    for one, other in zip(again, given, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=EXACT, atol=EXACT)
    return sharded.plan  # type: ignore[no-any-return]


def strategy_of(plan: pw.Plan, name: str) -> str:
    return next(o.strategy for o in plan.operators if o.operator.startswith(f"partway_tests.{name}."))


# -- what splits


@pytest.mark.parametrize(
    ("split", "strategy"),
    [
        (("dp", "tp", None), "(dp:b tp:m)"),
        ((None, None, ("dp", "tp")), "(dp:k tp:k)"),
        (("dp", None, "tp"), "(dp:b tp:k)"),
        ((None, None, None), "(dp:b tp:b)"),
    ],
)
def test_a_custom_operator_splits_by_its_rule_with_exact_gradients(split: Any, strategy: str) -> None:
    w = (split[0], split[2], None)
    with pw.rule(bmm, BMM, reduce="k", linear=(0, 1), contraction=True):
        given = [random(4, 6, 8), random(4, 8, 2)]
        plan = assert_same(lambda x, w: bmm(x, w).relu(), given, in_strategy=(split, w))
    if any(split):
        assert strategy_of(plan, "bmm") == strategy
    assert plan.unknown_operators == ()


@pytest.mark.parametrize("shifted", [True, False])
@pytest.mark.parametrize("split", [("dp", "tp"), (None, "tp"), (("dp", "tp"), None)])
def test_lists_optional_tensors_and_several_results(shifted: bool, split: Any) -> None:
    def fn(x: Tensor, y: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        return blend([x, y.sin()], shift if shifted else None, 0.5)  # type: ignore[no-any-return]

    given = [random(4, 8), random(4, 8), random(8).requires_grad_(shifted)]
    with pw.rule("partway_tests::blend", "... c, c -> ... c, ...", reduce="c"):
        plan = assert_same(fn, given, in_strategy=(split, split, None), out_strategy=(split,))
    assert ("tp:c" in strategy_of(plan, "blend")) == (split[1] is not None)


def test_a_list_of_results_and_a_merged_dim() -> None:
    x = random(4, 3, 2).detach()
    with pw.rule("partway_tests::flat", "b s d -> (b s) d"):
        split = (("dp", "tp"), None)
        plan = assert_same(lambda x: flat(x, 3), [x], in_strategy=((*split, None),), out_strategy=(split,) * 3)
    assert strategy_of(plan, "flat") == "(dp:b tp:b)"


def test_the_local_form_is_what_a_rank_runs() -> None:
    x = random(8, 1 << 16).detach()

    with pw.rule("partway_tests::count", "b c -> c", reduce="b") as rule:

        @rule
        def local(emit: Any, args: Any, kwargs: Any) -> Any:
            parts = len(emit.bounds("b")) - 1
            return emit.call(torch.ops.aten.div.Scalar, emit.call(emit.node.target, args[0], args[1] // parts), parts)

        program = pw.shard(lambda x: count(x, 8), mesh=MESH, in_strategy=((("dp", "tp"), None),))
        torch.testing.assert_close(program(x), x.mean(0), rtol=EXACT, atol=EXACT)
        assert "count" in str(program.program)
        assert ", 2)" in str(program.program)
    assert local.__name__ == "local"  # what it decorates stays


def test_a_size_that_an_axis_does_not_divide_stays_whole() -> None:
    with pw.rule(bmm, BMM, reduce="k"):
        plan = assert_same(
            lambda x, w: bmm(x, w) + 1, [random(3, 5, 7), random(3, 7, 4)], in_strategy=(("dp", None, None), None)
        )
    assert all(factor in (None, "n") for o in plan.operators if "bmm" in o.operator for factor in o.factors)


# -- when it holds


def test_a_rule_may_come_before_its_operator_and_decorate_it() -> None:
    rule = pw.rule("partway_tests::late", "a b -> a b")
    with rule:

        @rule
        @torch.library.custom_op("partway_tests::late", mutates_args=())
        def late(x: Tensor) -> Tensor:
            return x * 2

        late.register_fake(torch.empty_like)
        assert isinstance(late, torch.library.CustomOpDef)
        plan = assert_same(late, [random(4, 4).detach()], in_strategy=(("dp", "tp"),))
    assert strategy_of(plan, "late") == "(dp:a tp:b)"


def test_reading_the_rules_changes_nothing() -> None:
    with pw.rule("partway_tests::later", "a -> a") as rule:
        with pytest.raises(pw.StrategyError, match="there is no such operator"):
            rules()

        @torch.library.custom_op("partway_tests::later", mutates_args=())
        def later(x: Tensor) -> Tensor:
            return x * 2

        before = version(), repr(rule)
        assert rules() == rules() == {torch.ops.partway_tests.later.default: rule.row}
        assert (version(), repr(rule)) == before


def test_a_rule_that_comes_after_the_first_call_is_used_by_the_next() -> None:
    fn = pw.shard(bmm, mesh=MESH, in_strategy=(("dp", None, None), ("dp", None, None)))
    x, w = random(4, 6, 8).detach(), random(4, 8, 2).detach()
    with pytest.warns(pw.UnknownOperatorWarning):
        fn(x, w)
    assert strategy_of(fn.plan, "bmm") == "(dp:R tp:R)"
    with pw.rule(bmm, BMM, reduce="k"):
        torch.testing.assert_close(fn(x, w), x @ w)
        assert "dp:b" in strategy_of(fn.plan, "bmm")
    with pytest.warns(pw.UnknownOperatorWarning):
        pw.compile(bmm, (x, w), mesh=MESH)


def test_a_rule_takes_the_place_of_another() -> None:
    x = torch.ones(8, 8)
    split = {"mesh": {"tp": 2}, "in_strategy": (("tp", None),)}
    with pw.rule("aten::mean.dim", "a b -> a", replace=True):  # which is expanded into a sum otherwise
        assert [o.operator for o in pw.compile(lambda x: x.mean(1), (x,), **split).plan.operators] == ["aten.mean.dim"]
        with pw.rule("aten::mean.dim", "a b -> a", whole="a b", replace=True):
            (mean,) = pw.compile(lambda x: x.mean(1), (x,), **split).plan.operators
            assert mean.factors == (None,)
        (mean,) = pw.compile(lambda x: x.mean(1), (x,), **split).plan.operators
        assert mean.factors == ("a",)


def test_the_same_rule_again_is_no_error() -> None:
    with pw.rule(bmm, BMM), pw.rule(bmm, BMM):
        pass


# -- without one


def test_the_warning_is_the_line_to_write() -> None:
    x, w = random(4, 6, 8).detach(), random(4, 8, 2).detach()
    with pytest.warns(pw.UnknownOperatorWarning) as seen:
        pw.compile(bmm, (x, w), mesh=MESH)
    (text,) = [str(one.message) for one in seen]
    line = 'pw.rule("partway_tests::bmm", "a b c, a c d -> a b d")'
    assert "partway_tests.bmm.default (node bmm, float64[4, 6, 2], in the function) has no rule" in text
    assert line in text
    with eval(line, {"pw": pw}), warnings.catch_warnings():
        warnings.simplefilter("error")
        pw.compile(bmm, (x, w), mesh=MESH)


def test_the_line_names_lists_and_absent_tensors() -> None:
    with pytest.warns(pw.UnknownOperatorWarning) as seen:
        pw.compile(lambda x: blend([x, x], None, 1.0), (torch.ones(4, 4, 1),), mesh=MESH)
    assert 'pw.rule("partway_tests::blend", "a b 1, ... -> a b 1, a b")' in str(seen[0].message)


def test_on_unknown_op_error_shows_it_too() -> None:
    pw.set_auto_parallel_context(on_unknown_op="error")
    with pytest.raises(pw.OperatorError, match=r'pw\.rule\("partway_tests::bmm", "a b c, a c d -> a b d"\)'):
        pw.compile(bmm, (random(4, 6, 8), random(4, 8, 2)), mesh=MESH)


@pytest.mark.filterwarnings("ignore:.*has no rule")
def test_an_operator_without_a_rule_runs_replicated_with_exact_gradients() -> None:
    plan = assert_same(
        lambda x, w: bmm(x * 2, w), [random(4, 6, 8), random(4, 8, 2)], in_strategy=(("dp", None, None), None)
    )
    assert plan.unknown_operators == ("partway_tests.bmm.default",)


# -- what is wrong


def test_all_that_is_wrong_with_a_rule_is_said_at_once() -> None:
    with pytest.raises(pw.StrategyError) as found:
        pw.rule("partway_tests::bmm", "b m m, +b k& -> b z", reduce="q", whole="p", linear=(2,))
    for text in (
        "the rule of partway_tests::bmm is wrong:",
        "'m' is twice in 'b m m'",
        "'k&' in 'b k&' is not a factor",
        "'z' of a result is in no operand; write 1",
        "reduce='q' names 'q', which is in no operand",
        "whole='p' names 'p', which is in no operand",
        "linear names operand 2; they are 0 to 1",
    ):
        assert text in str(found.value)


DEEP = functools.reduce(lambda inner, _: [inner], range(5000), [])


@pytest.mark.parametrize(
    ("operator", "text", "options", "words"),
    [
        ("partway_tests::bmm", BMM, {"reduce": 3}, "reduce: is 3 (int); write a str"),
        ("partway_tests::bmm", BMM, {"linear": "0"}, "linear: is '0'; write a tuple of operands"),
        ("partway_tests::bmm", BMM, {"linear": DEEP}, "linear: is a list that is too large to be shown"),
        ("partway_tests::bmm", BMM, {"reduce": "b"}, "reduce='b' names 'b', which every result has"),
        ("partway_tests::bmm", "b m n", {}, "is not of the form 'operands -> results'"),
        ("partway_tests::bmm", "a -> +a", {}, "'+' stands before the result '+a'"),
        ("partway_tests::bmm", "(a 1) -> a", {}, "a merged dim of '(a 1)' holds more than factors"),
        ("partway_tests::bmm", "a, b, c -> a", {}, "it takes 2 tensors (x, w), and the text names 3"),
        ("partway_tests::blend", "a, b -> a", {}, "it returns 2 tensors, and the text names 1"),
        ("partway_tests::write", "a -> a", {}, "partway_tests.write.default: it writes to its operands"),
        ("aten::linear", "... k, n k, n -> ... n", {}, "aten.linear.default: has a rule already; pass replace=True"),
        ("aten::mean.dim", "a b -> a", {}, "aten.mean.dim: has a rule already; pass replace=True"),
        ("aten::sin", "a -> a", {}, "aten.sin.default: has a rule already; pass replace=True"),
        ("bmm", BMM, {}, "rule is given 'bmm' for its operator; write its name, as in 'my::op'"),
        (torch.bmm, BMM, {}, "or give the operator itself"),
    ],
)
def test_a_wrong_rule_says_what_is_wrong(operator: Any, text: str, options: Any, words: str) -> None:
    with pytest.raises(pw.StrategyError) as found:
        pw.rule(operator, text, **options)
    assert words in str(found.value)
    pw.compile(lambda x: x + 1, (torch.ones(4),), mesh={"tp": 2})  # nothing of it is left


def test_another_rule_for_one_operator_is_refused() -> None:
    with pw.rule(bmm, BMM), pytest.raises(pw.StrategyError, match=r"bmm\.default: has a rule already"):
        pw.rule(bmm, BMM, reduce="k")


def test_a_rule_of_no_operator_is_refused_by_the_next_plan() -> None:
    with (
        pw.rule("partway_tests::bnm", BMM),
        pytest.raises(
            pw.StrategyError, match=r"'partway_tests::bnm': there is no such operator; did you mean 'partway"
        ),
    ):
        pw.compile(lambda x: x + 1, (torch.ones(4),), mesh={"tp": 2})


def test_a_decorator_is_of_the_operator_that_it_names() -> None:
    with pytest.raises(
        pw.StrategyError, match=r"rule of partway_tests::count decorates the operator partway_tests\.bmm"
    ):
        pw.rule("partway_tests::count", "a b -> b")(bmm)
    with pytest.raises(pw.StrategyError, match="rule decorates an operator or a function that writes its local form"):
        pw.rule("partway_tests::count", "a b -> b")(3)  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("b m k, k n -> b m n", "w [4, 8, 2] has 3 dims, and 'k n' names 2"),
        ("b m k, b n k -> b m n", "'k' is 8 in x [4, 6, 8] and 2 in w [4, 8, 2]"),
        ("b m k, b k (m n) -> b m n", "(m n) of w [4, 8, 2] is 2, which m=6, n=2 does not make"),
        ("b m k q ..., b k n -> b m n", "x [4, 6, 8] has 3 dims, and 'b m k q ...' names 5"),
    ],
)
def test_a_rule_that_does_not_fit_a_call_says_where(text: str, words: str) -> None:
    with pw.rule(bmm, text), pytest.raises(pw.OperatorError) as found:
        pw.compile(bmm, (random(4, 6, 8), random(4, 8, 2)), mesh=MESH)
    assert f"the rule {text!r} of partway_tests.bmm.default does not fit its call bmm in the function: " in str(
        found.value
    )
    assert words in str(found.value)


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (shapeless, "operator partway_tests::shapeless has no implementation that tells the shapes"),
        (lambda x: nested(x)[0], "operator partway_tests.nested.default returns lists of tensors beside others"),
    ],
)
def test_an_operator_that_cannot_be_captured_is_named(fn: Any, words: str) -> None:
    with pytest.raises(pw.CaptureError) as found:
        pw.compile(fn, (torch.ones(4),), mesh={"tp": 2})
    assert words in str(found.value)


# -- the cache


def test_the_cache_knows_rules_and_keeps_no_derivative_of_a_custom_operator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PARTWAY_CACHE", raising=False)
    monkeypatch.delenv("PARTWAY_VERIFY", raising=False)
    pw.set_auto_parallel_context(compile_cache_path=str(tmp_path))
    given = random(1, 2, 1 << 16), random(1, 1 << 16, 2)

    def strategy(**options: Any) -> str:
        with pw.rule(bmm, BMM, **options):
            found = pw.compile(bmm, given, mesh={"tp": 2}, in_strategy=((None, None, "tp"), None))
            assert "bmm" in str(found.program)
        return strategy_of(found.plan, "bmm")

    assert strategy(reduce="k") == "(tp:k)"
    assert strategy(whole="b m n k") == "(tp:R)"
    assert strategy(reduce="k") == "(tp:k)"
    kinds = sorted(path.name.partition(".")[2] for path in tmp_path.glob("*/*"))
    assert kinds == ["forward", "forward", "plan", "plan"]

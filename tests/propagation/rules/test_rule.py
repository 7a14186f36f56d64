"""The notation of a row, and the options on one axis that follow from it."""

import pytest
import torch
from torch import fx

from partway.propagation.rules.row import Row, parse_row
from partway.propagation.rules.rule import Rule, axis_options

aten = torch.ops.aten


def call(target, *args, **kwargs):
    """A node that calls `target`; a tuple of ints in `args` stands for a tensor of that shape."""
    graph = fx.Graph()

    def operand(value):
        node = graph.placeholder("x")
        node.meta["val"] = torch.empty(value, device="meta") if isinstance(value, tuple) else value
        return node

    nodes = [operand(a) if isinstance(a, tuple | torch.Tensor) else a for a in args]
    node = graph.call_function(target, tuple(nodes), kwargs)
    values = [n.meta["val"] if isinstance(n, fx.Node) else n for n in nodes]
    node.meta["val"] = target(*values, **kwargs)
    return node


def indices(*shape):
    return torch.empty(shape, dtype=torch.int64, device="meta")


def options(rule):
    """Each option as `split k: S1 B P -> P`."""
    return [f"{o}: {' '.join(map(str, o.operands))} -> {' '.join(map(str, o.results))}" for o in axis_options(rule)]


LINEAR = Row("... k, n k, +n -> ... n", reduce="k", linear=("0 2", "1 2"), contraction=True)


def test_a_factor_stands_for_one_dim_of_every_tensor_that_has_it():
    rule = parse_row(Row("m k, k n -> m n", reduce="k"), call(aten.mm.default, (2, 3), (3, 5)))
    assert rule.operands == ((("m",), ("k",)), (("k",), ("n",)))
    assert rule.results == ((("m",), ("n",)),)
    assert rule.sizes == {"m": 2, "k": 3, "n": 5}
    assert rule.reduce == {"k"}
    assert rule.flops == 0


def test_leading_dims_are_aligned_from_the_right():
    rule = parse_row(Row("v d, ... -> ... d"), call(aten.embedding.default, (7, 3), indices(4, 5)))
    assert rule.operands == ((("v",), ("d",)), (("_2",), ("_1",)))
    assert rule.results == ((("_2",), ("_1",), ("d",)),)
    assert rule.sizes == {"v": 7, "d": 3, "_2": 4, "_1": 5}


def test_an_ellipsis_may_stand_for_no_dim():
    rule = parse_row(LINEAR, call(aten.linear.default, (3,), (5, 3), (5,)))
    assert rule.operands[0] == (("k",),)
    assert rule.results == ((("n",),),)


def test_an_absent_optional_operand_drops_out():
    rule = parse_row(LINEAR, call(aten.linear.default, (2, 3), (5, 3)))
    assert len(rule.operands) == 2
    assert rule.additive == frozenset()
    assert rule.linear == ({0}, {1})


def test_a_contraction_counts_a_multiplication_and_an_addition_for_each_point_of_its_factors():
    assert parse_row(LINEAR, call(aten.linear.default, (2, 3), (5, 3))).flops == 2 * 2 * 3 * 5


def test_a_whole_factor_is_never_split():
    rule = parse_row(Row("v d, ... -> ... d", whole="v"), call(aten.embedding.default, (8, 4), indices(4)))
    assert rule.operands[0] == ((), ("d",))
    assert "v" not in rule.sizes


def test_a_dim_written_1_is_not_split():
    rule = parse_row(Row("1 n -> 1 n"), call(aten.relu.default, (4, 4)))
    assert options(rule) == ["split n: S1 -> S1", "R: R -> R", "B: B -> B"]


def test_only_the_major_factor_of_a_merged_dim_is_split():
    node = call(aten.reshape.default, (4, 6), [24])
    rule = Rule(((("b",), ("s",)),), ((("b", "s"),),), {"b": 4, "s": 6})
    assert options(rule)[0] == "split b: S0 -> S0"
    assert not any(text.startswith("split s") for text in options(rule))
    row = parse_row(Row("b s -> (b s)"), node)
    assert (row.operands, row.results, row.sizes) == (rule.operands, rule.results, rule.sizes)


def test_a_minor_factor_is_split_where_those_before_it_have_size_1():
    assert options(Rule(((("b",), ("s",)),), ((("b", "s"),),), {"b": 1, "s": 6}))[0] == "split s: S1 -> S0"


def test_the_options_of_a_linear_layer():
    rule = parse_row(LINEAR, call(aten.linear.default, (2, 4, 6), (8, 6), (8,)))
    assert options(rule) == [
        "split _2: S0 B B -> S0",
        "split _1: S1 B B -> S1",
        "split k: S2 S1 P -> P",  # the bias enters the sum once
        "split n: B S0 S0 -> S2",
        "R: R R R -> R",
        "B: B B B -> B",
        "P: P B P -> P",  # addends of x and of the bias, the weight whole
        "B: B P P -> P",
    ]


def test_a_factor_that_a_result_lacks_is_split_only_where_it_is_summed():
    dims = ((("m",), ("k",)),)
    assert options(Rule(dims, ((("m",),),), {"m": 2, "k": 2})) == ["split m: S0 -> S0", "R: R -> R", "B: B -> B"]
    summed = Rule(dims, ((("m",),),), {"m": 2, "k": 2}, reduce=frozenset("k"))
    assert options(summed)[:2] == ["split m: S0 -> S0", "split k: S1 -> P"]


def test_one_result_may_have_a_factor_that_another_sums():
    rule = Rule(((("a",),),), ((("a",),), ()), {"a": 4}, reduce=frozenset("a"))
    assert options(rule)[0] == "split a: S0 -> S0 P"


def test_a_factor_of_size_1_is_not_split():
    assert options(Rule(((("a",),),), ((("a",),),), {"a": 1})) == ["R: R -> R", "B: B -> B"]


def test_an_operator_without_operands_is_replicated():
    assert options(Rule((), ((("a",),),), {"a": 1})) == ["R:  -> R"]


def test_equal_options_are_listed_once():
    assert len(options(Rule(((),), ((),), {}, linear=(frozenset({0}), frozenset({0}))))) == 3


@pytest.mark.parametrize("row", [Row("m k, k n -> m n"), Row("m k, k n -> m n z")])
def test_a_row_that_does_not_fit_the_shapes_is_an_error(row):
    with pytest.raises(ValueError, match="zip"):
        parse_row(row, call(aten.bmm.default, (2, 2, 2), (2, 2, 2)))

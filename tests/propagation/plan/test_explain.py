"""Why an operator, a module or a tensor is as it is, as text."""

import pytest
import torch

import partway as pw
from partway.strategy import StrategyError


def test_a_module_is_explained_by_its_operators_with_their_collectives_and_the_reason(plan):
    lines = str(plan.explain("down")).splitlines()
    assert lines[0] == "linear_1 = aten.linear.default float32[1024, 512] in down"
    assert lines[1] == "    splits (dp:_1 tp:k); results [dp:S0 tp:P]"
    assert lines[2].startswith("    from perceptron.py:")
    assert lines[3] == "    reads squeeze_dims, down.weight, down.bias; read by output result"
    assert lines[4] == "    backward all_reduce over dp (2 ranks) of down.weight: 1.05 MB, 1.05 MB sent, 11.8 us"
    assert lines[5] == (
        "        because parameter down.weight [dp:R tp:S1] meets aten.linear.default linear_1 (dp:_1 tp:k)"
    )


def test_a_parameter_is_explained_with_its_annotation(plan):
    lines = str(plan.explain("up.weight")).splitlines()
    assert lines[:3] == [
        "parameter up.weight float32[2048, 512]: [dp:R tp:S0]",
        "    annotated ('tp', None)",
        "    this annotation costs nothing: the optimum has it too",
    ]
    assert "of up.weight" in lines[3]


def test_an_output_is_explained_with_the_collective_that_it_causes(plan):
    text = str(plan.explain("result"))
    assert text.startswith("result result float32[1024, 512]: [dp:S0 tp:R]\n    annotated ('dp', None)\n")
    assert "forward all_reduce over tp (4 ranks) of linear_1" in text


def test_patterns_and_nodes_are_explained(plan):
    assert str(plan.explain("up.*")).count("\nparameter ") == 1
    assert str(plan.explain("relu")).startswith("relu = aten.relu.default")

    class Node:
        name = "relu"

    assert plan.explain(Node()) == plan.explain("relu")


def test_what_is_not_in_the_plan_is_an_error_that_names_what_is(plan):
    with pytest.raises(StrategyError, match=r"the plan has nothing called 'up.wieght'; did you mean 'up.weight'"):
        plan.explain("up.wieght")
    with pytest.raises(StrategyError, match="the plan has nothing called 'zzz'"):
        plan.explain("zzz")


def test_a_plan_that_does_not_say_what_operators_read_is_explained_without(plan, of_the_version_before):
    lines = str(of_the_version_before.explain("down")).splitlines()
    assert len(lines) == len(str(plan.explain("down", alternatives=0)).splitlines())  # and a line on what it lacks
    assert not any("reads" in line for line in lines)


def test_many_readers_are_counted():
    def many(x):
        y = x * 2
        return [y + i for i in range(6)]

    text = str(pw.compile(many, (torch.empty(8, 8),), mesh={"dp": 2}).plan.explain("mul"))
    assert "reads x; read by add, add_1, add_2, add_3 and 2 more" in text

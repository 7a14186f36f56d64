"""PyTorch's samples of its operators, split: right, and as sharded as docs/coverage/operators.md states."""

import operators
import pytest
import torch

import partway as pw

SLICE = (  # one of each family of rules
    "cat", "cumsum", "linalg.vector_norm", "masked_fill", "matmul", "nn.functional.conv2d", "nn.functional.group_norm",
    "permute", "softmax", "sort",
)  # fmt: skip


def test_operators_are_right_and_as_sharded_as_the_page_says():
    said, known = operators.statuses(), operators.entries()
    found = {result.name: result for result in operators.examine([known[name] for name in SLICE], most=2, strided=1)}
    assert {name: result.problems for name, result in found.items() if result.problems} == {}
    assert {name: result.status for name, result in found.items()} == {name: said[name] for name in SLICE}


DOUBLE = (torch.float64,)


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_all_operators_are_right_and_as_sharded_as_the_page_says():
    said = operators.statuses()
    names = list(operators.entries())
    assert set(said) == set(names)
    found = {result.name: result for result in operators.examine_all(names)}
    assert {name: result.problems for name, result in found.items() if result.problems} == {}
    assert {name: result.status for name, result in found.items()} == said


@pytest.mark.parametrize("over", [operators.Ranks.ONE, operators.Ranks.NONE])
def test_operators_are_right_on_ranks_of_one_element_or_of_none(over):
    known = operators.entries(DOUBLE)
    names = "cross", "expand", "linalg.solve", "nn.functional.conv1d", "squeeze", "squeeze.multiple"
    found = operators.examine([known[name] for name in names], 2, DOUBLE, over, 0)
    assert {result.name: result.problems for result in found if result.problems} == {}
    assert all(result.kept for result in found)


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("over", [operators.Ranks.ONE, operators.Ranks.NONE])
def test_all_operators_are_right_on_ranks_of_one_element_or_of_none(over):
    found = list(operators.examine_all(list(operators.entries(DOUBLE)), 4, dtypes=DOUBLE, over=over, strided=0))
    assert {result.name: result.problems for result in found if result.problems} == {}


OTHER_DTYPES = torch.complex128, torch.int64, torch.bool


def test_operators_are_right_for_complex_numbers_and_integers():
    known = operators.entries(OTHER_DTYPES)
    names = (
        "add",
        "conj",
        "cumsum",
        "linalg.vector_norm",
        "matmul",
        "nn.functional.pad.constant",
        "take_along_dim",
        "var",
    )
    found = operators.examine([known[name] for name in names], 1, OTHER_DTYPES, strided=0)
    assert {result.name: result.problems for result in found if result.problems} == {}
    assert {result.name for result in found if result.status is not operators.Status.SHARDED} == set()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_operators_are_right_for_complex_numbers_and_integers():
    names = list(operators.entries(OTHER_DTYPES))
    found = list(operators.examine_all(names, 2, dtypes=OTHER_DTYPES))
    assert sorted(result.name for result in found) == sorted(names)
    assert {result.name: result.problems for result in found if result.problems} == {}


def test_a_wrong_number_and_a_wrong_gradient_are_seen():
    right = [torch.ones(3), None]
    assert operators.difference([torch.ones(3), None], right, False) == ""
    assert operators.difference([torch.ones(3), torch.zeros(3)], right, False) == ""
    assert operators.difference([torch.ones(3) + 1e-3, None], right, False) == "value 0 differs by 0.001, of 2"
    assert operators.difference([torch.ones(3), torch.ones(3)], right, False) == "value 1 is None on one side"
    assert operators.difference([torch.ones(3).double(), None], right, True).startswith("value 0 is torch.float64 [3]")
    assert operators.difference([torch.zeros(3), None], right, True) == ""


def test_shard_of_a_sample_gives_the_same():
    for name, argument in (("sum", "x"), ("stack", "x"), ("bmm", "x")):
        info = operators.entries()[name]
        given = next(iter(info.sample_inputs("cpu", torch.float64, requires_grad=True)))
        sample = operators.sample_of(info, given, "first")
        (expected,) = operators.batch_of([sample]).expected

        def fn(x, *args, op=info.op, **kwargs):
            return op(x, *args, **kwargs)

        inputs = given.input if isinstance(given.input, list | tuple) else [given.input]
        strategies = [("x", *(None,) * (t.dim() - 1)) if t.dim() else () for t in inputs]
        sharded = pw.shard(fn, {argument: strategies if len(inputs) > 1 else strategies[0]}, mesh={"x": 2})
        outputs = [sharded(*sample.args, **sample.kwargs)]
        found = operators.values_of([outputs], [sample.tensors])[0]
        assert operators.difference(found, expected, False) == "", name
        assert "x" in str(sharded.plan)

"""Which of a profile's rates a call has."""

import pytest
import torch
from round_profile import ROUND
from torch import fx

from partway.propagation.cost.cost import kind_of_call, name_of_call, rates_of
from partway.propagation.cost.rates import OperatorRates, Rates

aten = torch.ops.aten
GRAPH = fx.Graph()
A, B, C = (GRAPH.placeholder(name) for name in "abc")


def named(target, *arguments, **shapes):
    node = GRAPH.call_function(target, arguments)
    return name_of_call(node, lambda operand: shapes[operand.name])


def convolution(weight, *, transposed=False, groups=1, plane=(8, 8)):
    return named(
        aten.convolution.default,
        A,
        B,
        None,
        [1, 1],
        [0, 0],
        [1, 1],
        transposed,
        [0, 0],
        groups,
        a=(2, 3, *plane),
        b=weight,
    )


def test_a_convolution_has_the_rates_of_its_kind():
    assert convolution((16, 16, 3, 3)) == "aten.convolution.default"
    assert convolution((16, 16, 1, 1)) == "aten.convolution.default of pixels"
    assert convolution((16, 3, 7, 7)) == "aten.convolution.default of few channels"
    assert convolution((16, 1, 3, 3), groups=16) == "aten.convolution.default in groups"
    assert convolution((16, 16, 2, 2), transposed=True) == "aten.convolution.default transposed"
    backward = named(
        aten.convolution_backward.default, A, B, C, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False],
        a=(2, 16, 8, 8), b=(2, 16, 8, 8), c=(16, 16, 1, 1),
    )  # fmt: skip
    assert backward == "aten.convolution_backward.default of pixels"


@pytest.mark.parametrize(
    ("plane", "where"),
    [
        ((8, 8), ""), ((1, 1), ""), ((4, 4), ""), ((7, 7), " in odd planes"), ((3, 3), " in small planes"),
        ((15, 1), " in small planes"),
    ],
)  # fmt: skip
def test_a_convolution_of_pixels_has_the_rates_of_planes_of_its_size(plane, where):
    assert convolution((16, 16, 1, 1), plane=plane) == f"aten.convolution.default of pixels{where}"
    assert convolution((16, 16, 3, 3), plane=plane) == "aten.convolution.default"


def test_causal_attention_has_rates_of_its_own():
    attend, back = (
        getattr(aten, f"_scaled_dot_product_flash_attention_for_cpu{end}").default for end in ("", "_backward")
    )
    for causal, kind in ((False, ""), (True, " causal")):
        assert named(attend, A, A, A, 0.0, causal) == f"{attend}{kind}"
        assert named(back, A, A, A, A, A, B, 0.0, causal) == f"{back}{kind}"
    assert named(attend, A, A, A) == str(attend)


def test_a_batch_norm_of_one_part_has_the_rates_of_those_of_several():
    norm = named(aten._native_batch_norm_legit_functional.default, A, B, B, C, C, True, 0.1, 1e-5)
    assert norm == "partway.part_norm.default"


@pytest.mark.parametrize(("columns", "odd"), [(64, False), (50257, True), (7, False)])
def test_a_product_whose_rows_begin_anywhere_has_rates_of_its_own(columns, odd):
    for target, arguments in ((aten.mm.default, (A, B)), (aten.addmm.default, (C, A, B))):
        name = named(target, *arguments, a=(4, 8), b=(8, columns), c=(columns,))
        assert name == (f"{target} of odd columns" if odd else str(target))


def test_kinds_of_calls():
    assert kind_of_call(GRAPH.call_function(aten.exp.default, (A,))) == "pointwise"
    assert kind_of_call(GRAPH.call_function(aten.view.default, (A, [4]))) == "view"
    assert kind_of_call(GRAPH.call_function(aten.sort.default, (A,))) == "other"


def test_a_profile_without_rates_has_none_for_a_call():
    node = GRAPH.call_function(aten.exp.default, (A,))
    assert rates_of(node, ROUND) is None
    other = OperatorRates(name="other", forward=Rates.of([1e-6, 0, 0, 0, 0, 0]))
    assert rates_of(node, ROUND.model_copy(update={"operators": (other,)})) == other

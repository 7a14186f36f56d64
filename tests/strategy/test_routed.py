"""Rows of a mixture of experts, placed by token or by expert."""

import pytest

from partway.strategy import BROADCAST, PARTIAL, REPLICATE, Mesh, Shard, StrategyError
from partway.strategy.layout import layout
from partway.strategy.placement import Kind, Routed, converts, dual, kind, placement_from_code, transpose

TOKEN, EXPERT = Routed("token"), Routed("expert")
MESH = Mesh({"dp": 2, "ep": 4})


@pytest.mark.parametrize(
    ("placed", "code"),
    [(TOKEN, "T0"), (EXPERT, "E0"), (Routed("expert", 1, 12), "E1|12"), (Routed("token", None), "T")],
)
def test_a_code_is_read_back(placed, code):
    assert str(placed) == code
    assert placement_from_code(code) == placed


def test_rows_go_to_their_experts_and_their_gradients_back():
    assert kind(TOKEN, EXPERT) is kind(EXPERT, TOKEN) is Kind.ALL_TO_ALLV
    assert transpose(TOKEN, EXPERT) == (EXPERT, TOKEN)
    assert [dual(TOKEN), dual(EXPERT)] == [TOKEN, EXPERT]


def test_no_step_of_a_layout_converts_rows():
    for other in (TOKEN, Shard(0), REPLICATE, BROADCAST, PARTIAL):
        assert not converts(EXPERT, other)
        assert not converts(other, EXPERT)
    with pytest.raises(StrategyError, match="no single step turns E0 into R; convert to R first"):
        kind(EXPERT, REPLICATE)


def test_a_rank_expects_its_share_of_the_rows():
    by_both = layout(MESH, (TOKEN, EXPERT))
    assert by_both.local_shape((64, 5)) == (8, 5)
    assert by_both.local_shape((64, 5), more=3) == (11, 5)
    assert by_both.unsized_dims == (0,)
    assert layout(MESH, (TOKEN, TOKEN)).local_shape((64, 5), more=3) == (8, 5)
    assert layout(MESH, (Routed("token", None), Shard(0))).local_shape((8,)) == (2,)


def test_rows_are_placed_by_token_or_by_expert():
    with pytest.raises(StrategyError, match="takes 'token', 'expert' or 'copy', not 'row'"):
        Routed("row")

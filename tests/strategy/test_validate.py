import pytest
from torch.distributed import tensor as dt

from partway.strategy import (
    Broadcast,
    Layout,
    Mesh,
    Partial,
    Replicate,
    Shard,
    StrategyError,
    check_dataset_form,
    check_dataset_strategy,
    check_strategies,
)

MESH = Mesh({"dp": 2, "tp": 4})
X = "input 'x'"


def problems(strategy: object, shape: tuple[int, ...] = (8, 8), mesh: Mesh = MESH, **options: bool) -> list[str]:
    """The lines of the error that one strategy gets."""
    with pytest.raises(StrategyError) as error:
        check_strategies([(X, shape, strategy)], mesh, **options)
    return [str(problem).removeprefix(X) for problem in error.value.problems]


def test_strategies_become_annotations_in_order_and_none_stays_none():
    found = check_strategies([("x", (8, 8), (2, 4)), ("w", (8, 8), None), ("y", (8,), ("dp",))], MESH)
    assert [None if one is None else str(one) for one in found] == ["(2, 4)", None, "('dp',)"]


def test_all_failures_of_all_tensors_are_in_one_error():
    named = [(X, (1, 255), ("tp", "dq")), ("input 'w'", (1, 8), (4, 4)), ("output 0", (8, 8), (2, 4))]
    with pytest.raises(StrategyError) as error:
        check_strategies(named, MESH)
    assert str(error.value).splitlines() == [
        "4 problems with strategies on the mesh dp=2, tp=4:",
        "  - input 'x': dim 0 has size 1, which axis 'tp' (4) does not divide; use a split of 1, or pad the dim to 4",
        "  - input 'x': dim 1 names the axis 'dq', which the mesh (dp=2, tp=4) lacks; did you mean 'dp'?",
        "  - input 'w': dim 0 has size 1, which its split count 4 (axis 'tp') does not divide; "
        "use a split of 1, or pad the dim to 4",
        "  - input 'w': (4, 4) takes 16 devices, but there are 8; use split counts whose product is at most 8",
    ]
    assert len(error.value.problems) == 4


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        ([2, 4], ": the strategy [2, 4] is a list; write the tuple (2, 4)"),
        ([["dp"], None], ": the strategy [['dp'], None] is a list; write the tuple (('dp',), None)"),
        ("dp", ": the strategy 'dp' is a str, not a tuple; write ('dp',)"),
        (8, ": the strategy 8 is an int, not a tuple; write (8,)"),
        (True, ": the strategy True is a bool, not a tuple; write one entry per dim, such as ('dp', None) or (2, 4)"),
        (
            (2.0, 4),
            ": entry 0 is 2.0, a float; "
            "write an axis name, a tuple of names, an int, None, or placements, one per mesh axis",
        ),
        (
            (True, 4),
            ": entry 0 is True, a bool; "
            "write an axis name, a tuple of names, an int, None, or placements, one per mesh axis",
        ),
    ],
)
def test_a_wrong_type_is_rejected_saying_what_to_write(strategy, message):
    assert problems(strategy) == [message]


def test_strategies_of_several_tensors_given_to_one_are_recognised():
    assert problems(((2, 4), (4, 1))) == [
        ": entry 0 is (2, 4), a tuple; write one strategy for this tensor, such as (2, 4)",
        ": entry 1 is (4, 1), a tuple; write one strategy for this tensor, such as (4, 1)",
    ]


@pytest.mark.parametrize(
    ("strategy", "mixed"),
    [
        (("dp", 2), "axis names and split counts"),
        ((Shard(0), "tp"), "axis names and placements"),
        ((dt.Shard(0), 4), "placements and split counts"),
    ],
)
def test_notations_are_not_mixed(strategy, mixed):
    (message,) = problems(strategy)
    assert f"mixes {mixed}; write axis names or split counts, one per dim, or placements" in message


def test_none_is_no_placement():
    assert problems((Shard(0), None)) == [": (Shard(dim=0), None) has None among placements; write Replicate() instead"]


@pytest.mark.parametrize(
    ("strategy", "shape", "message"),
    [
        (
            (2, 4),
            (8, 8, 8),
            "(2, 4) has 2 entries for a tensor of 3 dims [8, 8, 8]; write one entry per dim, such as (1, 1, 1)",
        ),
        (
            ("dp",),
            (8, 8),
            "('dp',) has 1 entry for a tensor of 2 dims [8, 8]; write one entry per dim, such as (None, None)",
        ),
        ((1,), (), "(1,) has 1 entry for a tensor of 0 dims []; write ()"),
    ],
)
def test_a_wrong_rank_is_rejected_showing_the_shape(strategy, shape, message):
    assert problems(strategy, shape) == [f": {message}"]


def test_counts_are_positive():
    assert problems((0, -4)) == [
        ": dim 0 has size 8 and the split count 0; write an int of 1 or more",
        ": dim 1 has size 8 and the split count -4; write an int of 1 or more",
    ]


def test_counts_take_no_more_devices_than_there_are():
    assert problems((4, 4)) == [
        ": (4, 4) takes 16 devices, but there are 8; use split counts whose product is at most 8"
    ]


def test_the_product_of_counts_divides_the_devices():
    assert problems((3, 1), (9, 8)) == [
        ": (3, 1) takes 3 devices, which does not divide the 8 available; "
        "use split counts whose product is 8, 4, 2 or 1"
    ]


def test_counts_that_no_choice_of_axes_makes_up_are_rejected_with_a_mesh_that_would():
    assert problems((2, 4), mesh=Mesh({"all": 8})) == [
        ": no combination of axes of the mesh (all=8) gives the split counts (2, 4); "
        "use products of axis sizes, or another mesh, such as Mesh({'d0': 2, 'd1': 4})"
    ]


def test_a_count_that_does_not_divide_names_the_axes_only_where_there_is_no_choice():
    (one_way,) = problems((1, 8), (8, 1))
    (three_ways,) = problems((1, 4), (8, 1), Mesh.flat(8))
    assert one_way == (
        ": dim 1 has size 1, which its split count 8 (axes 'dp' and 'tp') does not divide; "
        "use a split of 1, or pad the dim to 8"
    )
    assert three_ways == (
        ": dim 1 has size 1, which its split count 4 does not divide; use a split of 1, or pad the dim to 4"
    )


def test_a_dim_split_by_two_axes_names_both():
    assert problems((("dp", "tp"), None), (1, 8)) == [
        ": dim 0 has size 1, which axes 'dp' (2) and 'tp' (4) do not divide; use a split of 1, or pad the dim to 8"
    ]


@pytest.mark.parametrize("strategy", [("dp", "tp"), (Shard(0), Shard(1)), (dt.Shard(0), dt.Shard(-1))])
def test_a_dim_of_one_element_is_rejected_alike_in_names_and_placements(strategy):
    assert problems(strategy, (8, 1)) == [
        ": dim 1 has size 1, which axis 'tp' (4) does not divide; use a split of 1, or pad the dim to 4"
    ]


@pytest.mark.parametrize("strategy", [("tp", "dp"), (4, 2), (Shard(1), Shard(0)), Layout(MESH, (Shard(1), Shard(0)))])
def test_a_dim_of_one_element_is_whole_in_a_tensor_that_has_other_sizes_in_other_calls(strategy):
    (last,) = check_strategies([(X, (1, 8), strategy)], MESH, varying=[X])
    (full,) = check_strategies([(X, (8, 8), strategy)], MESH, varying=[X])
    assert set(last.layouts((1, 8))) == {Layout(MESH, (Shard(1), Replicate()))}
    assert full.layouts((8, 8)) == (Layout(MESH, (Shard(1), Shard(0))),)


@pytest.mark.parametrize("size", [255, 6, 3, 2])
def test_slices_may_be_short_or_empty(size):
    (found,) = check_strategies([(X, (8, size), ("dp", "tp"))], MESH)
    assert found.layouts((8, size)) == (Layout(MESH, (Shard(0), Shard(1))),)


def test_what_may_become_a_dtensor_is_cut_as_one():
    strategies = [(X, (50257, 8), (("dp", "tp"), None)), ("input 'w'", (50257, 8), (8, 1)), ("y", (9,), (8,))]
    with pytest.raises(StrategyError) as error:
        check_strategies(strategies, MESH, chunked=[X, "input 'w'"])
    text = "dim 0 has size 50257, which axes 'dp' (2) and 'tp' (4) cut into slices other than a DTensor's; "
    fix = "split it over one axis, or pad the dim to 50258"
    assert str(error.value).splitlines()[1:] == [f"  - {X}: {text}{fix}", f"  - input 'w': {text}{fix}"]


def test_an_unknown_axis_is_rejected_with_the_closest_name_or_all_of_them():
    assert problems(("dpp", "model")) == [
        ": dim 0 names the axis 'dpp', which the mesh (dp=2, tp=4) lacks; did you mean 'dp'?",
        ": dim 1 names the axis 'model', which the mesh (dp=2, tp=4) lacks; use 'dp' or 'tp'",
    ]


def test_none_in_quotes_is_recognised():
    (message,) = problems(("dp", "None"))
    assert message.endswith("write None without quotes")


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (("tp", "tp"), ": axis 'tp' splits both dim 0 and dim 1; use each axis at most once per tensor"),
        ((("dp", "dp"), None), ": axis 'dp' splits dim 0 twice; use each axis at most once per tensor"),
    ],
)
def test_an_axis_splits_one_dim_once(strategy, message):
    assert problems(strategy) == [message]


def test_the_axes_of_a_dim_are_in_mesh_order():
    assert problems((("tp", "dp"), None)) == [
        ": dim 0 names the axes ('tp', 'dp'), which are not in the order of the mesh (dp=2, tp=4); "
        "write ('dp', 'tp'), major first"
    ]


def test_there_is_one_placement_for_each_axis():
    assert problems((Shard(0),)) == [
        ": it has 1 placement for the 2 axes of the mesh (dp=2, tp=4); write one placement per mesh axis"
    ]


def test_a_shard_dim_is_one_of_the_tensors():
    assert problems((Shard(2), dt.Shard(-3))) == [
        f", axis '{axis}': Shard(dim={dim}) splits a dim that a tensor of 2 dims does not have; "
        "write a dim of 0 to 1, or Replicate()"
        for axis, dim in (("dp", 2), ("tp", -3))
    ]
    assert problems((Shard(0), Replicate()), ()) == [
        ", axis 'dp': Shard(dim=0) splits a dim that a tensor of 0 dims does not have; write Replicate()"
    ]


@pytest.mark.parametrize("partial", [Partial(), dt.Partial()])
def test_partial_is_not_for_annotations(partial):
    assert problems((Replicate(), partial)) == [
        ", axis 'tp': Partial is a state inside a program, not one of an input, a parameter or an output; "
        "write Shard(dim) or Replicate()"
    ]


def test_broadcast_is_not_for_annotations():
    assert problems((Broadcast(), Shard(0))) == [
        ", axis 'dp': Broadcast says how a value is used, which Partway works out by itself; write Replicate()"
    ]


def test_a_layout_on_another_mesh_is_rejected():
    assert problems(Layout.replicated(Mesh({"a": 8}))) == [
        ": the layout [a:R] is on the mesh (a=8), not (dp=2, tp=4); use one mesh"
    ]


@pytest.mark.parametrize("strategy", [(2, 4), (1, 1), (8, 1), ("dp", None), (Shard(0), Replicate())])
def test_fully_use_devices_takes_counts_for_all_devices_or_one_and_the_other_notations_as_they_are(strategy):
    assert len(check_strategies([(X, (8, 8), strategy)], MESH, fully_use_devices=True)) == 1


def test_fully_use_devices_rejects_counts_that_leave_devices_idle():
    assert problems((2, 1), fully_use_devices=True) == [
        ": (2, 1) uses 2 of 8 devices, while fully_use_devices is True; "
        "use split counts whose product is 8 or 1, or set fully_use_devices=False"
    ]
    assert len(check_strategies([(X, (8, 8), (2, 1))], MESH)) == 1


SHAPES = ((16, 3, 64, 64), (16,))


def dataset(value: object, shapes: object = SHAPES, mode: str = "semi_auto_parallel") -> object:
    return check_dataset_strategy(value, shapes, 8, mode=mode)  # type: ignore[arg-type]


def dataset_problems(value: object, shapes: object = SHAPES, mode: str = "semi_auto_parallel") -> list[str]:
    with pytest.raises(StrategyError, match="dataset_strategy cannot be met:") as error:
        dataset(value, shapes, mode)
    return [str(problem).removeprefix("dataset_strategy") for problem in error.value.problems]


# The examples of the reference's page on dataset slicing, which writes ((1, 1, 1, 8), (1,)) in two pairs of redundant
# parentheses too: the same tuple.
@pytest.mark.parametrize(
    "value",
    [((1, 1, 1, 8), (8,)), (((1, 1, 1, 8), (1,))), ((1, 1, 1, 1), (1,))],
)
@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
def test_the_dataset_strategies_that_the_reference_supports_are_taken(value, mode):
    assert dataset(value, mode=mode) == value
    check_dataset_form(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            ((1, 1, 4, 2), (1,)),
            ", input 0: (1, 1, 4, 2) splits 2 dims (2, 3); split at most one dim of an input",
        ),
        (
            ((1, 1, 1, 1), (8,)),
            ", input 1: (8,) splits it 8 ways, more than input 0, the one of highest rank, which (1, 1, 1, 1) "
            "splits 1 way; split input 0 8 ways, or this one at most 1 way",
        ),
    ],
)
def test_the_dataset_strategies_that_the_reference_excludes_are_rejected(value, message):
    assert dataset_problems(value) == [message]
    with pytest.raises(StrategyError) as error:
        check_dataset_form(value)
    assert [str(problem) for problem in error.value.problems] == [f"dataset_strategy{message}"]


def test_other_inputs_may_be_split_less_than_the_one_of_highest_rank():
    assert dataset(((8, 1, 1, 1), (4,))) == ((8, 1, 1, 1), (4,))


def test_of_several_inputs_of_highest_rank_the_first_has_the_largest_count():
    shapes = ((8,), (8, 8), (8, 8))
    assert dataset(((1,), (4, 1), (2, 1)), shapes) == ((1,), (4, 1), (2, 1))
    assert dataset_problems(((1,), (2, 1), (4, 1)), shapes) == [
        ", input 2: (4, 1) splits it 4 ways, more than input 1, the one of highest rank, which (2, 1) splits 2 ways; "
        "split input 1 4 ways, or this one at most 2 ways"
    ]


def test_full_batch_leaves_every_input_whole():
    assert dataset("full_batch", ((7, 3), (), (5,))) == ((1, 1), (), (1,))


def test_data_parallel_splits_the_first_dim_of_every_input_that_has_one():
    assert dataset("data_parallel", ((16, 3), (), (8,))) == ((8, 1), (), (8,))


def test_a_batch_may_have_fewer_samples_than_there_are_devices():
    assert dataset("data_parallel", ((6, 3), (10,), (1,))) == ((8, 1), (8,), (8,))


def test_no_dataset_strategy_is_none_in_every_mode():
    assert dataset(None, mode="stand_alone") is None


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel", "hybrid_parallel"])
def test_inputs_are_sliced_only_in_the_automatic_modes(mode):
    assert dataset_problems("full_batch", mode=mode) == [
        f": the parallel mode is '{mode}', in which inputs are not sliced; "
        "set parallel_mode to 'semi_auto_parallel' or 'auto_parallel', or leave dataset_strategy out"
    ]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            "full",
            ": 'full' is unknown; "
            "write 'data_parallel' or 'full_batch', or a tuple with a tuple of split counts for each input",
        ),
        (
            8,
            ": 8 is an int; "
            "write 'data_parallel' or 'full_batch', or a tuple with a tuple of split counts for each input",
        ),
        ([[1, 1, 1, 8], [1]], ": [[1, 1, 1, 8], [1]] is a list; write the tuple ((1, 1, 1, 8), (1,))"),
        (((1, 1, 1, 8), [1]), ", input 1: [1] is a list, not a tuple of split counts; write (1,)"),
        (
            ((1, 1, 1, 8), "dp"),
            ", input 1: 'dp' is a str, not a tuple of split counts; write one such as (1, 1, 1, 8)",
        ),
        (
            (1, 1, 1, 8),
            ": (1, 1, 1, 8) is the strategy of one input; write a tuple for each input, as in ((1, 1, 1, 8),)",
        ),
        (((1, 1, 1, 8.0), (1,)), ", input 0: dim 3 has 8.0 as its split count; write an int of 1 or more"),
        (((1, 1, 1, 8), (True,)), ", input 1: dim 0 has True as its split count; write an int of 1 or more"),
        (((1, 1, 1, 8), (0,)), ", input 1: dim 0 has 0 as its split count; write an int of 1 or more"),
    ],
)
def test_a_wrong_type_of_dataset_strategy_is_rejected_with_and_without_shapes(value, message):
    assert dataset_problems(value) == [message]
    with pytest.raises(StrategyError) as error:
        check_dataset_form(value)
    assert [str(problem) for problem in error.value.problems] == [f"dataset_strategy{message}"]


def test_all_failures_of_a_dataset_strategy_are_in_one_error():
    assert dataset_problems(((1, 16), (5,), (1,)), ((16, 3, 64), (16,)), "stand_alone") == [
        ": the parallel mode is 'stand_alone', in which inputs are not sliced; "
        "set parallel_mode to 'semi_auto_parallel' or 'auto_parallel', or leave dataset_strategy out",
        ": it has 3 entries for 2 inputs; write one tuple of split counts for each input",
        ", input 0: (1, 16) has 2 entries for a tensor of 3 dims [16, 3, 64]; write one entry per dim, such as "
        "(1, 1, 1)",
        ", input 0: (1, 16) takes 16 devices, but there are 8; use split counts whose product is at most 8",
        ", input 1: (5,) takes 5 devices, which does not divide the 8 available; "
        "use split counts whose product is 8, 4, 2 or 1",
    ]

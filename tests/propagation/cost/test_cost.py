"""What things are predicted to cost, by hand-worked examples and by what was measured on H100s."""

import json

import pytest
import torch
import torch.nn.functional as F

from partway.propagation.cost.cost import (
    WEIGHTS,
    Level,
    collective_cost,
    collective_seconds,
    operator_seconds,
    ranks_by_level,
    steps,
    wire_bytes,
)
from partway.propagation.cost.profile import DeviceProfile, presets, profile_of
from partway.propagation.ops.kinds import COLLECTIVES, figures_of
from partway.strategy import Mesh, StrategyError
from partway.strategy.placement import Kind

LOCAL = [Kind.SLICE, Kind.PAD, Kind.KEEP, Kind.NOTHING]
FLAT = {"name": "flat", "source": "a test", "devices": None, "bandwidth": 1e9, "latency": 1e-6, "launch": 1e-5}
NODE = {"name": "node", "source": "a test", "devices": 8, "bandwidth": 1e11, "latency": 2e-6, "launch": 5e-6}
DATA = {
    "name": "round",
    "peak": {"float64": 5e11, "float32": 1e12, "bfloat16": 4e12, "float16": 2e12},
    "memory": 1e10,
    "memory_bandwidth": 1e11,
    "overhead": 0,
    "sources": {"peak": "a test", "memory": "a test", "overhead": "a test"},
    "levels": [FLAT],
}


def profile_with(**changes):
    return DeviceProfile.model_validate_json(json.dumps({**DATA, **changes}))


ROUND = profile_with()
NODES = profile_with(levels=[NODE, FLAT])


def cost(kind, sizes, profile, *axes):
    """The cost over the given axes, by number; of all axes by default."""
    mesh = Mesh.of_sizes(sizes)
    return collective_cost(kind, mesh, tuple(mesh.axes[axis] for axis in axes or range(len(sizes))), profile)


# -- One level -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "wire", "messages"),
    [
        (Kind.ALL_REDUCE, 1500, 6),
        (Kind.ALL_GATHER, 750, 3),
        (Kind.REDUCE_SCATTER, 750, 3),
        (Kind.ALL_TO_ALL, 750, 3),
    ],
)
def test_a_ring_of_4_ranks(kind, wire, messages):
    assert wire_bytes(kind, 1000, 4) == wire
    assert steps(kind, 4) == messages
    assert cost(kind, (4,), ROUND) == pytest.approx((1e-5 + messages * 1e-6, wire * 1e-12))
    seconds = collective_seconds(kind, 1000, Mesh({"x": 4}), ("x",), ROUND)
    assert seconds == pytest.approx(1e-5 + messages * 1e-6 + wire * 1e-9)


@pytest.mark.parametrize("kind", LOCAL)
def test_what_needs_no_other_rank_sends_nothing(kind):
    assert wire_bytes(kind, 1000, 4) == steps(kind, 4) == 0
    assert cost(kind, (4,), ROUND) == (0, 0)


def test_an_all_reduce_costs_a_reduce_scatter_and_an_all_gather():
    for size in (2, 3, 8):
        both = wire_bytes(Kind.REDUCE_SCATTER, 960, size) + wire_bytes(Kind.ALL_GATHER, 960, size)
        assert wire_bytes(Kind.ALL_REDUCE, 960, size) == pytest.approx(both)
        assert steps(Kind.ALL_REDUCE, size) == 2 * steps(Kind.ALL_GATHER, size)


def test_an_exchange_is_one_message_of_what_the_busiest_rank_sends_at_the_pace_of_an_all_to_all():
    assert wire_bytes(Kind.EXCHANGE, 960, 8) == 960
    assert steps(Kind.EXCHANGE, 8) == 1
    (waiting, per_byte), (longer, byte) = (cost(kind, (8,), ROUND) for kind in (Kind.EXCHANGE, Kind.ALL_TO_ALL))
    assert per_byte == pytest.approx(byte * 8 / 7)
    assert waiting < longer


@pytest.mark.parametrize("kind", sorted(set(COLLECTIVES) - {Kind.EXCHANGE}))
def test_an_axis_of_one_rank_costs_nothing(kind):
    assert wire_bytes(kind, 1000, 1) == steps(kind, 1) == 0
    assert cost(kind, (1,), ROUND) == cost(kind, (1, 8), NODES, 0) == (0, 0)


# -- Several levels --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "axes", "devices", "by_level"),
    [
        ((32, 8), (1,), (8, None), (8, 1)),  # inside the node
        ((32, 8), (0,), (8, None), (1, 32)),  # each rank of a node with its like in the other nodes
        ((32, 8), (0, 1), (8, None), (8, 32)),
        ((32, 8), (1, 0), (8, None), (8, 32)),
        ((16,), (0,), (8, None), (8, 2)),
        ((4, 4), (0,), (8, None), (2, 2)),
        ((2, 2, 2), (0, 2), (4, 8, None), (2, 2, 1)),
        ((8, 4), (0, 1), (4, 8, None), (4, 2, 4)),
        ((7,), (0,), (8, None), (7, 1)),
        ((2, 3), (0,), (8, None), (2, 1)),
        ((3, 8), (0,), (8, None), (1, 3)),
        ((3, 3), (1,), (8, None), (1, 3)),  # the ranks 6, 7 | 8
        ((2, 6), (1,), (8, None), (1, 6)),
        ((12,), (0,), (8, None), (1, 12)),
        ((7, 2), (0,), (8, None), (1, 7)),
        ((4, 6), (1,), (4, 8, None), (1, 1, 6)),
        ((4, 12), (1,), (4, 12, None), (4, 3, 1)),
        ((2, 12), (1,), (4, 8, None), (4, 1, 3)),  # fours are whole; their pairs are not
    ],
)
def test_which_ranks_of_a_group_each_level_joins(sizes, axes, devices, by_level):
    mesh = Mesh.of_sizes(sizes)
    assert ranks_by_level(mesh, tuple(mesh.axes[axis] for axis in axes), devices) == by_level


def test_a_group_inside_a_node_uses_the_node():
    assert cost(Kind.ALL_GATHER, (32, 8), NODES, 1) == pytest.approx((5e-6 + 7 * 2e-6, 7 / 8 / 1e11))


def test_a_group_across_nodes_uses_the_network_whoever_else_does():
    assert cost(Kind.ALL_REDUCE, (32, 8), NODES, 0) == pytest.approx((1e-5 + 62 * 1e-6, 2 * 31 / 32 / 1e9))


@pytest.mark.parametrize(
    ("kind", "passes", "share"),
    [
        (Kind.ALL_REDUCE, 2, 1 / 8),
        (Kind.ALL_GATHER, 1, 1 / 8),
        (Kind.REDUCE_SCATTER, 1, 1 / 8),
        (Kind.ALL_TO_ALL, 1, 1),
    ],
)
def test_a_group_of_whole_nodes_crosses_with_its_share_of_the_bytes(kind, passes, share):
    waiting = 1e-5 + passes * (7 * 2e-6 + 31 * 1e-6)  # one launch, and the steps of both levels
    across = passes * share * 31 / 32 / 1e9
    assert cost(kind, (32, 8), NODES) == pytest.approx((waiting, across))


def test_the_busiest_level_sets_the_pace():
    slow_node = profile_with(levels=[{**NODE, "bandwidth": 5e9}, FLAT])
    inside, across = 7 / 8 / 5e9, 1 / 8 * 1 / 2 / 1e9
    assert inside > across
    assert cost(Kind.ALL_GATHER, (2, 8), slow_node)[1] == pytest.approx(inside)


def test_a_group_that_does_not_fill_its_nodes_is_a_ring_over_the_network():
    assert cost(Kind.ALL_REDUCE, (12,), NODES) == pytest.approx(cost(Kind.ALL_REDUCE, (12,), ROUND))


def test_a_table_is_read_by_size_as_what_each_rank_sends():
    table = {"2": 2e9, "8": 4e9}
    level = {**FLAT, "bandwidth": dict.fromkeys(sorted(k.value for k in COLLECTIVES if figures_of(k) is k), table)}
    rates = profile_with(levels=[level])

    def sent(n):
        return wire_bytes(Kind.ALL_GATHER, 1, n) / cost(Kind.ALL_GATHER, (n,), rates)[1]

    assert cost(Kind.ALL_GATHER, (2,), rates)[1] == pytest.approx(1 / 2e9)
    assert cost(Kind.ALL_GATHER, (8,), rates)[1] == pytest.approx(1 / 4e9)
    assert sent(2) == pytest.approx(1e9)
    assert sent(8) == sent(64) == pytest.approx(3.5e9)  # beyond the table as at its end
    assert sent(4) == pytest.approx(1e9 + 2.5e9 / 2)  # half way by the logarithm


def test_a_mesh_that_the_network_cannot_hold_is_an_error_with_the_way_out():
    one_node = profile_with(levels=[NODE])
    assert cost(Kind.ALL_GATHER, (8,), one_node)[0] > 0
    with pytest.raises(StrategyError) as error:
        cost(Kind.ALL_GATHER, (2, 8), one_node, 1)
    assert str(error.value) == (
        "the mesh d0=2, d1=8 has 16 devices, and the network of device profile 'round' joins 8 (levels[0], node); use "
        "a mesh of at most 8, or a profile with one more level"
    )


def test_an_axis_that_the_mesh_lacks_is_an_error():
    with pytest.raises(StrategyError, match="the mesh has no axis 'tp'; its axes are x=4"):
        collective_cost(Kind.ALL_GATHER, Mesh({"x": 4}), ("tp",), ROUND)


MEASURED = [  # kind, nodes, devices of a node, GB/s of payload, microseconds
    (Kind.ALL_GATHER, 1, 2, 537, 8),
    (Kind.ALL_GATHER, 1, 4, 434, 17),
    (Kind.ALL_GATHER, 1, 8, 394, 30),
    (Kind.REDUCE_SCATTER, 1, 8, 394, 30),
    (Kind.ALL_REDUCE, 1, 2, 324, 10),
    (Kind.ALL_REDUCE, 1, 4, 236, 15),
    (Kind.ALL_REDUCE, 1, 8, 267, 31),
    (Kind.ALL_REDUCE, 2, 8, 267, 53),
    (Kind.ALL_REDUCE, 8, 8, 160, 109),
    (Kind.ALL_GATHER, 2, 8, 410, 70),
]


@pytest.mark.parametrize(("kind", "nodes", "devices", "rate", "wait"), MEASURED)
def test_the_h100_preset_predicts_what_was_measured(kind, nodes, devices, rate, wait):
    waiting, per_byte = cost(kind, (nodes, devices), profile_of("h100"))
    assert 1e-9 / per_byte == pytest.approx(rate, rel=0.05)
    assert waiting * 1e6 == pytest.approx(wait, rel=0.31)


# -- Operators -------------------------------------------------------------------------------------------------------


def test_an_operator_is_bound_by_its_operations_or_by_its_memory():
    assert operator_seconds(1e12, 1e9, torch.float32, ROUND) == 1.0
    assert operator_seconds(1e9, 1e11, torch.float32, ROUND) == 1.0
    assert operator_seconds(0, 0, torch.float32, ROUND) == 0


@pytest.mark.parametrize(
    ("dtype", "peak"),
    [
        (torch.float64, 5e11),
        (torch.complex128, 5e11),
        (torch.float32, 1e12),
        (torch.complex64, 1e12),
        (torch.int64, 1e12),
        (torch.bool, 1e12),
        (torch.bfloat16, 4e12),
        (torch.float16, 2e12),
    ],
)
def test_the_peak_is_that_of_the_dtype(dtype, peak):
    assert operator_seconds(1e12, 0, dtype, ROUND) == 1e12 / peak


def test_an_even_split_never_looks_worse_than_the_whole_however_large_the_overhead():
    heavy = profile_with(overhead=7e-6)
    for flops, moved in ((1e3, 1e2), (1e9, 1e3), (1e3, 1e9)):
        whole, half = (operator_seconds(flops / n, moved / n, torch.float32, heavy) for n in (1, 2))
        assert half < whole
        assert whole - half == pytest.approx(operator_seconds(flops / 2, moved / 2, torch.float32, ROUND))


def test_levels_weigh_what_they_are_named_for():
    assert WEIGHTS[Level(0)].wire > WEIGHTS[Level(0)].compute
    assert WEIGHTS[Level(1)].memory > WEIGHTS[Level(1)].wire
    assert WEIGHTS[Level(2)].wire == WEIGHTS[Level(2)].compute == WEIGHTS[Level(2)].latency == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_split_contraction_takes_its_share_of_the_time_and_a_replicated_one_all_of_it(lab, dtype):
    x, w = (torch.empty(512, 512, requires_grad=True, dtype=dtype) for _ in range(2))
    problem = lab.problem_of(F.linear, (x, w), lab.SQUARE)
    (at,) = lab.vertices_of(problem, torch.ops.aten.linear.default)
    vertex = problem.vertices[at]
    whole = 3 * 2 * 512**3 / profile_of("cpu").peak.of(dtype)  # forward, and a gradient for each operand
    for option, seconds in zip(vertex.options, vertex.seconds, strict=True):
        split = 2 ** sum(factor is not None for factor in option.factors)
        assert seconds == pytest.approx(whole / split)


def test_views_are_free(lab):

    x = torch.empty(8, 8, requires_grad=True)
    problem = lab.problem_of(lambda x: x.t().exp(), (x,), lab.LINE)
    (at,) = lab.vertices_of(problem, torch.ops.aten.t.default)
    assert not problem.vertices[at].seconds.any()
    assert not problem.vertices[at].held.any()


# -- Profiles --------------------------------------------------------------------------------------------------------


def test_these_are_the_presets():
    assert presets() == ("a100", "ascend910", "cpu", "h100", "h200")
    assert [profile_of(name).name for name in presets()] == list(presets())
    assert profile_of("cuda") is profile_of("h100")


@pytest.mark.parametrize("name", ["a100", "ascend910", "cpu", "h100", "h200"])
def test_every_figure_of_a_preset_has_a_source(name):
    profile = profile_of(name)
    sources = [profile.sources.peak, profile.sources.memory, profile.sources.overhead]
    assert all(len(text) > 20 for text in [*sources, *(level.source for level in profile.levels)])


def test_a_profile_is_read_from_a_file_and_written_to_one(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps(DATA))
    assert profile_of(str(tmp_path / "mine.json")) == ROUND
    for name in presets():
        profile_of(name).save(tmp_path / "saved.json")
        assert profile_of(tmp_path / "saved.json") == profile_of(name)
        assert hash(profile_of(tmp_path / "saved.json")) == hash(profile_of(name))


def test_a_profile_that_cannot_be_written_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StrategyError, match=r"could not write the device profile to '.*file/x\.json': File exists"):
        ROUND.save(tmp_path / "file" / "x.json")


def test_an_unknown_profile_names_the_presets():
    with pytest.raises(StrategyError) as error:
        profile_of("tpu")
    assert str(error.value) == (
        "no device profile 'tpu': there is no such file, and the presets are a100, ascend910, cpu, h100, h200; write "
        "one of them or the path of a file that `partway calibrate` wrote"
    )


def without(mapping, key):
    return {k: v for k, v in mapping.items() if k != key}


EACH = dict.fromkeys(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"], 1e9)
WRONG = [
    (without(DATA, "memory"), "memory: is missing; write a finite number above 0 (bytes)"),
    ({**DATA, "memory": -1}, "memory: is -1; write a finite number above 0 (bytes)"),
    ({**DATA, "memory": "80 GB"}, "memory: is '80 GB'; write a finite number above 0 (bytes)"),
    ({**DATA, "memory_bandwidth": 0}, "memory_bandwidth: is 0; write a finite number above 0 (bytes/s)"),
    ({**DATA, "memory_bandwidth": float("nan")}, "memory_bandwidth: is nan; write a finite number above 0 (bytes/s)"),
    ({**DATA, "overhead": -1e-6}, "overhead: is -1e-06; write a finite number of 0 or more (s)"),
    (
        {**DATA, "peak": without(DATA["peak"], "float16")},
        "peak.float16: is missing; write a finite number above 0 (operations/s)",
    ),
    (
        {**DATA, "peak": {**DATA["peak"], "float32": float("inf")}},
        "peak.float32: is inf; write a finite number above 0 (operations/s)",
    ),
    (
        {**DATA, "sources": {"peak": "", "memory": "x", "overhead": "x"}},
        "sources.peak: is ''; write a text that says where the figures come from",
    ),
    (
        {**DATA, "flops": 1},
        "flops: is not a field; remove it: what is read is an object with name, peak, memory, memory_bandwidth, "
        "overhead, sources, levels",
    ),
    ({**DATA, "levels": []}, "levels: is []; write a list of one level or more, from inside out"),
    (
        {**DATA, "levels": [FLAT, NODE]},
        "levels[0].devices: is null; write null in the last level only",
    ),
    (
        {**DATA, "levels": [NODE, {**FLAT, "devices": 4}]},
        "levels[1].devices: is 4; write levels from inside out, each with a multiple of the devices before (8); null "
        "in the last",
    ),
    ({**DATA, "levels": [NODE, {**FLAT, "devices": 12}]}, "levels[1].devices: is 12; write levels from inside out"),
    ({**DATA, "levels": [NODE, NODE]}, "levels[1].devices: is 8; write levels from inside out"),
    (
        {**DATA, "levels": [{**FLAT, "devices": 0}]},
        "levels[0].devices: is 0; write an int of 1 or more, or null for any number",
    ),
    (
        {**DATA, "levels": [{**FLAT, "latency": -1}]},
        "levels[0].latency: is -1; write a finite number of 0 or more (s)",
    ),
    (
        {**DATA, "levels": [{**FLAT, "bandwidth": 0}]},
        "levels[0].bandwidth: is 0; write a finite number above 0 (bytes/s), or for one kind of collective a table of "
        'algorithm bandwidths by group size, as in {"2": 3e11, "8": 2.5e11}',
    ),
    (
        {**DATA, "levels": [{**FLAT, "bandwidth": without(EACH, "all_to_all")}]},
        "levels[0].bandwidth.all_to_all: is missing; write one number for all, or one for each of all_reduce, "
        "all_gather, reduce_scatter, all_to_all",
    ),
    (
        {**DATA, "levels": [{**FLAT, "bandwidth": {**EACH, "broadcast": 1}}]},
        "levels[0].bandwidth.broadcast: is not a kind of collective; write one number for all",
    ),
    (
        {**DATA, "levels": [{**FLAT, "bandwidth": {**EACH, "all_gather": {"1": 1e9}}}]},
        "levels[0].bandwidth.all_gather.1: is not a group size; write a table of algorithm bandwidths by group size",
    ),
    (
        {**DATA, "levels": [{**FLAT, "bandwidth": {**EACH, "all_gather": {"2": -1}}}]},
        "levels[0].bandwidth.all_gather.2: is -1; write a finite number above 0 (bytes/s)",
    ),
    ([], "the file: is []; write an object with name, peak, memory"),
]


@pytest.mark.parametrize(("data", "says"), WRONG, ids=lambda value: value[:40] if isinstance(value, str) else "")
def test_a_wrong_profile_names_the_file_the_field_and_what_it_accepts(tmp_path, data, says):
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    with pytest.raises(StrategyError) as error:
        profile_of(path)
    first, second = str(error.value).splitlines()
    assert first == f"{str(path)!r} is not a device profile:"
    assert second.startswith(f"  - {says}")


def test_all_that_is_wrong_is_said_at_once(tmp_path):
    (tmp_path / "mine.json").write_text(json.dumps({**without(DATA, "memory"), "overhead": -1}))
    with pytest.raises(StrategyError) as error:
        profile_of(tmp_path / "mine.json")
    assert len(str(error.value).splitlines()) == 3


def test_a_file_that_is_no_json_says_so(tmp_path):
    (tmp_path / "mine.json").write_text("{")
    with pytest.raises(StrategyError, match="the file: is not JSON; write an object with name, peak, memory"):
        profile_of(tmp_path / "mine.json")

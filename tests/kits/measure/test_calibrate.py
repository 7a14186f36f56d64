"""`partway calibrate`: what it fits, what it writes, and what it refuses."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from no_networks import no_probes
from scripts import free_port, run_script
from typer.testing import CliRunner

import partway as pw
from partway.commands.cli import app
from partway.measure import calibrate as module
from partway.measure.calibrate import calibrate, completed, ranks_on_hosts
from partway.measure.collectives import (
    CALLS,
    KINDS,
    Fit,
    InARow,
    Overlap,
    Sample,
    fit,
    group_sizes,
    groups_of,
    groups_on,
    over_ranks,
    together,
)
from partway.propagation.cost.cost import collective_seconds, costs_over, steps
from partway.propagation.cost.profile import ALONE, DeviceProfile, Together, profile_of
from partway.strategy import Mesh, RuntimeStateError, StrategyError
from partway.strategy.placement import Kind

LATENCY = {Kind.ALL_REDUCE: 2e-5, Kind.ALL_GATHER: 3e-5, Kind.REDUCE_SCATTER: 4e-5, Kind.ALL_TO_ALL: 1e-5}
RATE = {2: 2e9, 4: 1e9}
PAYLOADS = (1 << 10, 1 << 15, 1 << 20, 1 << 24)


def sample(kind: Kind, size: int, payload: int) -> Sample:
    """What a machine takes whose launch is 50 us."""
    return Sample(kind, (size,), payload, 5e-5 + steps(kind, size) * LATENCY[kind] + payload / RATE[size])


def samples(*sizes: int) -> list[Sample]:
    return [sample(kind, size, payload) for kind in KINDS for size in sizes for payload in PAYLOADS]


def test_every_kind_with_figures_of_its_own_can_be_measured() -> None:
    assert set(CALLS) == set(KINDS)


def priced(**mesh: int) -> DeviceProfile:
    """The profile that a plan on `mesh` is priced by."""
    return pw.compile(torch.relu, (torch.empty(8, 8),), mesh=mesh or {"x": 2}).problem.settings.profile


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cases so small that a calibration is a matter of starting processes."""
    effort = module.Effort((1 << 10, 1 << 18), repeats=2, copied=1 << 16, product=1e-5, probes=no_probes)
    monkeypatch.setattr(module, "QUICK", effort)


def command(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["calibrate", *arguments])
    return result.exit_code, result.output


# -- The fit ---------------------------------------------------------------------------------------------------------


def test_the_fit_finds_the_figures_that_the_times_were_made_of() -> None:
    found = fit(samples(2, 4))
    assert found.launch == pytest.approx(5e-5)
    assert found.latency == pytest.approx(LATENCY)
    assert found.bandwidth == pytest.approx({(kind, n): rate for kind in KINDS for n, rate in RATE.items()})


def test_with_one_group_size_the_times_come_out_right() -> None:
    measured = samples(2)
    found = fit(measured)
    costs = costs_over([found.level("here", "a test", None)], (2,))
    for s in measured:
        waiting, per_byte = costs[s.kind]
        assert waiting + per_byte * s.payload == pytest.approx(s.seconds)
    assert found.launch > 0
    assert min(found.latency.values()) > 0


def test_a_fit_is_never_negative() -> None:
    measured = [Sample(Kind.ALL_GATHER, (2,), payload, payload * 1e-9 - 1e-7) for payload in PAYLOADS]
    found = fit(measured)
    assert found.launch == 0
    assert found.latency == {Kind.ALL_GATHER: 0}
    assert found.bandwidth[Kind.ALL_GATHER, 2] == pytest.approx(1e9, rel=0.1)


def test_a_link_that_bursts_has_the_bandwidth_of_large_payloads() -> None:
    """256 KB pass at once, as through a token bucket."""
    rate, burst = 62.5e6, 1 << 18
    payloads = [1 << 10, 1 << 15, 1 << 20, 1 << 22, 1 << 24]
    measured = [Sample(Kind.ALL_GATHER, (2,), payload, 1e-3 + max(payload - burst, 0) / rate) for payload in payloads]
    assert fit(measured).bandwidth[Kind.ALL_GATHER, 2] == pytest.approx(rate, rel=0.05)


def test_where_more_bytes_take_no_longer_the_largest_payload_gives_the_bandwidth() -> None:
    measured = [Sample(Kind.ALL_GATHER, (2,), payload, 1e-3 - payload * 1e-12) for payload in PAYLOADS]
    assert fit(measured).bandwidth == {(Kind.ALL_GATHER, 2): PAYLOADS[-1] / measured[-1].seconds}


@pytest.mark.parametrize(("processes", "sizes"), [(1, ()), (2, (2,)), (3, (2, 3)), (4, (2, 4)), (6, (2, 4, 6))])
def test_the_groups_are_the_powers_of_two_and_the_whole(processes: int, sizes: tuple[int, ...]) -> None:
    assert group_sizes(processes) == sizes


def test_the_groups_of_a_size_are_those_along_the_axes_of_a_mesh() -> None:
    assert groups_of(2, 4) == (((0, 1), (2, 3)), ((0, 2), (1, 3)))
    assert groups_of(4, 4) == (((0, 1, 2, 3),),)
    assert groups_of(2, 3) == (((0, 1),),)  # the third is in none
    assert groups_of(3, 6) == (((0, 1, 2), (3, 4, 5)), ((0, 2, 4), (1, 3, 5)))


def test_a_collective_takes_what_its_ranks_take_on_average() -> None:
    first, last = Sample(Kind.ALL_GATHER, (2,), 1024, 3e-3), Sample(Kind.ALL_GATHER, (2,), 1024, 2e-3)
    other = Sample(Kind.ALL_REDUCE, (2,), 1024, 5e-3)
    assert over_ranks([[first, other], [last]]) == (Sample(Kind.ALL_GATHER, (2,), 1024, 2.5e-3), other)


def test_a_rank_whose_link_is_slower_sets_the_time_of_its_kind_of_groups() -> None:
    def of_rank(small: float, large: float) -> list[Sample]:
        pairs = [Sample(Kind.ALL_GATHER, (2,), n, seconds) for n, seconds in ((1024, small), (2**20, large))]
        return [*pairs, Sample(Kind.ALL_GATHER, (4,), 2**20, 9e-3)]

    pair, slow = [of_rank(1e-3, 4e-3)] * 3, of_rank(1.5e-3, 8e-3)
    assert [s.seconds for s in over_ranks([*pair, slow])] == [1.5e-3, 8e-3, 9e-3]
    late = of_rank(3e-3, 5e-3)  # computes longer, now and then
    assert [s.seconds for s in over_ranks([*pair, late])] == pytest.approx([1.5e-3, 4.25e-3, 9e-3])


def test_what_runs_together_is_slowed_down_by_as_much_as_was_lost() -> None:
    measured = [Overlap(communicating=2.0, communicating_alone=1.0, computing=6.5, computing_alone=6.0)] * 3
    disturbed = Overlap(communicating=50.0, communicating_alone=1.0, computing=60.0, computing_alone=6.0)
    assert together([*measured, disturbed]) == Together(computing=0.75, communicating=0.5)
    faster = Overlap(communicating=0.9, communicating_alone=1.0, computing=5.0, computing_alone=6.0)
    assert together([faster]) == ALONE
    outlasted = Overlap(communicating=7.0, communicating_alone=1.0, computing=6.5, computing_alone=6.0)
    assert together([outlasted]) == ALONE  # what the collective took after the operators, nobody knows
    assert together([]) == ALONE


def test_what_a_collective_waits_that_has_queued_is_told_by_the_means() -> None:
    rows = [InARow(alone=3.0, queued=1.0), InARow(alone=1.0, queued=0.0)]
    assert together([], rows) == Together(computing=1.0, communicating=1.0, queued=0.25)
    assert together([], [InARow(alone=1.0, queued=1.5)]) == ALONE  # noise


# -- Several hosts ---------------------------------------------------------------------------------------------------

INSIDE = Fit(2e-5, dict.fromkeys(KINDS, 1e-5), dict.fromkeys([(kind, 2) for kind in KINDS], 4e9))
BETWEEN = Fit(9e-5, LATENCY, {(kind, n): rate / 8 for kind in KINDS for n, rate in RATE.items()})


def on_hosts(*sizes: tuple[int, int], between: Fit = BETWEEN) -> list[Sample]:
    """What hosts of these figures take."""
    levels = [INSIDE.level("inside", "a test", 2), between.level("between", "a test", None)]
    costs = {each: costs_over(levels, each) for each in sizes}
    return [
        Sample(kind, each, payload, costs[each][kind][0] + payload * costs[each][kind][1])
        for kind in KINDS for each in sizes for payload in PAYLOADS
    ]  # fmt: skip


def test_groups_lie_inside_a_host_or_have_one_rank_on_each_or_are_all_ranks() -> None:
    assert dict(groups_on(2, 2)) == {
        (2, 1): (((0, 1), (2, 3)),), (1, 2): (((0, 2), (1, 3)),), (2, 2): (((0, 1, 2, 3),),),
    }  # fmt: skip
    assert dict(groups_on(2, 4))[2, 1] == (
        ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2), (1, 3), (4, 6), (5, 7)),
    )  # fmt: skip
    assert dict(groups_on(4, 2))[1, 2] == (
        ((0, 2), (1, 3), (4, 6), (5, 7)), ((0, 4), (1, 5), (2, 6), (3, 7)),
    )  # fmt: skip
    assert [sizes for sizes, _ in groups_on(4, 2)] == [(2, 1), (1, 2), (1, 4), (2, 4)]


@pytest.mark.parametrize(("hosts", "each"), [(1, 4), (4, 1)])
def test_one_host_and_hosts_with_one_rank_have_one_level(hosts: int, each: int) -> None:
    assert dict(groups_on(hosts, each)) == {(2,): groups_of(2, 4), (4,): groups_of(4, 4)}


@pytest.mark.parametrize("trees", [False, True])
def test_the_figures_between_hosts_are_found_from_times_that_include_those_inside(trees: bool) -> None:
    between = replace(BETWEEN, trees=trees)
    found = fit(on_hosts((1, 2), (1, 4), (2, 4), between=between), INSIDE.level("inside", "a test", 2), trees)
    assert found.level("between", "a test", None).trees is trees
    assert found.launch == pytest.approx(9e-5)
    assert found.latency == pytest.approx(LATENCY)
    assert found.bandwidth == pytest.approx(BETWEEN.bandwidth)


@pytest.mark.parametrize(("hosts", "each"), [(4, 2), (4, 1)])
def test_an_all_reduce_of_gpus_goes_by_trees_between_hosts_and_of_cpus_around_a_ring(hosts: int, each: int) -> None:
    sizes = [(1, 2), (1, 4), (2, 4), (2, 1)] if each > 1 else [(1, 2), (1, 4)]
    samples = on_hosts(*sizes)
    for device, trees in (("cuda", True), ("cpu", False)):
        levels = module._levels([replace(s, sizes=s.sizes[2 - each :]) for s in samples], hosts, each, device, "a test")
        assert [level.trees for level in levels] == [False, trees][2 - each :]


def test_bytes_that_take_longer_inside_say_nothing_of_the_link_between_hosts() -> None:
    fast = Fit(9e-5, LATENCY, {(kind, n): 1e12 for kind in KINDS for n in RATE})
    inside = INSIDE.level("inside", "a test", 2)
    found = fit(on_hosts((1, 2), (1, 4), (2, 4), between=fast), inside)
    assert found.bandwidth == pytest.approx(fast.bandwidth)
    assert found.latency == pytest.approx(LATENCY)


def test_hosts_are_told_by_the_names_of_the_ranks_in_order() -> None:
    assert ranks_on_hosts(["a", "a", "b", "b"]) == (2, 2)
    assert ranks_on_hosts(["a"] * 3) == (1, 3)
    assert ranks_on_hosts(["a", "b"]) == (2, 1)


@pytest.mark.parametrize(("names", "found"), [
    (["a", "a", "a", "b"], "3 ranks on a, 1 rank on b"),
    (["a", "b", "a", "b"], "1 rank on a, 1 rank on b, 1 rank on a, 1 rank on b"),
])  # fmt: skip
def test_hosts_with_unequal_or_mixed_ranks_are_refused(names: list[str], found: str) -> None:
    with pytest.raises(RuntimeStateError) as error:
        ranks_on_hosts(names)
    assert str(error.value) == (
        f"in the order of the ranks there are {found}; a profile describes hosts with as many ranks on each, numbered "
        "host after host: start as many on each, in this order"
    )


# -- A preset for the rest ---------------------------------------------------------------------------------------------


def test_a_preset_adds_its_levels_that_join_more_devices_than_were_measured() -> None:
    nvlink, infiniband = profile_of("h100").levels
    node = INSIDE.level("nccl", "a test", 8)
    found = completed([node], 8, profile_of("h100"))
    assert found[0] == node
    assert found[1].model_dump(exclude={"source"}) == infiniband.model_dump(exclude={"source"})
    assert (
        found[1].source == f"not measured, which takes more than 8 devices; from the preset h100: {infiniband.source}"
    )
    four = completed([INSIDE.level("nccl", "a test", 4)], 4, profile_of("h100"))
    assert [level.devices for level in four] == [4, 8, None]
    assert [level.devices for level in completed([INSIDE.level("nccl", "a test", 3)], 3, profile_of("h100"))] == [
        3,
        None,
    ]
    assert [level.name for level in completed([], 1, profile_of("h100"))] == [nvlink.name, infiniband.name]


def test_a_measured_level_of_any_number_of_devices_joins_those_that_were_measured() -> None:
    found = completed([INSIDE.level("gloo", "a test", None)], 2, profile_of("h100"))
    assert [(level.name, level.devices) for level in found] == [("gloo", 2), ("nvlink", 8), ("infiniband", None)]


# -- The profile -----------------------------------------------------------------------------------------------------


@pytest.mark.gloo
def test_a_calibration_writes_a_profile_that_plans_can_be_priced_by(tiny: None, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    code, output = command("--quick", "--out", str(path))
    assert code == 0, output
    assert f"wrote {path}; use it with set_auto_parallel_context(device_profile='{path}')" in output
    assert "the fit is off by" in output
    for kind in KINDS:
        assert sum(line.split()[:2] == [kind, "2"] for line in output.splitlines()) == 2
    profile = profile_of(path)
    assert profile.name == "here"
    assert [level.name for level in profile.levels] == ["gloo"]
    assert "measured by partway calibrate with 2 processes on a CPU" in profile.levels[0].source
    assert json.loads(path.read_text())["levels"][0]["bandwidth"]["all_reduce"].keys() == {"2"}
    with pw.auto_parallel_context(device_profile=str(path)):
        assert priced() == profile


@pytest.mark.slow
@pytest.mark.gloo
def test_the_residuals_are_those_of_the_costs_of_plans(tiny: None) -> None:
    found = calibrate(quick=True)
    mesh = Mesh({"x": 2})
    assert len(found.samples) == len(found.residuals) == 8
    for s, off in zip(found.samples, found.residuals, strict=True):
        seconds = collective_seconds(s.kind, s.payload, mesh, ("x",), found.profile)
        assert seconds == pytest.approx(s.seconds * (1 + off))


UNDER_A_LAUNCHER = """
import sys
from partway.commands.cli import app
from partway.measure import calibrate

calibrate.QUICK = calibrate.Effort((1 << 10, 1 << 18), 2, copied=1 << 16, product=1e-5, probes=lambda times: ())
app(["calibrate", "--quick", "--out", "here.json"])
"""


@pytest.mark.gloo
def test_under_a_launcher_its_processes_measure_and_the_first_one_writes_a_level_for_each_kind_of_link(
    tmp_path: Path,
) -> None:
    """Two agents of torchrun stand for two hosts, though they are on one."""
    (tmp_path / "measure.py").write_text(UNDER_A_LAUNCHER, encoding="utf-8")
    shared = {**os.environ, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [{**shared, "RANK": str(r), "LOCAL_RANK": str(r % 2), "GROUP_RANK": str(r // 2)} for r in range(4)]
    with ThreadPoolExecutor() as pool:
        first, *others = pool.map(lambda own: run_script(["measure.py"], tmp_path, own), ranks)
    assert [ended.returncode for ended in (first, *others)] == [0] * 4, (first, others)
    assert "wrote here.json" in first.stdout
    assert [ended.stdout for ended in others] == [""] * 3
    inside, between = profile_of(tmp_path / "here.json").levels
    assert (inside.name, inside.devices) == ("gloo inside a host", 2)
    assert (between.name, between.devices) == ("gloo between hosts", None)
    assert "groups of 2 of a host, measured by partway calibrate with 4 processes on 2 hosts on a CPU" in inside.source
    assert between.source.startswith("groups on 2 hosts, with one rank on each, and all ranks, measured by")
    for among in ("2 on a host", "2 hosts", "2 on each of 2 hosts"):
        assert re.search(rf"all_reduce +{among} +256 KB", first.stdout), first.stdout
    assert "gloo between hosts: launch" in first.stdout


@pytest.mark.gloo
def test_a_launcher_says_how_many_processes_there_are() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeStateError) as error:
            calibrate(3)
    finally:
        dist.destroy_process_group()
    assert str(error.value) == "processes is 3, and the launcher started 1 process; leave it out"


def test_one_process_completes_the_preset_that_is_named(tiny: None, tmp_path: Path) -> None:
    code, output = command("--quick", "--processes", "1", "--preset", "h100", "--out", str(tmp_path / "one.json"))
    assert code == 0, output
    found, preset = profile_of(tmp_path / "one.json"), profile_of("h100")
    assert [level.bandwidth for level in found.levels] == [level.bandwidth for level in preset.levels]
    assert found.peak != preset.peak


def test_one_process_measures_compute_only_and_says_so(tiny: None, tmp_path: Path) -> None:
    code, output = command("--quick", "--processes", "1", "--out", str(tmp_path / "one.json"))
    assert code == 0, output
    said = "not measured, which takes two processes or more; from the preset cpu"
    assert said in " ".join(output.split())
    profile = profile_of(tmp_path / "one.json")
    assert profile.levels[0].source.startswith(said)
    assert profile.levels[0].bandwidth == profile_of("cpu").levels[0].bandwidth
    assert profile.peak != profile_of("cpu").peak


@pytest.mark.slow
def test_what_all_probes_take_is_what_steps_are_predicted_by(tmp_path: Path) -> None:
    found = calibrate(1, quick=True)
    names = {rates.name for rates in found.profile.operators}
    kinds = {"pointwise", "view", "other"}
    products = {"aten.mm.default", "aten.addmm.default", "aten.mm.default of odd columns", "aten.bmm.default"}
    images = {"aten.convolution.default", "aten.convolution.default of pixels", "aten.max_pool2d_with_indices.default"}
    assert names >= kinds | products | images
    assert names >= {"aten.embedding.default", "aten.native_layer_norm.default", "partway.class_terms.default"}
    measured = {rates.name: rates for rates in found.profile.operators}
    assert all(measured[name].backward is not None for name in (*images, "aten.mm.default", "aten.embedding.default"))
    assert "aten.mm.default" in found.report()
    found.profile.save(tmp_path / "here.json")
    with pw.auto_parallel_context(device_profile=str(tmp_path / "here.json")):
        program = pw.compile(torch.nn.Linear(256, 256), (torch.empty(64, 256),), mesh={"x": 1}).program
    span = next(span for span in program.schedule.spans if span.args["kind"] == "aten.addmm.default")
    moved = 4 * (64 * 256 * 2 + 256 * 256 + 256)
    expected = measured["aten.addmm.default"].forward.seconds(2 * 64 * 256 * 256, moved, 4 * 64 * 256)
    assert span.seconds == pytest.approx(expected)


def test_plans_are_priced_by_the_profile_of_the_context_or_of_the_device() -> None:
    assert priced() is profile_of("cpu")
    with pw.auto_parallel_context(device_profile="ascend910"):
        assert priced() is profile_of("ascend910")
    with torch.device("meta"):
        assert priced() is profile_of("h100")


def test_a_mesh_larger_than_the_network_of_the_profile_is_an_error_of_the_plan(tmp_path: Path) -> None:
    data = json.loads(profile_of("h100").model_dump_json())
    (tmp_path / "node.json").write_text(json.dumps({**data, "levels": data["levels"][:1]}))
    with pw.auto_parallel_context(device_profile=str(tmp_path / "node.json")):
        assert priced(x=8).levels[0].name == "nvlink"
        with pytest.raises(StrategyError, match=r"the mesh x=4, y=4 has 16 devices, and the network of device profile"):
            priced(x=4, y=4)


# -- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"device": "tpu"}, "device is 'tpu'; it must be 'cpu' or 'cuda'"),
        ({"processes": 0}, "processes is 0; it must be 1 (which measures no collectives) or more"),
        ({"device": "cuda"}, "device is 'cuda', but PyTorch finds no GPU here; use device 'cpu'"),
    ],
)
def test_what_cannot_be_measured_is_an_error(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, object], says: str, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeStateError) as error:
        calibrate(**options)  # type: ignore[arg-type]
    assert str(error.value) == says
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    assert command(*words, "--out", str(tmp_path / "x.json")) == (2, f"partway calibrate: {says}\n")
    assert not (tmp_path / "x.json").exists()


def test_a_gpu_for_each_process_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RuntimeStateError) as error:
        calibrate(2, "cuda")
    assert str(error.value) == (
        "2 processes need a GPU each, and there is 1; use fewer processes, or set PARTWAY_SHARE_GPU=1 to have them "
        "share, which shows numbers and says nothing of times"
    )


@pytest.mark.parametrize("out", ["missing/profile.json", "."])
def test_a_path_that_cannot_be_written_is_an_error_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, out: str
) -> None:
    monkeypatch.setattr(module, "calibrate", lambda *_: pytest.fail("measured"))
    path = str(tmp_path / out)
    said = f"partway calibrate: cannot write {path!r}; give the path of a file in a folder that exists\n"
    assert command("--out", path) == (2, said)

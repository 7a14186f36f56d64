"""Device profiles: the presets, what is read from a file, and what is wrong with it."""

import json

import pytest
from round_profile import DATA, FLAT, NODE, ROUND

from partway.propagation.cost.profile import presets, profile_of
from partway.strategy import StrategyError


def test_these_are_the_presets():
    assert presets() == ("a100", "a100_40", "ascend910", "b200", "cpu", "h100", "h200", "mi300x")
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
        "no device profile 'tpu': there is no such file, and the presets are a100, a100_40, ascend910, b200, cpu, "
        "h100, h200, mi300x; write one of them or the path of a file that `partway calibrate` wrote"
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


def test_a_file_that_is_not_json_says_so(tmp_path):
    (tmp_path / "mine.json").write_text("{")
    with pytest.raises(StrategyError, match="the file: is not JSON; write an object with name, peak, memory"):
        profile_of(tmp_path / "mine.json")

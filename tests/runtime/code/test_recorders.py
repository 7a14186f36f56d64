"""When what runs is told: collectives, and the timeline of a step."""

import contextlib
import itertools
import json
import time

import pytest
import torch
from torch import fx, nn

import partway as pw
from partway.propagation.ops.collectives import convert
from partway.propagation.program.timeline import COMMUNICATION, COMPUTE
from partway.runtime import Simulator
from partway.runtime.code import loaded_graph
from partway.runtime.code.assemble import assemble_code
from partway.runtime.code.recorders import begin, marking
from partway.strategy import Mesh


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 8))


@contextlib.contextmanager
def data_parallel(devices):
    """A sharded network that was planned, and a function that runs one step of it."""
    fusion = {"allreduce": {"mode": "overlap"}}
    mode = {"parallel_mode": "data_parallel", "dataset_strategy": "full_batch"}
    with pw.auto_parallel_context(device_num=devices, comm_fusion=fusion, **mode):
        model, x = pw.shard(network()), torch.ones(16 * devices, 64)
        model(x).sum().backward()
        yield model, lambda: model(x).sum().backward()


def measured(devices):
    """The spans of one step, and those that were predicted."""
    with data_parallel(devices) as (model, step):
        with pw.record_timeline() as spans:
            step()
            assert spans == []
        before = list(spans)
        step()
        assert spans == before
        return spans, model.program.schedule.spans


def check(spans, predicted):
    """What was predicted has run, under the same names; operators one after another; nothing ends before it starts."""
    ran = {(span.phase, span.name): span for span in spans}
    assert len(ran) == len(spans)
    for span in predicted:
        assert ran[span.phase, span.name].lane == span.lane
        if span.lane == COMMUNICATION:
            assert ran[span.phase, span.name].args == span.args  # kind, axes and bytes
    computing = sorted((span for span in spans if span.lane == COMPUTE), key=lambda span: span.start)
    for one, other in itertools.pairwise(computing):
        assert one.end <= other.start + 1e-9
    assert min(span.start for span in spans) == 0
    assert {span.phase for span in spans} == {"forward", "backward"}


def test_a_timeline_has_what_was_predicted_under_the_same_names():
    check(*measured(4))


def test_what_is_timed_is_made_before_its_time_counts(monkeypatch):
    happened, load, begins = [], Simulator.load, loaded_graph.begin

    def made(self, code, mark=None):
        happened.append("made")
        return load(self, code, mark)

    def begun(inputs):
        happened.append("begun")
        begins(inputs)

    with data_parallel(2) as (_, step), pw.record_timeline():
        monkeypatch.setattr(Simulator, "load", made)
        monkeypatch.setattr(loaded_graph, "begin", begun)
        step()
    assert happened == ["made", "begun"] * 2


def fails(step):
    with pw.record_timeline() as spans:
        step()
        try:
            raise ZeroDivisionError
        finally:
            fails.spans = spans


def test_several_timelines_may_listen_and_one_that_fails_stops():
    with data_parallel(2) as (_, step):
        with pw.record_timeline() as outer, pw.record_timeline() as inner:
            step()
        assert [span.name for span in outer] == [span.name for span in inner]
        with pytest.raises(ZeroDivisionError):
            fails(step)
        step()
        assert len(fails.spans) == len(outer)


def test_predicted_and_measured_are_one_file_for_perfetto(tmp_path):
    spans, predicted = measured(2)
    pw.save_chrome_trace(tmp_path / "step.json", {"predicted": predicted, "measured": spans})
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    drawn = [event for event in events if event["ph"] == "X"]
    assert len(drawn) == len(spans) + len(predicted)
    assert {event["pid"] for event in drawn} == {0, 1}
    named = {pid: {e["name"] for e in drawn if e["pid"] == pid} for pid in (0, 1)}
    assert named[0] <= named[1]


def measured_here():
    torch.manual_seed(0)
    check(*measured(2))
    return True


@pytest.mark.gloo
def test_a_process_measures_its_own_timeline(on_ranks):
    assert on_ranks(2, measured_here) == [True, True]


def slowly(x):
    time.sleep(0.1)
    return x + 1


def test_simulated_spans_are_those_of_the_first_rank_without_the_time_of_the_others():
    graph = fx.Graph()
    node = graph.call_function(slowly, (graph.placeholder("x"),))
    node = graph.call_function(convert, (node, "P", "R", ["x"], 4, 0))
    graph.output((graph.call_function(slowly, (node,)),))
    code = assemble_code(fx.GraphModule(nn.Module(), graph), "forward")
    run = Simulator(Mesh({"x": 4})).load(code, marking(code))
    with pw.record_timeline() as spans:
        begin([])
        assert [int(part) for part in run([[torch.tensor(rank) for rank in range(4)]])[0]] == [11] * 4
    first, reduced, second = spans
    assert [span.lane for span in spans] == [COMPUTE, COMMUNICATION, COMPUTE]
    assert 0.1 <= first.seconds < 0.3
    assert reduced.seconds < 0.1
    assert 0.1 <= second.seconds < 0.3
    assert reduced.start > first.start + 0.4

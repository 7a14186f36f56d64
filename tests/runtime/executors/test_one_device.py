"""The only rank of a mesh: what it runs is what many ranks would, and a call of it costs less."""

import pytest
import torch
from torch import fx, nn

import partway as pw
from partway.propagation.ops.collectives import convert, convert_group
from partway.runtime import Simulator, record_collectives
from partway.runtime.code.assemble import assemble_code
from partway.runtime.code.slices import Placed
from partway.runtime.executors.one_device import OneDevice
from partway.strategy import BROADCAST, PARTIAL, REPLICATE, Layout, Mesh, Shard
from partway.strategy.placement import converts

ONE = Mesh({"x": 1})


def converting(source, target, *, grouped):
    """The code of a conversion along an axis of one device."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, 6, device="meta")
    how = (str(source), str(target), ("x",), 1)
    if grouped:
        graph.output(tuple(graph.call_function(convert_group, ([x], *how, [0])) for _ in range(1)))
    else:
        graph.output((graph.call_function(convert, (x, *how, 0)),))
    return assemble_code(fx.GraphModule({}, graph), "forward")


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("source", [Shard(0), Shard(1), REPLICATE, BROADCAST, PARTIAL])
@pytest.mark.parametrize("target", [Shard(0), Shard(1), REPLICATE, BROADCAST, PARTIAL])
def test_a_conversion_among_one_is_that_of_the_simulator(source, target, grouped):
    if source == target or not converts(source, target):
        pytest.skip("there is no such conversion")
    code, x = converting(source, target, grouped=grouped), torch.randn(4, 6)
    with record_collectives() as one:
        (own,) = OneDevice(ONE).run(code, [x.clone()])
    with record_collectives() as other:
        ((expected,),) = Simulator(ONE).run(code, [[x.clone()]])
    assert torch.equal(*(part[0] if grouped else part for part in (own, expected)))
    assert one == other


def test_results_leave_as_on_one_device():
    one, x = OneDevice(ONE), torch.randn(4, 6)
    whole = Layout(ONE, (Shard(0),))
    plain, turned = Placed(whole, (4, 6)), Placed(whole, (4, 6), (1, 4))
    same, copied, laid = one.leave([x, x, x], [plain, plain, turned], [False, True, True])
    assert same is x
    assert copied is not x
    assert copied.data_ptr() != x.data_ptr()
    assert laid.stride() == (1, 4)
    assert all(torch.equal(result, x) for result in (copied, laid))


def test_inputs_are_contiguous_unless_they_may_lie_in_any_way():
    one, x = OneDevice(ONE), torch.randn(4, 6).t()
    assert one.enter([x], ())[0].is_contiguous()
    assert one.enter([x], (), frozenset({0}))[0] is x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.norm, self.down = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)
        self.double()

    def forward(self, x):
        hidden = self.norm(self.up(x)).relu().tanh()
        return self.down(hidden).square().mean(), hidden


def test_a_model_on_one_device_trains_as_without():
    torch.manual_seed(1)
    x, plain, model = torch.randn(8, 6, dtype=torch.float64), Net(), pw.shard(Net(), mesh={"dp": 1})
    for _ in range(3):
        results = []
        for net in (plain, model):
            loss, hidden = net(x)
            loss.backward()
            results += [loss, hidden]
        for own, expected in zip(results[2:], results[:2], strict=True):
            torch.testing.assert_close(own, expected)
        for own, expected in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(own.grad, expected.grad)
        for own, expected in zip(model.buffers(), plain.buffers(), strict=True):
            torch.testing.assert_close(own, expected)


def test_a_timeline_has_every_operator_of_one_device():
    model, x = pw.shard(Net(), mesh={"dp": 1}), torch.randn(8, 6, dtype=torch.float64)
    model(x)
    with pw.record_timeline() as spans:
        model(x)[0].backward()
    assert {span.phase for span in spans} == {"forward", "backward"}
    assert {span.name for span in spans} >= {
        node.name for node in model.program.forward.graph.nodes if "mm" in node.name
    }

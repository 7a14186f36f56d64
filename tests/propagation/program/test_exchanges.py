"""Where a program exchanges halos: as rarely as it can, and never twice for one tensor."""

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from checks import carried, counted
from torch import nn

import partway as pw
from partway.propagation.cost.profile import profile_of
from partway.propagation.rules.row import parse_row
from partway.propagation.rules.rule import Exchange, Hop, owning
from partway.propagation.rules.table import ROWS
from partway.strategy import BROADCAST, Shard, VerifyError


def profile_in(folder, bandwidth, latency):
    """A device profile whose network is all that costs anything."""
    figures = profile_of("cpu").model_dump(mode="json")
    figures |= {"name": "network", "overhead": 0.0, "memory_bandwidth": 1e18}
    figures["peak"] = dict.fromkeys(figures["peak"], 1e18)
    for level in figures["levels"]:
        level |= {"bandwidth": bandwidth, "latency": latency, "launch": 0.0}
    path = folder / "network.json"
    path.write_text(json.dumps(figures))
    return str(path)


@pytest.fixture
def bytes_alone(tmp_path):
    return profile_in(tmp_path, 1e6, 0.0)


def planned(fn, args, mesh, profile, strategy=(None, None, "h", "w")):
    with pw.auto_parallel_context(device_profile=profile):
        return pw.compile(fn, args, mesh=mesh, in_strategy=(strategy,))


def exchanges(compiled, phase="forward"):
    return [c for c in compiled.program.collectives if str(c.kind) == "exchange" and c.phase == phase]


class Branches(nn.Module):
    """Convolutions of several reaches and a pool, all of one tensor."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.wide, self.dilated = nn.Conv2d(4, 4, 5, padding=2), nn.Conv2d(4, 4, 3, padding=4, dilation=4)
        self.flat, self.strided = nn.Conv2d(4, 4, (1, 3), padding=(0, 1)), nn.Conv2d(4, 4, 3, 2, padding=1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        found = self.wide(x) + self.dilated(x) + self.flat(x) * x
        return (found**2).mean() + (self.strided(x) ** 3).mean()


@pytest.mark.parametrize(("mesh", "dims"), [({"w": 4}, 1), ({"h": 2, "w": 4}, 2)], ids=["width", "both"])
def test_one_exchange_serves_all_readers_of_a_tensor_and_its_gradient_one_more(mesh, dims, bytes_alone):
    module, x = Branches().double(), torch.randn(1, 3, 32, 64, dtype=torch.float64)
    strategy = (None, None, *("h" if "h" in mesh else None, "w"))
    compiled = planned(module, (x,), mesh, bytes_alone, strategy)
    assert len(exchanges(compiled)) == len(exchanges(compiled, "backward")) == dims
    expected = module(x)
    expected.backward()
    gradients = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    with pw.auto_parallel_context(device_profile=bytes_alone):
        sharded = pw.shard(module, mesh=mesh, in_strategy=(strategy,))
        loss = sharded(x)
        loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    for parameter, gradient in zip(module.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-10, atol=1e-14)


def test_an_exchange_sends_what_the_busiest_rank_sends(bytes_alone):
    module, x = nn.Conv2d(3, 8, (5, 3), padding=(2, 1)), torch.empty(2, 3, 16, 64)
    first, second = exchanges(planned(module, (x,), {"h": 2, "w": 4}, bytes_alone))
    assert first.axes, second.axes == (("h",), ("w",))
    assert first.payload_bytes == 2 * 3 * 2 * 16 * 4  # two rows of 16 columns to the one neighbour
    assert second.payload_bytes == 2 * 3 * (2 * 1) * (8 + 4) * 4  # a column to each side, with the corners
    assert first.wire_bytes == first.payload_bytes


def test_what_needs_no_halo_exchanges_none(bytes_alone):
    module = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 2, 2), nn.Conv2d(4, 4, 1, 2))
    compiled = planned(module, (torch.empty(1, 3, 32, 64),), {"h": 2, "w": 4}, bytes_alone)
    assert exchanges(compiled) == []
    forward = [str(c.kind) for c in compiled.program.collectives if c.phase == "forward"]
    assert set(forward) == {"all_gather"}  # of the result


def test_a_first_layer_sends_nothing_back(bytes_alone):
    module, x = nn.Conv2d(3, 4, 3, padding=1), torch.empty(1, 3, 32, 64)
    assert exchanges(planned(module, (x,), {"w": 4}, bytes_alone, (None, None, None, "w")), "backward") == []
    x.requires_grad_()
    assert len(exchanges(planned(module, (x,), {"w": 4}, bytes_alone, (None, None, None, "w")), "backward")) == 1


def test_a_slice_is_not_kept_beside_its_window(bytes_alone):
    def fn(x, first, second):
        return (F.conv2d(torch.relu(F.conv2d(x, first, padding=1)), second, padding=1) ** 2).sum()

    x = torch.randn(1, 3, 16, 32)
    weights = [torch.randn(8, channels, 3, 3, requires_grad=True) for channels in (3, 8)]
    with pw.auto_parallel_context(device_profile=bytes_alone):
        strategy = ((None, None, "h", "w"), None, None)
        compiled = pw.compile(fn, (x, *weights), mesh={"h": 2, "w": 4}, in_strategy=strategy)
    step = compiled.program
    (*_, output), results = step.forward.graph.nodes, len(step.outputs)
    kept = [node.meta["val"] for node in output.args[0][results:] if node.op != "placeholder"]
    shapes = [tuple(value.shape) for value in kept]
    assert (1, 8, 8 + 2, 8 + 2) in shapes  # the window of the ReLU's result
    assert shapes.count((1, 8, 8, 8)) == 1  # what is squared; the ReLU's result is a part of the window


def test_short_slices_or_another_layout_whichever_costs_less(tmp_path):
    module, x = nn.Conv2d(16, 16, 3, padding=1), torch.empty(1, 16, 28, 28)
    strategy = (None, None, None, "w")
    by_bytes = planned(module, (x,), {"w": 8}, profile_in(tmp_path, 1e6, 0.0), strategy)
    assert len(exchanges(by_bytes)) == 1
    by_waiting = planned(module, (x,), {"w": 8}, profile_in(tmp_path, 1e15, 1.0), strategy)
    assert exchanges(by_waiting) == []


def test_an_image_narrower_than_its_halo_is_fetched_over_several_hops(bytes_alone):
    module, x = nn.Conv2d(2, 2, (1, 13), padding=(0, 6)).double(), torch.randn(1, 2, 4, 16, dtype=torch.float64)
    strategy = (None, None, None, "w")
    expected = F.conv2d(x, module.weight, module.bias, padding=(0, 6))
    (only,) = exchanges(planned(module, (x,), {"w": 8}, bytes_alone, strategy))
    assert only.payload_bytes == 2 * 4 * 2 * 6 * 8  # each column goes three ranks to the left and to the right
    with pw.auto_parallel_context(device_profile=bytes_alone):
        sharded = pw.shard(module, mesh={"w": 8}, in_strategy=(strategy,), out_strategy=(strategy,))
        torch.testing.assert_close(sharded(x), expected, rtol=1e-12, atol=1e-14)


def test_an_exchange_is_explained_by_what_a_plan_without_it_costs(bytes_alone):
    module, x = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, padding=1)), torch.empty(1, 3, 16, 64)
    text = str(planned(module, (x,), {"w": 4}, bytes_alone, (None, None, None, "w")).plan.explain("1"))
    (said,) = [part for part in text.split("forward ") if part.startswith("exchange over w (4 ranks) of conv2d")]
    assert "because aten.conv2d.default conv2d (w:s1) meets aten.conv2d.default conv2d_1 (w:s1)" in said
    assert "the cheapest plan without it takes 28 ms more and sends 28 kB more a step" in said


# -- exchanges that an operator owns

mm = torch.ops.aten.mm.default


def gathering(written):
    """The rule of a product that may gather its first operand itself, where its columns are split; `written`: the hops
    that its local form writes."""
    plain = ROWS[mm]

    def local(emit, args, kwargs):
        x, w = args
        for number in range(written if emit.hops("columns") else 0):
            x = emit.sent("columns", number, args[0])
        return emit.call(mm, x, w)

    def rule(node):
        gathers = Exchange("columns", "n", {0: Shard(0)}, lambda counts: (Hop(0, Shard(0), BROADCAST),), beside=True)
        return replace(owning(parse_row(plain, node), gathers), local=local)

    return rule


def product(x, w):
    return (torch.mm(torch.tanh(x), w) ** 2).sum()


SPLIT = {"mesh": {"t": 4}, "in_strategy": (("t", None), (None, "t"))}


def operands(dtype=torch.float64):
    return [torch.randn(size, dtype=dtype, requires_grad=True) for size in ((32, 24), (24, 256))]


def test_an_operator_may_send_what_its_ranks_lack(monkeypatch):
    monkeypatch.setitem(ROWS, mm, gathering(1))
    given = operands()
    expected = torch.autograd.grad(product(*given), given)
    sharded = pw.shard(product, **SPLIT)
    with pw.record_collectives() as ran:
        loss = sharded(*given)
        found = torch.autograd.grad(loss, given)
    torch.testing.assert_close(loss, product(*given), rtol=1e-12, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    plan = sharded.plan
    assert next(o.strategy for o in plan.operators if o.name == "mm") == "(t:columns)"
    own = [(c.phase, str(c.kind), c.payload_bytes) for c in plan.collectives if c.where == "mm"]
    assert own == [("forward", "all_gather", 32 * 24 * 8), ("backward", "reduce_scatter", 32 * 24 * 8)]
    assert counted(ran) == counted(sharded.program.collectives)
    assert carried(sharded.program.collectives) == carried(plan.collectives)
    told = str(plan.explain("mm"))  # without it: before the tanh, and no longer beside the product
    assert told.count("with forward all_gather(t) of x, backward reduce_scatter(t) of x") == 2


def test_a_local_form_that_sends_less_than_was_priced_is_refused(monkeypatch):
    monkeypatch.setitem(ROWS, mm, gathering(0))
    with pytest.raises(
        VerifyError, match=r"of aten\.mm\.default mm writes 0 conversions, and the exchanges of its rule"
    ):
        pw.compile(product, operands(), **SPLIT)

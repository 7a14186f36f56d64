"""The benchmark of split images: what it counts, what misses a bar, and that its parts run at a small size."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import spatial
import torch
import typer
from checks import assert_same_gradients, assert_same_loss, gradients
from live_bytes import LiveBytes
from peer_models import ConvStack
from program_figures import exchanges, wire
from spatial import CASES, Held, Peer, Planned, Read, above, keep_columns, planned, reading, steps

import partway as pw
from partway.measure.workloads import ResNet50, UNet

STACK = CASES[0]
FOUND = Planned("x", 100.0, 2, 4, 1000.0, 1000.0, 10, 10.0, 0, "")


# -- live bytes


def test_live_bytes_are_those_of_a_known_case() -> None:
    x = torch.ones(1000, requires_grad=True)  # 4000 bytes, there before and so not counted
    with LiveBytes() as live:
        y = x * 2
        assert (live.live, live.peak) == (4000, 4000)
        loss = y.sin().view(10, 100).sum()  # the sine is gone, its view with it
        assert (live.live, live.peak) == (4004, 8004)
        live.restart()
        assert live.peak == 4004
        loss.backward()  # beside y and the loss: the ones of the sum, expanded; the cosine, and its product with them
        assert (live.live, live.peak) == (4004 + 4000, 4004 + 4 + 2 * 4000)
        del y, loss
        assert live.live == 4000  # the gradient
        x.grad = None
        assert live.live == 0
    torch.ones(10)
    assert live.live == 0


def test_what_is_written_into_memory_that_is_there_makes_none() -> None:
    with LiveBytes() as live:
        x = torch.zeros(100)
        x.add_(1).relu_()
        torch.add(x, x, out=x[:])
        halves = x.chunk(2)
        assert (live.live, live.peak) == (400, 400)
        del x
        assert live.live == 400
        del halves
        assert live.live == 0


class Product(torch.nn.Module):
    """A layer whose result is weighed with the target."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(100, 50, bias=False)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (self.layer(x) * target).sum()


MEASURE = """
import json, torch, spatial
{product}
found = spatial.measured(Product(), (torch.randn(200, 100), torch.randn(200, 50)))
print(json.dumps([found.rest, found.peak]))
"""


def test_a_step_is_measured_beyond_what_is_there_before_it() -> None:
    # in a process of its own, as the benchmark does: what other tests leave behind comes and goes when it likes
    script = MEASURE.format(product=inspect.getsource(Product))
    env = {**os.environ, "PYTHONPATH": str(Path(spatial.__file__).parent)}
    run = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    rest, peak = json.loads(run.stdout.splitlines()[-1])
    assert rest == 4 * (100 * 50 + 200 * 100 + 200 * 50)
    # the products' gradient, and the weight's
    assert 4 * (200 * 50 + 100 * 50) <= peak <= 4 * (2 * 200 * 50 + 100 * 50 + 200 * 50)


def test_a_gradient_that_is_there_already_is_refused() -> None:
    model, batch = Product(), (torch.randn(200, 100), torch.randn(200, 50))
    model(*batch).backward()
    with pytest.raises(ValueError, match=r"layer.weight has a gradient already; call zero_grad\(\) first"):
        spatial.measured(model, batch)


# -- exchanges


def test_exchanges_of_one_convolution_are_counted() -> None:
    with torch.device("meta"):
        given = torch.empty(1, 4, 32, 32, requires_grad=True), torch.empty(8, 4, 3, 3)
    found = pw.compile(
        lambda x, w: torch.nn.functional.conv2d(x, w, padding=1).sum(), given, mesh={"w": 4},
        in_strategy=((None, None, None, "w"), (None, None, None, None)),
    ).program  # fmt: skip
    counted = exchanges(found)
    # a column of 4 channels and 32 rows to each of two neighbours, and its gradient back
    assert (counted.count, counted.permutes, counted.sent) == (2, 4, 2 * 2 * 4 * 32 * 4)
    assert sum(c.wire_bytes for c in found.collectives if c.kind == "exchange") == counted.sent
    assert sum(c.wire_bytes for c in found.collectives) == pytest.approx(wire(found))


def test_the_stack_of_convolutions_sends_no_more_than_by_hand() -> None:
    found = planned(STACK)
    assert found.misses(STACK.peers) == ()
    assert found.permutes <= 36
    assert found.flops == found.even


def test_a_plan_misses_what_is_worse_than_its_best_peer() -> None:
    peers = (Peer("a", 90.0, 4, 2000.0), Peer("b", 200.0, 2))
    assert FOUND.misses(()) == ()
    assert FOUND.misses(peers) == ("halo",)
    assert replace(FOUND, halo=90.0, wire=2100.0, claimed=2100.0).misses(peers) == ("wire",)
    assert replace(FOUND, claimed=999.0).misses(()) == ("claim",)


# -- the models


@pytest.mark.parametrize(
    ("model", "image", "target"),
    [
        (lambda: UNet(width=2, levels=2), (2, 3, 16, 32), (2, 16, 32)),
        pytest.param(lambda: ResNet50(width=2, classes=4), (2, 3, 32, 128), (2,), marks=pytest.mark.slow),
        (ConvStack, (2, 3, 16, 32), (2, 3, 4, 8)),
    ],
    ids=["unet", "resnet50", "convstack"],
)
def test_models_that_are_split_along_their_width_compute_the_same(model, image, target) -> None:  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    plain, sharded = model().double(), model().double()
    sharded.load_state_dict(plain.state_dict())
    classes = torch.randint(2, target) if len(target) != len(image) else torch.randn(target, dtype=torch.float64)
    names = list(plain.forward.__code__.co_varnames[1:3])
    batch = dict(zip(names, (torch.randn(image, dtype=torch.float64), classes), strict=True))
    if isinstance(sharded, ResNet50):
        keep_columns(sharded)
    split = {names[0]: spatial.COLUMNS}
    pw.shard(sharded, mesh={"w": 4}, in_strategy=split)
    loss, found = gradients(sharded, batch)
    expected_loss, expected = gradients(plain, batch)
    assert_same_loss(loss, expected_loss, 1e-9)
    assert_same_gradients(found, expected, 1e-9)


def test_parts_of_a_batch_are_the_whole() -> None:
    (unet, resnet) = steps(64, small=True)
    for step in (unet, resnet):
        image, target = step.whole(4)
        assert tuple(image.shape), tuple(target.shape) == (step.image, step.target)
        assert torch.equal(image[..., 16:32] if step is unet else image[..., 8:16], step.part(1, 4)[0])


# -- bars


def test_a_rank_that_holds_more_than_its_share_misses() -> None:
    unet, resnet = steps(64, small=True)
    one, even, more = Held(0, 800, 0.0), Held(0, 115 * 4, 0.0), Held(0, 500, 0.0)
    assert above(unet, (one, even, even)) == ()
    assert above(unet, (one, even, more)) == ("memory",)
    assert above(resnet, (one, even, more)) == ()


@pytest.mark.slow
@pytest.mark.gloo
def test_ranks_and_one_device_are_measured() -> None:
    one, *ranks = spatial.held(steps(64, small=True)[0], 2)
    assert len(ranks) == 2
    assert all(0 < rank.peak < one.peak for rank in ranks)
    assert all(rank.rest < one.rest for rank in ranks)


# -- reading, and the command


def test_ranks_read_their_columns_and_what_is_around_them(tmp_path: Path) -> None:
    found = list(reading(512, 32, 8, 8, tmp_path))
    assert [(row.format, row.rank) for row in found] == [(name, rank) for name in ("tif", "zarr") for rank in range(8)]
    for row in found:
        assert row.tiles == 16 * (3 if row.rank in (0, 7) else 4)
        assert row.fraction == pytest.approx(row.tiles / 256, rel=0.1)
    assert Read("tif", 0, 1, 20, 100).fraction == 0.2


def test_the_command_writes_its_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as exit_:
        spatial.main("reading", True, tmp_path / "spatial.json", tmp_path / "spatial.png")
    assert exit_.value.exit_code == 0
    assert len(json.loads((tmp_path / "spatial.json").read_text())["reading"]) == 4
    assert f"wrote {tmp_path / 'spatial.json'}" in capsys.readouterr().out
    with pytest.raises(typer.BadParameter, match="there are no 'halos'; take plans, memory or reading"):
        spatial.main("halos")

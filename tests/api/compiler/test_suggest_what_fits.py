"""What would do where nothing fits: found by planning again, and true."""

import gc
import pickle
import re
import weakref

import pytest
import torch
from torch import nn

import partway as pw
from partway.compiler.suggest_what_fits import InTime, batch_of, least_limit, what_fits, with_batch
from partway.strategy import Mesh
from partway.strategy.errors import DoesNotFitError

MESH = Mesh({"dp": 2, "tp": 2})


def layers() -> tuple[nn.Module, torch.Tensor]:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(256, 256) for _ in range(4))), torch.empty(1024, 256)


def compiled(x: torch.Tensor, mesh: dict[str, int]) -> pw.Plan:
    model, _ = layers()
    return pw.compile(model, (x,), mesh=mesh, in_strategy=(("dp", None),), out_strategy=(("dp", None),)).plan


def test_what_is_named_fits_and_what_comes_before_it_does_not() -> None:
    _, x = layers()
    pw.set_algo_parameters(memory_limit=0.4 * compiled(x, {"dp": 2, "tp": 2}).memory.total)
    with pytest.raises(
        DoesNotFitError, match=r"Planned again, it fits on \d+ devices, .* or with a batch of"
    ) as raised:
        compiled(x, {"dp": 2, "tp": 2})
    named = re.search(r"the mesh dp=(\d+), tp=(\d+), or with a batch of (\d+) in place of 1024$", str(raised.value))
    assert named
    dp, tp, batch = map(int, named.groups())
    limit = pw.get_algo_parameters("memory_limit")
    assert compiled(x, {"dp": dp, "tp": tp}).memory.total <= limit
    assert compiled(x[:batch], {"dp": 2, "tp": 2}).memory.total <= limit
    with pytest.raises(DoesNotFitError):
        compiled(x[: 2 * batch], {"dp": 2, "tp": 2})


def test_the_smallest_mesh_and_the_largest_batch_are_named() -> None:
    asked = []

    def on(mesh: Mesh) -> bool:
        asked.append(mesh)
        return mesh.device_num >= 16

    assert what_fits([MESH], on, 48, lambda part: part <= 12, InTime()) == (
        "Planned again, it fits on 16 devices, the mesh dp=8, tp=2, or with a batch of 12 in place of 48"
    )
    assert [mesh.sizes for mesh in asked] == [(4, 2), (2, 4), (8, 2)]


def test_what_was_tried_is_said_where_nothing_does() -> None:
    def no(_: object) -> bool:
        return False

    assert what_fits([MESH], no, 6, no, InTime()) == (
        "Planned again, it fits on no mesh with up to 16 times as many devices and with no smaller batch"
    )
    assert what_fits([], no, 6, no, InTime()) == "Planned again, it fits with no smaller batch"
    assert what_fits([], no, 5, no, InTime()) == what_fits([], no, None, no, InTime()) == ""


def test_a_batch_is_cut_from_the_tensors_that_have_it() -> None:
    x, table = torch.arange(8.0, requires_grad=True), torch.ones(3, 8)
    call = ((x, 2), {"table": table})
    assert batch_of(call) == 8
    assert batch_of(((torch.tensor(1.0), 3), {})) is None
    (cut, number), named = with_batch(call, 8, 4)
    assert cut.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert cut.requires_grad
    assert number == 2
    assert named["table"] is table


def test_a_plan_holds_nothing_of_the_call_that_it_was_made_for() -> None:
    model, x = nn.Linear(8, 8), torch.ones(4, 8)
    compiled = pw.compile(model, (x,), mesh={"dp": 2}, in_strategy=(("dp", None),))
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None
    assert compiled.plan.memory.total > 0


def test_a_limit_is_raised_until_a_plan_keeps_to_it() -> None:
    asked = []

    def within(limit: float) -> None:
        asked.append(limit)
        if limit < 1200:
            raise DoesNotFitError("on the mesh dp=2", limit * 1.1, limit, "parameters 0.1 GB")

    error = DoesNotFitError("on the mesh dp=2", 1000.0, 900.0, "parameters 0.1 GB")
    assert least_limit(error, within, InTime()) == pytest.approx(asked[-1] / 1.001)
    assert asked == sorted(asked)
    assert asked[-1] >= 1200


def test_an_error_says_what_would_do_and_survives_a_pickle() -> None:
    error = DoesNotFitError("on the mesh dp=2", 2e9, 1e9, "parameters 1 GB", "Planned again, it fits on 4 devices")
    assert str(error) == (
        "no plan was found on the mesh dp=2 that holds less than 2 GB on a device (parameters, gradients, optimizer "
        "states, activations and what operators work with), and memory_limit is 1 GB; a limit of 2.002 GB would do. "
        "The heaviest: parameters 1 GB. Planned again, it fits on 4 devices"
    )
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert (again.least, again.limit) == (error.least, error.limit)


def test_what_there_was_no_time_to_try_is_not_said_to_have_been_tried() -> None:
    def never(_: object) -> bool:
        raise AssertionError("there is no time")

    assert what_fits([MESH], never, 6, never, InTime(-1)) == ""
    error = DoesNotFitError("on the mesh dp=2", 1000.0, 900.0, "parameters 0.1 GB")
    assert least_limit(error, never, InTime(-1)) == 1000.0
    in_time = InTime()
    assert in_time()
    assert not in_time.over

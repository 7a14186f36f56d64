"""The optimizer whose steps the servers take: what it refuses before a cluster is asked, and the loop without
servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer

import partway as pw
from partway.ps.marks import forget
from partway.ps.served import _job_of, _options
from partway.ps.service.settings import ServerSettings, want
from partway.strategy import ContextError, RuntimeStateError


@pytest.fixture(autouse=True)
def _nothing_named() -> Iterator[None]:
    yield
    forget()


def job_of(optimizer: Optimizer, **asked: Any) -> Any:
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    return _job_of(optimizer, parameters, ServerSettings(**asked))


def test_without_servers_the_optimizer_is_its_own_and_the_loop_counts() -> None:
    own = SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert pw.ps.optimizer(own) is own
    assert list(pw.ps.steps(3)) == [0, 1, 2]
    assert pw.ps.share() == (0, 1)


def test_without_servers_there_is_no_status() -> None:
    text = r"^there is no parameter server; call set_ps_context\(enable_ps=True\) and then init\(\) first$"
    calls: tuple[Callable[[], Any], ...] = (
        pw.ps.status,
        pw.ps.staleness,
        lambda: pw.ps.save("folder", nn.Linear(2, 2)),
    )
    for call in calls:
        with pytest.raises(RuntimeStateError, match=text):
            call()


def test_init_comes_first() -> None:
    want(ServerSettings())
    try:
        text = r"^the processes of the parameter server have not met yet; call init\(\) first$"
        with pytest.raises(RuntimeStateError, match=text):
            pw.ps.optimizer(SGD(nn.Linear(2, 2).parameters(), lr=0.1))
        with pytest.raises(
            RuntimeStateError, match=r"^the servers have no parameters yet; call pw\.ps\.optimizer\(\.\.\.\) f"
        ):
            pw.ps.share()
    finally:
        want(None)


def test_what_is_no_optimizer_is_an_error() -> None:
    with pytest.raises(RuntimeStateError, match=r"^pw\.ps\.optimizer: 'SGD' is not a torch\.optim\.Optimizer$"):
        pw.ps.optimizer("SGD")  # type: ignore[arg-type]


def test_an_optimizer_of_all_parameters_together_is_an_error() -> None:
    model = nn.Linear(2, 2)
    pw.set_param_ps(model)
    with pytest.raises(
        RuntimeStateError, match=r"^LBFGS takes one step of all parameters together, which servers cannot "
    ):
        job_of(torch.optim.LBFGS(model.parameters()))


def test_a_table_whose_rows_depend_on_each_other_is_an_error() -> None:
    table = nn.Embedding(10, 4, sparse=True)
    pw.set_param_ps(table)
    text = r"^weight is divided by rows, and Adafactor's step of a row depends on other rows; give set"
    with pytest.raises(RuntimeStateError, match=text):
        job_of(torch.optim.Adafactor(table.parameters()))


def test_an_optimizer_of_whole_matrices_keeps_them_whole() -> None:
    model = nn.Linear(2000, 2000)
    pw.set_param_ps(model)
    job, _, _ = job_of(torch.optim.Adafactor(model.parameters()))
    assert [(piece.start, piece.stop) for piece in job.pieces] == [(0, 2000), (0, 2000)]


def test_what_was_named_and_the_optimizer_lacks_is_an_error() -> None:
    model = nn.Linear(2, 2)
    pw.set_param_ps(model)
    with pytest.raises(RuntimeStateError, match=r"^set_param_ps named bias, which the optimizer does not have$"):
        job_of(SGD([model.weight], lr=0.1))


def test_what_stays_on_workers_needs_sync_mode() -> None:
    model = nn.Linear(2, 2)
    pw.set_param_ps(model.weight)
    own = SGD(model.parameters(), lr=0.1)
    job, _, _ = job_of(own)
    assert [each.on_workers for each in job.parameters] == [False, True]
    with pytest.raises(
        RuntimeStateError, match=r"^parameter 1 of the optimizer would stay on the workers, which average "
    ):
        job_of(own, mode="async")


def test_options_are_numbers_and_texts() -> None:
    assert _options({"params": [], "lr": torch.tensor(0.5), "betas": (0.9, 0.99), "foreach": None}) == {
        "lr": 0.5, "betas": [0.9, 0.99], "foreach": None,
    }  # fmt: skip
    with pytest.raises(
        RuntimeStateError, match=r"^lr of the optimizer is <function .*>; the servers take numbers and te"
    ):
        _options({"params": [], "lr": lambda: 1})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"enable_ps": 1}, "enable_ps is 1; it must be a bool"),
        ({"enable_ps": True, "mode": "bsp"}, "mode is 'bsp'; it must be 'sync' or 'async'"),
        ({"enable_ps": True, "durability": "ram"}, "durability is 'ram'; it must be 'process' or 'disk' or 'memory'"),
        ({"enable_ps": True, "gradient_dtype": "int8"},
         "gradient_dtype is 'int8'; it must be None or 'bfloat16' or 'float16'"),
        ({"enable_ps": True, "mode": "async", "max_staleness": -1},
         "max_staleness is -1; it must be an int of 0 or more, or None"),
        ({"enable_ps": True, "max_staleness": 4},
         'max_staleness means nothing with mode="sync", where nothing is stale'),
        ({"enable_ps": True, "shard_folder": 3}, "shard_folder is 3; it must be the path of a folder"),
        ({"enable_ps": True, "shard_folder": "x", "durability": "memory"},
         'shard_folder means nothing with durability="memory"'),
        ({"mode": "async"}, "mode means nothing without enable_ps=True"),
        ({"shard_folder": "x"}, "shard_folder means nothing without enable_ps=True"),
    ],
)  # fmt: skip
def test_wrong_options_are_errors(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ContextError) as caught:
        pw.set_ps_context(**arguments)
    assert str(caught.value) == f"set_ps_context: {text}"

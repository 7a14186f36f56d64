"""Several threads at once: each has its own `with` blocks, plans are made one at a time and once, and numbers are those
of one device and one thread."""

from __future__ import annotations

import asyncio
import copy
import multiprocessing
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import partway as pw
from partway import auto_parallel_context, reset_auto_parallel_context, set_auto_parallel_context
from partway.compiler import planning_lock as plans
from partway.compiler.planning_lock import planning
from partway.options.context import current, current_algo
from partway.requests.request import engine_of


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.down(torch.relu(self.norm(self.up(x))))
        return hidden


def sharded(plain: nn.Module) -> Any:
    return pw.shard(copy.deepcopy(plain), mesh={"dp": 2, "tp": 2}, in_strategy=(("dp", None),),
                    parameter_plan={"up.weight": ("tp", None)})  # fmt: skip


def together(count: int, run: Callable[[int], Any]) -> list[Any]:
    """What `run(i)` gives in `count` threads that begin at once."""
    barrier = threading.Barrier(count)

    def begin(i: int) -> Any:
        barrier.wait()
        return run(i)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


# -- Options


def test_a_block_is_its_threads_own() -> None:
    entered, left = threading.Barrier(2), threading.Barrier(2)

    def run(i: int) -> tuple[int, int]:
        """Enter A, enter B, leave A, leave B."""
        if i:
            entered.wait()
        with auto_parallel_context(device_num=8 if i else 4):
            if not i:
                entered.wait()
            inside = current().device_num
            if i:
                left.wait()
        if not i:
            left.wait()
        return inside, current().device_num

    assert together(2, run) == [(4, 1), (8, 1)]
    assert current().device_num == 1


def test_a_block_ends_what_is_set_in_it_and_does_not_see_what_others_set() -> None:
    with auto_parallel_context(device_num=4):
        set_auto_parallel_context(full_batch=False)
        assert (current().device_num, current().full_batch) == (4, False)
        together(1, lambda _: set_auto_parallel_context(batch_norm_parts=2))
        assert current().batch_norm_parts == 1
        with auto_parallel_context(device_num=2):
            reset_auto_parallel_context()
            assert (current().device_num, current().full_batch) == (1, True)
        assert (current().device_num, current().full_batch) == (4, False)
        assert together(1, lambda _: current().device_num) == [1]
    assert (current().device_num, current().full_batch, current().batch_norm_parts) == (1, True, 2)


def test_blocks_that_end_in_another_order_leave_nothing_behind() -> None:
    first, second = auto_parallel_context(device_num=4), auto_parallel_context(full_batch=False)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not current().full_batch
    second.__exit__(None, None, None)
    assert (current().device_num, current().full_batch) == (1, True)


def test_a_block_is_its_tasks_own() -> None:
    async def run(number: int) -> tuple[int, int]:
        with auto_parallel_context(device_num=number):
            await asyncio.sleep(0.01 * number)
            inside = current().device_num
        return inside, current().device_num

    async def every() -> list[tuple[int, int]]:
        return await asyncio.gather(*map(run, (2, 3, 4)))

    assert asyncio.run(every()) == [(2, 1), (3, 1), (4, 1)]


def test_a_backward_has_the_options_of_its_call() -> None:
    torch.manual_seed(0)
    plain, x = Net().double(), torch.randn(8, 16, dtype=torch.float64)
    model = sharded(plain)
    with auto_parallel_context(gradients_mean=False):
        result = model(x)
    together(1, lambda _: result.mean().backward())
    plain(x).mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad * 2, rtol=1e-12, atol=1e-14)


# -- Calls


def test_first_calls_of_one_module_plan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = sharded(plain)
    planned = []
    plan = type(engine_of(model))._plan
    monkeypatch.setattr(type(engine_of(model)), "_plan", lambda *args: planned.append(1) or plan(*args))
    inputs = [torch.randn(8, 16, dtype=torch.float64) for _ in range(4)]
    results = together(4, lambda i: model(inputs[i]))
    assert len(planned) == 1
    for x, result in zip(inputs, results, strict=True):
        torch.testing.assert_close(result, plain(x), rtol=1e-12, atol=1e-13)


def test_first_calls_of_several_modules_are_right() -> None:
    torch.manual_seed(0)
    plains = [nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()).double() for _ in range(3)]
    models = [pw.shard(copy.deepcopy(plain), mesh={"dp": 2}, in_strategy=(("dp", None),)) for plain in plains]
    x = torch.randn(8, 16, dtype=torch.float64)

    def step(i: int) -> Tensor:
        result: Tensor = models[i](x)
        result.pow(2).mean().backward()
        return result

    for result, model, plain in zip(together(3, step), models, plains, strict=True):
        torch.testing.assert_close(result, expected := plain(x), rtol=1e-12, atol=1e-12)
        expected.pow(2).mean().backward()
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(model[1].running_var, plain.get_submodule("1").running_var)


def test_calls_of_several_sizes_in_several_threads_are_right() -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = sharded(plain)
    batches = {size: torch.randn(size, 16, dtype=torch.float64) for size in (4, 6, 8, 12)}
    expected = {size: plain(x).detach() for size, x in batches.items()}

    def run(i: int) -> float:
        worst = 0.0
        for k in range(40):
            size = (4, 6, 8, 12)[(i + k) % 4 if k % 3 else i]
            with torch.inference_mode(i % 2 == 0):
                worst = max(worst, float((model(batches[size]).detach() - expected[size]).abs().max()))
        return worst

    assert max(together(4, run)) < 1e-12


def test_what_is_differentiated_in_several_threads_is_right() -> None:
    torch.manual_seed(0)
    plain = Net().double()
    model = sharded(plain)
    inputs = [torch.randn(8, 16, dtype=torch.float64) for _ in range(4)]

    def gradients(one: Any, i: int) -> list[Tensor]:
        found: list[Tensor] = []
        for _ in range(10):
            found = list(torch.autograd.grad(one(inputs[i]).pow(2).mean(), list(one.parameters())))
        return found

    for i, found in enumerate(together(4, lambda i: gradients(model, i))):
        for one, other in zip(found, gradients(plain, i), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


def test_blocks_of_no_sync_that_overlap_end_both() -> None:
    model = sharded(Net().double())
    first, second = model.no_sync(), model.no_sync()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert engine_of(model).waiting.blocks
    second.__exit__(None, None, None)
    assert not engine_of(model).waiting.blocks


# -- Random numbers


def test_planning_draws_no_number_and_gives_no_other_thread_one_twice() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5))
    seen: list[float] = []
    done = threading.Event()

    def draw() -> None:
        while not done.is_set():
            seen.append(float(torch.rand((), dtype=torch.float64)))

    before = torch.get_rng_state()
    for mode in ("counter", "torch", "rank"):
        with auto_parallel_context(random_numbers=mode):
            _ = pw.compile(model, (torch.ones(8, 16),), mesh={"dp": 2}).program
    assert torch.equal(before, torch.get_rng_state())
    thread = threading.Thread(target=draw)
    thread.start()
    for size in (8, 16):
        _ = pw.compile(model, (torch.ones(size, 16),), mesh={"dp": 2}).program
    done.set()
    thread.join()
    assert len(set(seen)) == len(seen) > 100


# -- Who plans


@contextmanager
def in_another_thread(run: Callable[[], object]) -> Iterator[threading.Thread]:
    """`run` in another thread, which has ended after the block."""
    thread = threading.Thread(target=run)
    thread.start()
    yield thread
    thread.join(60)
    assert not thread.is_alive()


def waiting_in_a_hook() -> tuple[Any, threading.Event, threading.Event]:
    """A sharded module each of whose calls waits: what is set when it is in one, and what lets it go on."""
    inside, go_on = threading.Event(), threading.Event()
    model = sharded(Net().double())
    model(torch.ones(8, 16, dtype=torch.float64))

    def wait(module: nn.Module, args: Any) -> None:
        inside.set()
        go_on.wait(60)

    model.register_forward_pre_hook(wait)
    return model, inside, go_on


def test_who_plans_waits_for_the_calls_that_run() -> None:
    model, inside, go_on = waiting_in_a_hook()
    planned = threading.Event()
    x = torch.ones(8, 16, dtype=torch.float64)

    def plan() -> None:
        with planning():
            planned.set()

    with in_another_thread(lambda: model(x)):
        assert inside.wait(60)
        with in_another_thread(plan):
            assert not planned.wait(0.2)
            go_on.set()
            assert planned.wait(60)


def test_a_call_that_waits_long_for_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "_LONG", 0.01)
    model, inside, go_on = waiting_in_a_hook()
    with in_another_thread(lambda: model(torch.ones(8, 16, dtype=torch.float64))):
        assert inside.wait(60)
        threading.Timer(0.3, go_on.set).start()
        said = "planning has waited 0 seconds for the sharded calls of other threads"
        with pytest.warns(UserWarning, match=said), planning():
            pass


def test_a_call_that_an_error_ends_is_not_waited_for() -> None:
    model = sharded(Net().double())
    x = torch.ones(8, 16, dtype=torch.float64)
    model(x)
    handle = model.register_forward_pre_hook(lambda *_: 1 / 0)

    def run(i: int) -> None:
        with pytest.raises(ZeroDivisionError):
            model(x)

    together(2, run)
    handle.remove()
    assert not any(plans.calls.values())
    together(1, lambda _: model(x[:4]))


def test_who_forks_while_another_thread_plans_may_plan_itself() -> None:
    inside, done = threading.Event(), threading.Event()

    def hold() -> None:
        with planning():
            inside.set()
            done.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    queue = multiprocessing.get_context("fork").SimpleQueue()

    def child() -> None:
        with planning():
            queue.put("planned")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12: threads and fork
        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
    process.join(30)
    assert process.exitcode == 0
    assert queue.get() == "planned"
    done.set()
    thread.join()


def test_a_failed_plan_lets_the_next_thread_plan() -> None:
    def wrong(x: Tensor) -> Tensor:
        raise ZeroDivisionError

    model = sharded(Net().double())
    x = torch.ones(8, 16, dtype=torch.float64)

    def run(i: int) -> str:
        try:
            (pw.shard(wrong, mesh={"dp": 2}) if i % 2 else model)(x)
        except pw.strategy.CaptureError:
            return "refused"
        return "ran"

    assert together(4, run) == ["ran", "refused"] * 2
    assert current_algo().fully_use_devices

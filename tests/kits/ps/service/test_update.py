"""Steps on pieces and on tables by rows have the numbers of the plain optimizer on one tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from partway.ps.service.pieces import Parameter, RowRange
from partway.ps.service.update import OptimizerMaker, ServerShard, Table, is_by_element, is_of_rows

EXACT = 1e-12


class Signs(optim.Optimizer):
    """Anyone's own: steps by the sign of a running mean, with a number of its own beside its groups."""

    def __init__(self, params: Any, lr: float = 0.1, keep: float = 0.8) -> None:
        super().__init__(params, {"lr": lr, "keep": keep})
        self.half = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["mean"], state["count"] = torch.zeros_like(parameter), 0
                state["count"] += 1
                state["mean"].mul_(group["keep"]).add_(parameter.grad, alpha=1 - group["keep"])
                parameter.sub_(state["mean"].sign() * self.half * group["lr"] / state["count"])


class ByNorm(optim.Optimizer):
    """Its step of an element depends on all others."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * parameter.grad / parameter.grad.norm())


CASES: list[tuple[type[optim.Optimizer], dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "maximize": True}),
    (optim.Adam, {"lr": 0.01}),
    (optim.Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    (optim.Adam, {"lr": 0.01, "betas": (0.0, 0.9), "maximize": True}),
    (optim.AdamW, {"lr": 0.01}),
    (optim.AdamW, {"lr": 0.01, "amsgrad": True}),
    (optim.Adagrad, {"lr": 0.1}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.3}),
    (optim.RMSprop, {"lr": 0.01}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True}),
    (optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "weight_decay": 0.1}),
    (optim.NAdam, {"lr": 0.01}),
    (optim.NAdam, {"lr": 0.01, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, {"lr": 0.01}),
    (optim.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    (optim.Adamax, {"lr": 0.01}),
    (optim.Adadelta, {"lr": 0.1}),
    (optim.Adadelta, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.ASGD, {"lr": 0.01}),
    (optim.ASGD, {"lr": 0.01, "t0": 4.0, "weight_decay": 0.1}),
    (optim.Rprop, {"lr": 0.01}),
    (Signs, {"lr": 0.1}),
]


def name_of(case: tuple[type[optim.Optimizer], dict[str, Any]]) -> str:
    return "-".join([case[0].__name__, *(f"{key}={value}" for key, value in case[1].items() if key != "lr")])


by_case = pytest.mark.parametrize(("kind", "options"), CASES, ids=[name_of(case) for case in CASES])


def random_of(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def drawn(*shape: int, seed: torch.Generator) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=seed)


def own_options(optimizer: optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def rows_of(state: dict[str, Any], rows: slice, whole: Tensor) -> dict[str, Any]:
    """What an optimizer keeps of some rows."""
    own = {key: kept.clone() if isinstance(kept, Tensor) else kept for key, kept in state.items()}
    return {key: kept[rows].clone() if is_of_rows(key, kept, whole) else kept for key, kept in own.items()}


# -- Dense pieces


@by_case
def test_steps_of_pieces_are_those_of_the_whole(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    seed = random_of(0)
    first, second = nn.Parameter(drawn(11, 3, seed=seed)), nn.Parameter(drawn(5, seed=seed))
    plain = kind([{"params": [first]}, {"params": [second], "lr": options["lr"] / 2}], **options)
    parameters = {0: Parameter(0, "a", (11, 3), "float64", 8), 1: Parameter(1, "b", (5,), "float64", 8, 1)}
    shard = ServerShard(OptimizerMaker.of(plain), parameters)
    cuts = {0: [slice(0, 4), slice(4, 8), slice(8, 11)], 1: [slice(0, 5)]}
    for index, whole in ((0, first), (1, second)):
        for rows in cuts[index]:
            piece = RowRange(index, rows.start, rows.stop)
            shard.put(piece, whole.detach()[rows].clone(), rows_of(plain.state.get(whole, {}), rows, whole))
    for step in range(6):
        for group in plain.param_groups:
            group["lr"] *= 0.9
        first.grad = drawn(11, 3, seed=seed)
        second.grad = drawn(5, seed=seed) if step != 2 else None  # it is not used in this step
        plain.step()
        used = {0: first, 1: second} if second.grad is not None else {0: first}
        gradients = {
            f"{index}:{rows.start}": whole.grad[rows].clone()
            for index, whole in used.items()
            for rows in cuts[index]
            if whole.grad is not None
        }
        shard.step(gradients, own_options(plain))
        if step == 3:  # a piece goes, and comes again with what it had
            value, state = shard.values["0:4"].detach().clone(), shard.state("0:4")
            shard.remove("0:4")
            shard.put(RowRange(0, 4, 8), value, state)
    for index, whole in ((0, first), (1, second)):
        got = torch.cat([shard.values[f"{index}:{rows.start}"].detach() for rows in cuts[index]])
        assert float((got - whole.detach()).abs().max()) <= EXACT
        for rows in cuts[index]:
            kept = shard.state(f"{index}:{rows.start}")
            expected = rows_of(plain.state[whole], rows, whole)
            assert kept.keys() == expected.keys()
            for key, value in expected.items():
                torch.testing.assert_close(kept[key], value, rtol=0, atol=EXACT)


def test_a_piece_that_was_not_stepped_has_the_state_that_it_came_with() -> None:
    one = nn.Parameter(torch.ones(2, 2, dtype=torch.float64))
    shard = ServerShard(OptimizerMaker.of(optim.Adam([one])), {0: Parameter(0, "a", (4, 2), "float64", 8)})
    shard.put(RowRange(0, 0, 2), torch.ones(2, 2, dtype=torch.float64), {})
    shard.put(RowRange(0, 2, 4), torch.ones(2, 2, dtype=torch.float64), {})
    shard.step({}, own_options(optim.Adam([one])))
    assert shard.state("0:0") == {}
    shard.step({"0:0": torch.ones(2, 2, dtype=torch.float64)}, own_options(optim.Adam([one])))
    assert shard.state("0:0").keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert shard.state("0:2") == {}
    assert torch.equal(shard.values["0:2"].detach(), torch.ones(2, 2, dtype=torch.float64))


# -- Tables by rows

ROWS, WIDTH, STEPS = 13, 3, 24


def table_of(whole: Tensor, state: dict[str, Any]) -> Table:
    own = rows_of(state, slice(None), whole)
    tensors = {key: kept for key, kept in own.items() if is_of_rows(key, kept, whole)}
    numbers = {key: kept for key, kept in own.items() if key not in tensors}
    last = torch.zeros(len(whole), dtype=torch.int64)
    return Table(whole.detach().clone(), tensors, numbers, tuple(tensors), last)


def touched(step: int, seed: torch.Generator) -> Tensor:
    """The rows that a step touches, each once: none in some steps, row 0 in none of the first."""
    count = [0, 1, 4, 2][step % 4]
    ids = torch.randperm(ROWS - 1, generator=seed)[:count].sort().values
    return ids + 1 if step < STEPS - 2 else ids


def all_caught_up(table: Table, maker: OptimizerMaker) -> Tensor:
    table.catch_up(maker, torch.arange(len(table.value)))
    return table.value


@by_case
@pytest.mark.parametrize("before", [0, 3], ids=["new", "resumed"])
def test_steps_of_touched_rows_are_those_of_the_whole_table(
    kind: type[optim.Optimizer], options: dict[str, Any], before: int
) -> None:
    seed = random_of(1)
    whole = nn.Parameter(drawn(ROWS, WIDTH, seed=seed))
    plain = kind([whole], **options)
    for _ in range(before):
        whole.grad = drawn(ROWS, WIDTH, seed=seed)
        plain.step()
    maker, table = OptimizerMaker.of(plain), table_of(whole, plain.state.get(whole, {}))
    for step in range(STEPS):
        plain.param_groups[0]["lr"] *= 0.95
        ids = touched(step, seed)
        rows = drawn(len(ids), WIDTH, seed=seed)
        whole.grad = torch.zeros_like(whole).index_copy(0, ids, rows)
        plain.step()
        table.step(maker, own_options(plain)[0], ids, rows)
        if step % 5 == 4:  # rows are read between steps
            some = torch.randperm(ROWS, generator=seed)[:3].sort().values
            table.catch_up(maker, some)
            assert float((table.value[some] - whole.detach()[some]).abs().max()) <= EXACT
    assert float((all_caught_up(table, maker) - whole.detach()).abs().max()) <= EXACT
    kept = table.whole_state(maker)
    assert kept.keys() == plain.state.get(whole, {}).keys()
    for key, value in kept.items():
        torch.testing.assert_close(value, plain.state[whole][key], rtol=0, atol=EXACT)


@pytest.mark.parametrize("amount", [0.0, 0.9])
def test_momentum_and_weight_decay_that_change_count_for_the_steps_that_rows_missed(amount: float) -> None:
    seed = random_of(2)
    whole = nn.Parameter(drawn(ROWS, WIDTH, seed=seed))
    plain = optim.SGD([whole], lr=0.1, momentum=amount, dampening=0.2)
    maker, table = OptimizerMaker.of(plain), table_of(whole, {})
    for step in range(STEPS):
        if step % 6 == 5:
            plain.param_groups[0]["momentum"] = 0.9 - plain.param_groups[0]["momentum"]
        plain.param_groups[0]["weight_decay"] = 0.1 * (step // 3 % 2)
        ids = touched(step, seed)
        rows = drawn(len(ids), WIDTH, seed=seed)
        whole.grad = torch.zeros_like(whole).index_copy(0, ids, rows)
        plain.step()
        table.step(maker, own_options(plain)[0], ids, rows)
    assert float((all_caught_up(table, maker) - whole.detach()).abs().max()) <= EXACT


def test_sparse_adam_steps_touched_rows_as_it_does_with_sparse_gradients() -> None:
    seed = random_of(3)
    whole = nn.Parameter(drawn(ROWS, WIDTH, seed=seed))
    plain = optim.SparseAdam([whole], lr=0.05)
    maker, table = OptimizerMaker.of(plain), table_of(whole, {})
    assert maker.takes_sparse
    for step in range(STEPS):
        plain.param_groups[0]["lr"] *= 0.95
        ids = touched(step, seed) if step else torch.zeros(0, dtype=torch.int64)
        rows = drawn(len(ids), WIDTH, seed=seed)
        whole.grad = torch.sparse_coo_tensor(ids[None], rows, whole.shape, check_invariants=True)
        plain.step()
        table.step(maker, own_options(plain)[0], ids, rows)
    assert float((all_caught_up(table, maker) - whole.detach()).abs().max()) <= EXACT
    for key, value in table.state.items():
        assert float((value - plain.state[whole][key]).abs().max()) <= EXACT
    assert table.whole_state(maker)["step"] == plain.state[whole]["step"]


@by_case
def test_a_table_that_was_stored_in_between_goes_on_as_one_that_was_not(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    seed = random_of(4)
    start = drawn(ROWS, WIDTH, seed=seed)
    steps = [(ids, drawn(len(ids), WIDTH, seed=seed)) for ids in (touched(step, seed) for step in range(STEPS))]
    values = []
    for stored in (False, True):
        whole = nn.Parameter(start.clone())
        plain = kind([whole], **options)
        maker, table = OptimizerMaker.of(plain), table_of(whole, plain.state.get(whole, {}))
        for step, (ids, rows) in enumerate(steps):
            plain.param_groups[0]["lr"] = 0.1 * 0.9**step
            table.step(maker, own_options(plain)[0], ids, rows)
            if stored and step % 7 == 3:
                state = {key: kept.clone() for key, kept in table.state.items()}
                table = Table(
                    table.value.clone(), state, dict(table.base), table.began, table.last.clone(), table.time,
                    dict(table.runs),
                )  # fmt: skip
        values.append(all_caught_up(table, maker))
    assert torch.equal(*values)


# -- What follows from the optimizer


@by_case
def test_rows_that_are_owed_nothing_are_not_changed_by_a_step_without_a_gradient(
    kind: type[optim.Optimizer], options: dict[str, Any]
) -> None:
    seed = random_of(5)
    whole = nn.Parameter(drawn(ROWS, WIDTH, seed=seed))
    plain = kind([whole], **options)
    for _ in range(3):
        whole.grad = drawn(ROWS, WIDTH, seed=seed)
        plain.step()
    before = whole.detach().clone()
    state = rows_of(plain.state.get(whole, {}), slice(None), whole)
    whole.grad = torch.zeros_like(whole)
    plain.step()
    same = torch.equal(before, whole.detach()) and all(
        torch.equal(kept, plain.state[whole][key]) for key, kept in state.items() if is_of_rows(key, kept, whole)
    )
    leaves = OptimizerMaker.of(plain).leaves_untouched_rows(own_options(plain)[0])
    assert same or not leaves
    assert leaves == (
        kind in (optim.SGD, optim.Adagrad) and not options.get("momentum") and not options.get("weight_decay")
    )


@by_case
def test_an_optimizer_of_each_element_is_known(kind: type[optim.Optimizer], options: dict[str, Any]) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2, 2))], **options)
    assert is_by_element(OptimizerMaker.of(optimizer), own_options(optimizer)[0])


def test_sparse_adam_steps_each_element_by_itself() -> None:
    optimizer = optim.SparseAdam([nn.Parameter(torch.ones(2, 2))])
    assert is_by_element(OptimizerMaker.of(optimizer), own_options(optimizer)[0])


@pytest.mark.parametrize("kind", [optim.Adafactor, optim.Muon, ByNorm])
def test_an_optimizer_whose_step_depends_on_other_rows_is_known(kind: type[optim.Optimizer]) -> None:
    optimizer = kind([nn.Parameter(torch.ones(2, 2))], lr=0.1)  # type: ignore[call-arg]
    assert not is_by_element(OptimizerMaker.of(optimizer), own_options(optimizer)[0])


def test_an_optimizer_that_fails_on_a_matrix_is_not_one_of_each_element() -> None:
    class OfImages(ByNorm):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            raise ValueError("images only")

    optimizer = OfImages([nn.Parameter(torch.ones(2, 2))])
    assert not is_by_element(OptimizerMaker.of(optimizer), own_options(optimizer)[0])


def test_an_optimizer_like_the_workers_has_its_attributes_and_not_its_parameters() -> None:
    one, two = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    own = Signs([one])
    own.half = 0.25
    maker = OptimizerMaker.of(own)
    assert maker.attributes == {"defaults": {"lr": 0.1, "keep": 0.8}, "half": 0.25}
    made = maker.make([{**own_options(own)[0], "params": [two]}], {})
    assert type(made) is Signs
    two.grad = torch.ones(2)
    made.step()
    assert torch.equal(two.detach(), torch.full((2,), 0.975))
    assert torch.equal(one.detach(), torch.ones(2))

"""What else PyTorch and Python do with a sharded module: compile it, pickle it, copy it, call it with other parameters,
transform it. It is right, or one sentence says why not."""

from __future__ import annotations

import copy
import io
import logging
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn
from torch.func import functional_call

import partway as pw
from partway.strategy import RuntimeStateError, StrategyError

pytestmark = [
    # what torch.func and forward_ad import warns about itself, and torch.compile looks at every tensor's .grad
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]

Ranks = Callable[..., list[Any]]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.norm(torch.tanh(self.up(x))))
        return result


@pw.shard(mesh={"dp": 2}, in_strategy=(("dp", None), None))
def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def plain_product(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


X = torch.linspace(-2, 2, 8 * 16, dtype=torch.float64).view(8, 16).sin()
W = torch.linspace(-1, 1, 16 * 4, dtype=torch.float64).view(16, 4).cos()


def pair() -> tuple[Any, Any]:
    torch.manual_seed(0)
    plain = Net().double()
    n = pw.init(simulate=4)
    model = pw.shard(copy.deepcopy(plain), mesh={"dp": 2, "tp": n // 2}, in_strategy=(("dp", None),),
                     parameter_plan={"up.weight": ("tp", None)})  # fmt: skip
    return plain, model


def assert_trains_alike(model: Any, plain: Any, calls: int = 2) -> None:
    for _ in range(calls):
        got, expected = model(X), plain(X)
        torch.testing.assert_close(whole(got), expected, rtol=1e-12, atol=1e-12)
        whole(got).pow(2).mean().backward()
        expected.pow(2).mean().backward()
    for (name, one), other in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        torch.testing.assert_close(whole(one.grad), other[1].grad, rtol=1e-10, atol=1e-12, msg=name)
    for (name, one), other in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        torch.testing.assert_close(one, other[1], msg=name)


# -- torch.compile


def test_torch_compile_breaks_its_graph_at_a_sharded_call() -> None:
    plain, model = pair()
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def around(x: Tensor) -> Tensor:
        result: Tensor = model(x.tanh() * 2).sin()
        return result

    torch._dynamo.reset()
    compiled = torch.compile(around, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(compiled(X), plain(X.tanh() * 2).sin(), rtol=1e-12, atol=1e-12)
    assert len(graphs) == 2  # what is before the call, and what is after it
    torch._dynamo.reset()
    with pytest.raises(Exception, match="a sharded call is planned and compiled by Partway"):
        torch.compile(around, backend=backend, fullgraph=True)(X)


@pytest.mark.parametrize("planned", [False, True])
def test_a_compiled_sharded_module_trains_alike(planned: bool) -> None:
    plain, model = pair()
    if planned:
        assert_trains_alike(model, plain, 1)
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="eager")
    for _ in range(2):
        got, expected = compiled(X), plain(X)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
        got.pow(2).mean().backward()
        expected.pow(2).mean().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


def test_a_sharded_function_may_be_called_in_what_is_compiled() -> None:
    torch._dynamo.reset()
    found = torch.compile(lambda x, w: product(x, w) + 1, backend="eager")(X, W)
    torch.testing.assert_close(found, plain_product(X, W) + 1, rtol=1e-12, atol=1e-12)


def blocks(model: Any) -> None:
    for part in (model.up, model.down):
        part.compile(backend="eager", fullgraph=True)


def wrapped_forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, backend="eager")


class Helped(Net):
    """Calls a compiled helper, method and module in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.up: Any = torch.compile(self.up, backend="eager")

    def forward(self, x: Tensor) -> Tensor:
        return self.last(helper(self.up(x)))

    @torch.compile(backend="eager")
    def last(self, x: Tensor) -> Tensor:
        result: Tensor = self.down(self.norm(x))
        return result


@torch.compile(backend="eager", dynamic=True)
def helper(x: Tensor) -> Tensor:
    return torch.tanh(x)


# How a model is compiled: before it is sharded, after that, and after its first call.
Compiles = Callable[[Any], None]
IN_PLACE: dict[str, tuple[Compiles | None, Compiles | None, Compiles | None]] = {
    "before": (lambda model: model.compile(backend="eager"), None, None),
    "before, whole": (lambda model: model.compile(backend="eager", fullgraph=True), None, None),
    "after": (None, lambda model: model.compile(backend="eager"), None),
    "after a call": (None, None, lambda model: model.compile(backend="eager", fullgraph=True)),
    "blocks": (blocks, None, None),
    "blocks after": (None, blocks, None),
    "blocks after a call": (None, None, blocks),
    "its forward": (None, wrapped_forward, None),
    "its forward after a call": (None, None, wrapped_forward),
    "inside": (None, None, None),
}


def compiled_in_place(way: str) -> None:
    before, after, late = IN_PLACE[way]
    torch._dynamo.reset()
    torch.manual_seed(0)
    plain = (Helped if way == "inside" else Net)().double()
    model = copy.deepcopy(plain)
    n = pw.init(simulate=2)
    if before:
        before(model)
    model = pw.shard(model, mesh={"dp": n}, in_strategy=(("dp", None),))
    if after:
        after(model)
    assert_trains_alike(model, plain, 1)
    planned = None
    if late:
        planned = model.plan
        late(model)
    assert_trains_alike(model, plain, 2)
    assert "dp" in str(model.plan)
    if planned and "forward" not in way:  # to compile parts of it makes no other call of it
        assert planned is model.plan


@pytest.mark.parametrize("way", IN_PLACE)
def test_a_model_that_is_compiled_in_place_trains_by_its_plan(way: str) -> None:
    log, said = logging.getLogger("partway"), io.StringIO()
    handler = logging.StreamHandler(said)
    log.addHandler(handler)
    try:
        compiled_in_place(way)
    finally:
        log.removeHandler(handler)
    whole_model = way.startswith(("before", "after"))
    assert said.getvalue().count("Net.compile() is set aside: the plan of a sharded module") == whole_model


@pytest.mark.gloo
@pytest.mark.parametrize("n", [2, 4])
def test_a_model_that_is_compiled_in_place_trains_by_its_plan_on_ranks(on_ranks: Ranks, n: int) -> None:
    on_ranks(n, all_compiled_in_place, [*IN_PLACE] if n == 2 else ["before", "blocks after a call", "inside"])


def all_compiled_in_place(ways: list[str]) -> None:
    with warnings.catch_warnings():  # as `pytestmark` says
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        for way in ways:
            compiled_in_place(way)


def test_a_model_that_is_compiled_in_place_stays_so_in_stand_alone_mode() -> None:
    torch._dynamo.reset()
    plain = Net().double()
    model: Any = copy.deepcopy(plain)
    model.compile(backend="eager")
    with pw.auto_parallel_context(parallel_mode="stand_alone"):
        assert_trains_alike(pw.shard(model, mesh={"dp": 2}), plain)
    assert model._compiled_call_impl is not None


def test_a_forward_of_the_object_alone_is_refused_since_it_would_run_instead() -> None:
    model = Net()
    wrapped_forward(model)
    with pytest.raises(
        StrategyError, match=r"a forward of its own .*, which would run in place of a plan.*after shard"
    ):
        pw.shard(model, mesh={"dp": 2})


# -- Pickle and copies


def pickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def saved(module: Any) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("again", [pickled, saved, copy.deepcopy])
@pytest.mark.parametrize("planned", [False, True])
def test_a_module_that_was_pickled_or_copied_plans_anew_with_what_was_said(again: Any, planned: bool) -> None:
    plain, model = pair()
    if planned:
        assert_trains_alike(model, plain)
    other = again(model)
    assert type(other) is type(model)
    assert isinstance(other, Net)
    with pytest.raises(RuntimeStateError, match="there is no plan yet"):
        _ = other.plan
    for module in (other, plain):
        module.zero_grad()
    assert_trains_alike(other, plain)
    assert (
        other.plan.parameters["up.weight"].placements == model.plan.parameters["up.weight"].placements if planned else 1
    )
    inside = again(nn.Sequential(model, nn.ReLU()))
    torch.testing.assert_close(inside(X), torch.relu(model(X)))


def test_a_shallow_copy_shares_parameters_and_has_flags_of_its_own() -> None:
    plain, model = pair()
    other = copy.copy(model)
    assert other.up is model.up
    assert_trains_alike(other, plain)
    other.training = False
    assert model.training


def test_functions_are_pickled_by_name_or_with_what_they_shard() -> None:
    assert copy.deepcopy(product) is product
    other = pickled(pw.shard(plain_product, mesh={"dp": 4}))
    torch.testing.assert_close(other(X, W), plain_product(X, W), rtol=1e-12, atol=1e-12)


class Stubborn(nn.Linear):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Linear, (4, 4)


def test_a_module_with_a_reduce_of_its_own_is_refused() -> None:
    model = pw.shard(Stubborn(4, 4), mesh={"dp": 2})
    with pytest.raises(RuntimeStateError, match="Stubborn is pickled and copied by a __reduce__ of its own"):
        pickle.dumps(model)


def not_pickled() -> None:
    _, model = pair()
    with pytest.raises(RuntimeStateError, match="Net is not pickled as a whole, since each process has parts of it"):
        pickle.dumps(model)


@pytest.mark.gloo
def test_a_process_does_not_pickle_a_module(on_ranks: Ranks) -> None:
    on_ranks(2, not_pickled)


# -- Other parameters


def calls_with_other_parameters(first: bool) -> None:
    """The parameters of the call are used, and gradients reach what they are made of; afterwards all is as it was."""
    plain, model = pair()
    if not first:
        assert_trains_alike(model, plain)
    start = torch.linspace(0.1, 0.2, 1, dtype=torch.float64)
    names = [name for name, _ in plain.named_parameters()]
    found = []
    for module, inner in ((model, plain), (plain, copy.deepcopy(plain))):
        module.zero_grad()
        shift = start.clone().requires_grad_()
        own = {name: inner.get_parameter(name).detach() * 2 for name in names}
        leaves = {name: tensor.requires_grad_() for name, tensor in own.items()}
        whole(functional_call(module, leaves, (X,))).pow(2).mean().backward()
        made = {name: tensor.detach() * shift for name, tensor in own.items()}
        with (module.no_sync if module is model else torch.enable_grad)():
            whole(functional_call(module, made, (X,))).pow(2).mean().backward()
        some = {"down.bias": leaves["down.bias"]}
        found.append([shift.grad, *(leaf.grad for leaf in leaves.values()), whole(functional_call(module, some, (X,)))])
        assert all(parameter.grad is None for parameter in module.parameters())
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    assert_trains_alike(model, plain)


@pytest.mark.parametrize("first", [False, True])
def test_functional_call_uses_the_parameters_of_the_call(first: bool) -> None:
    calls_with_other_parameters(first)


@pytest.mark.gloo
@pytest.mark.parametrize("first", [False, True])
def test_functional_call_uses_the_parameters_of_the_call_on_processes(on_ranks: Ranks, first: bool) -> None:
    on_ranks(2, calls_with_other_parameters, first)


# -- Transforms (test_second_derivatives.py has the others)


def test_jacobians_row_by_row_are_right() -> None:
    plain, model = pair()
    got, expected = (torch.autograd.functional.jacobian(lambda x, m=m: m(x).sum(0), X) for m in (model, plain))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)

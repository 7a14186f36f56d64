"""`shard` on functions, as a decorator, and inside what is being sharded; operators that have no rule."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bend import bend
from checks import assert_same_gradients, counted, gradients
from torch import Tensor, nn
from zoo import CASES, MLP

import partway as pw

pytestmark = pytest.mark.deep

MESH = {"dp": 2, "tp": 4}
EXACT = 1e-10


def assert_same_function(sharded: Any, plain: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
    """Values and gradients of every argument are those of one device, and what ran is what was planned."""
    torch.manual_seed(1)
    given = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    again = [x.detach().clone().requires_grad_() for x in given]
    expected = plain(*given)
    with pw.record_collectives() as events:
        found = sharded(*again)
        torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
        found.square().sum().backward()
    expected.square().sum().backward()
    for x, y in zip(again, given, strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=EXACT, atol=EXACT)
    assert counted(events) == counted(sharded.plan.collectives)


def layout_of(plan: Any, name: str) -> str:
    return next(" ".join(t.codes) for t in (*plan.inputs, *plan.outputs) if t.name == name)


def constraints(plan: Any) -> list[tuple[tuple[str, ...], ...]]:
    """The layouts where the constraints stand, with R for both ways to be whole on every rank."""
    found = [o.results for o in plan.operators if o.operator.endswith("constrain.default")]
    return [tuple(tuple("R" if code == "B" else code for code in codes) for codes in results) for results in found]


def product(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


# -- functions


def test_a_decorator_without_arguments_splits_by_the_context() -> None:
    @pw.shard
    def f(x: Tensor, w: Tensor) -> Tensor:
        """Docs stay."""
        return product(x, w)

    pw.set_auto_parallel_context(device_num=8)
    assert (f.__name__, f.__doc__) == ("f", "Docs stay.")
    assert_same_function(f, product, (8, 16), (16, 24))


def test_a_decorator_with_arguments_splits_as_told() -> None:
    pw.set_auto_parallel_context(device_num=8)

    @pw.shard(in_strategy=((8, 1), None), out_strategy=((1, 1),))
    def f(x: Tensor, w: Tensor) -> Tensor:
        return product(x, w)

    assert_same_function(f, product, (8, 16), (16, 24))
    assert set(layout_of(f.plan, "x").split()) == {"S0"}  # whatever mesh of 8 devices was the cheapest
    assert set(layout_of(f.plan, "result").split()) == {"R"}


@pytest.mark.parametrize(
    ("strategies", "out"),
    [
        ((("dp", None), (None, "tp")), (("dp", "tp"),)),
        (((None, "tp"), ("tp", None)), (("dp", None),)),
        (((("dp", "tp"), None), None), None),
        (((None, None), (None, None)), ((None, ("dp", "tp")),)),
        ({"w": ("tp", "dp")}, None),
    ],
)
def test_strategies_of_a_product_give_the_same_values(strategies: Any, out: Any) -> None:
    f = pw.shard(product, strategies, out, mesh=MESH)
    assert_same_function(f, product, (16, 16), (16, 24))


def test_a_split_sum_inside_a_product_is_reduced_once() -> None:
    f = pw.shard(product, ((None, "tp"), ("tp", None)), ((None, None),), mesh={"tp": 8})
    assert_same_function(f, product, (16, 16), (16, 24))
    forward = [str(c.kind) for c in f.plan.collectives if c.phase == "forward"]
    assert forward == ["all_reduce"]


def test_a_module_is_changed_in_place_and_returned() -> None:
    module = MLP().double()
    assert pw.shard(module, mesh=MESH) is module
    assert isinstance(module, MLP)


# -- constraints


def test_a_function_inside_a_sharded_one_is_a_constraint() -> None:
    @pw.shard(in_strategy=((None, "tp"),), out_strategy=(("dp", None),))
    def middle(x: Tensor) -> Tensor:
        return torch.relu(x) * 2

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return (torch.relu(x @ w) * 2).sin()

    @pw.shard(mesh=MESH, in_strategy=(("dp", None), None))
    def f(x: Tensor, w: Tensor) -> Tensor:
        return middle(x @ w).sin()

    assert_same_function(f, plain, (8, 16), (16, 24))
    assert constraints(f.plan) == [(("R", "S1"),), (("S0", "R"),)]


@pytest.mark.parametrize("by", [("tp", None), (8, 1), [pw.Replicate(), pw.Shard(0)]], ids=str)
def test_constraints_take_every_notation(by: Any) -> None:
    inner = pw.shard(lambda x: x * 3, in_strategy=(by,))
    options: dict[str, Any] = {"mesh": MESH}
    if by == (8, 1):
        pw.set_auto_parallel_context(device_num=8)
        options = {}
    f = pw.shard(lambda x, w: inner(x @ w), **options)
    assert_same_function(f, lambda x, w: (x @ w) * 3, (8, 16), (16, 24))


class Outer(nn.Module):
    def __init__(self, **inner: Any) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.ReLU())
        if inner:
            self.inner = pw.shard(self.inner, **inner)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.last(self.inner(self.first(x))), target)


def test_a_module_inside_a_sharded_one_is_a_constraint() -> None:
    torch.manual_seed(0)
    plain = Outer().double()
    torch.manual_seed(0)
    model: Any = Outer(
        in_strategy=(("dp", None),), out_strategy=((None, "tp"),), parameter_plan={"0.weight": ("tp", None)}
    ).double()
    assert list(model.state_dict()) == list(plain.state_dict())
    pw.shard(model, mesh=MESH)
    batch = CASES["mlp"].batch()
    _, expected = gradients(plain, batch)
    _, found = gradients(model, batch)
    assert_same_gradients(found, expected, EXACT)
    assert layout_of(model.plan, "inner.0.weight") == "R S0"
    assert constraints(model.plan) == [(("S0", "R"),), (("R", "S1"),)]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.up(x))
        return self.down(hidden if scale is None else hidden * scale), hidden


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Attention(), "norm": nn.LayerNorm(16)}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            assert isinstance(layer, nn.ModuleDict)
            y, hidden = layer["attn"](layer["norm"](x), scale=self.scale)
            x = x + y + hidden.mean()
        return x


@pytest.mark.parametrize("said", [(("dp", "tp"),), {"x": ("dp", "tp")}], ids=["by position", "by name"])
def test_a_module_plan_constrains_what_goes_into_modules_and_comes_out(said: Any) -> None:
    torch.manual_seed(0)
    plain = Layers().double()
    model: Any = copy.deepcopy(plain)
    out = ((None, "tp"), None)
    pw.shard(model, mesh=MESH, module_plan={"layers.*.attn": {"in_strategy": said, "out_strategy": out}})
    x = torch.randn(8, 16, dtype=torch.float64)
    with pw.record_collectives() as events:
        found = model(x)
        found.square().sum().backward()
    expected = plain(x)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=EXACT, atol=EXACT)
    assert constraints(model.plan) == [(("S0", "S1"),), (("R", "S1"),)] * 2
    assert counted(events) == counted(model.plan.collectives)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_compile_and_modules_inside_take_a_module_plan() -> None:
    model = Layers()
    layer: Any = model.layers[1]
    layer["attn"] = pw.shard(layer["attn"], module_plan={"up": {"out_strategy": (("tp", None),)}})
    outside = {"*.0.norm": {"in_strategy": (("dp", None),)}}
    plan = pw.compile(model, (torch.ones(8, 16),), mesh=MESH, module_plan=outside)
    assert constraints(plan.plan) == [(("S0", "R"),), (("R", "S0"),)]


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (
            {"layers.*.atn": {"in_strategy": (None,)}},
            "'layers.*.atn']: matches no module; did you mean 'layers.",
        ),
        ({"zzz": {"in_strategy": (None,)}}, "the modules inside are 'layers', 'layers.0', 'layers.0.attn'"),
        ({"layers.*[01]": {"in_strategy": (None,)}}, "'layers.*[01]']: matches no module that is called"),
        (
            {"*.attn": {"in_strategy": (None,)}, "layers.0.*": {"in_strategy": (None,)}},
            "module 'layers.0.attn': module_plan['*.attn'] and module_plan['layers.0.*'] both have an in_strategy",
        ),
        (
            {"*.attn": {"in_strategy": (("dp",),)}},
            "'x' of module 'layers.0.attn': ('dp',) has 1 entry for a tensor of 2",
        ),
        ({"*.attn": {"in_strategy": {"y": ("dp",)}}}, "module 'layers.1.attn', in_strategy['y']: there is no such arg"),
        ({"*.attn": {"out_strategy": (None,) * 3}}, "module 'layers.1.attn', out_strategy: has 3 entries for 2 output"),
        (
            {"*.attn": {"in": (("dp",),)}},
            "module_plan['*.attn']: has the key 'in' (str); write in_strategy or out_strategy",
        ),
        ({"*.attn": {"in_strategy": ("dp", None)}}, "['in_strategy']: ('dp', None) is the strategy of one tensor"),
        ({"*.attn": {"in_strategy": (("dp", 2.5),)}}, "module_plan['*.attn']['in_strategy'][0]"),
        ([("*.attn", None)], "module_plan: is [('*.attn', None)] (list)"),
        ({3: {"in_strategy": (None,)}}, "module_plan: has the key 3 (int); write a pattern on the paths of modules"),
    ],
)
def test_a_module_plan_that_cannot_be_met_says_why(plan: Any, words: str) -> None:
    with pytest.raises(pw.StrategyError) as found:
        pw.compile(Layers(), (torch.ones(8, 16),), mesh=MESH, module_plan=plan)
    assert words in str(found.value)


def test_a_function_has_no_modules_inside() -> None:
    with pytest.raises(pw.StrategyError, match="module_plan: is for the modules inside a module, but this"):
        pw.compile(torch.sin, (torch.ones(8),), mesh=MESH, module_plan={"a": {"in_strategy": (None,)}})


class WithMethod(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16, dtype=torch.float64))

    @pw.shard(in_strategy=(("dp", None),), out_strategy=((None, "tp"),))
    def middle(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.w)

    def forward(self, x: Tensor) -> Tensor:
        return self.middle(x) * 2


def test_a_method_inside_a_sharded_module_is_a_constraint() -> None:
    model: Any = WithMethod()
    x = torch.randn(8, 16, dtype=torch.float64)
    with pytest.raises(pw.StrategyError, match="middle is a method; shard the module it belongs to"):
        model(x)
    expected = torch.autograd.grad((torch.relu(x @ model.w) * 2).square().sum(), model.w)[0]
    with pw.auto_parallel_context(parallel_mode="stand_alone"):
        torch.testing.assert_close(model(x), torch.relu(x @ model.w) * 2)
    pw.shard(model, mesh=MESH)
    model(x).square().sum().backward()
    torch.testing.assert_close(model.w.grad, expected, rtol=EXACT, atol=EXACT)
    assert constraints(model.plan) == [(("S0", "R"),), (("R", "S1"),)]


def test_constraints_without_effect_on_values_when_called_alone() -> None:
    inner = pw.shard(lambda x: x * 3, in_strategy=(("tp", None),), mesh=MESH)
    assert_same_function(inner, lambda x: x * 3, (8, 16))


# -- whole in a constraint: Replicate, or Broadcast where that sends less


WHOLE = (None, None)


def chain(inner: Any) -> Callable[..., Tensor]:
    """Two products with `inner` between them."""
    return lambda x, w, v: torch.tanh(inner(torch.relu(x @ w)) @ v)


def test_the_gradient_of_what_a_constraint_gathers_is_scattered_at_once() -> None:
    """Both products are split by columns: the ranks hold addends of the gradient of what lies between them."""
    inner = pw.shard(lambda h: h * 2, in_strategy=(WHOLE,))
    columns = {"x": WHOLE, "w": (None, "tp"), "v": (None, "tp")}
    f = pw.shard(chain(inner), in_strategy=columns, out_strategy=((None, "tp"),), mesh={"tp": 4})
    assert_same_function(f, chain(lambda h: h * 2), (256, 128), (128, 256), (256, 64))
    assert [(o.results) for o in f.plan.operators if o.operator.endswith("constrain.default")] == [(("B",),)]
    assert [str(c.kind) for c in f.plan.collectives if c.tensor != "x"] == ["all_gather", "reduce_scatter"]
    # three quarters of the tensor each way; with Replicate its gradient would be all-reduced, which sends twice that
    sent = sum(c.wire_bytes for c in f.plan.collectives if c.tensor != "x")
    assert sent == pytest.approx(2 * 3 / 4 * 256 * 256 * 8)


def test_replicate_for_all_that_reads_a_value_without_a_gradient() -> None:
    inner = pw.shard(lambda h: h * 2, in_strategy=(WHOLE,))
    f = pw.shard(chain(inner), mesh=MESH)
    with torch.no_grad():
        x, w, v = torch.randn(8, 16), torch.randn(16, 8), torch.randn(8, 8)
        torch.testing.assert_close(f(x, w, v), chain(lambda h: h * 2)(x, w, v))
    assert constraints(f.plan) == [(("R", "R"),)]
    assert all(
        "B" not in codes for o in f.plan.operators if o.operator.endswith("constrain.default") for codes in o.results
    )


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, MESH], ids=["2x2", "2x4"])
@pytest.mark.parametrize("at", [WHOLE, ("dp", None), (None, "tp"), [pw.Replicate(), pw.Shard(0)]], ids=str)
@pytest.mark.parametrize(
    "others",
    [
        {"x": ("dp", None), "w": (None, "tp"), "v": (None, "tp")},
        {"x": (None, "tp"), "w": ("tp", None), "v": ("tp", "dp")},
        {},
    ],
    ids=["columns", "rows", "free"],
)
def test_gradients_are_those_of_one_device_wherever_a_constraint_is_whole(mesh: Any, at: Any, others: Any) -> None:
    inner = pw.shard(torch.sin, in_strategy=(at,), out_strategy=(at,))
    f = pw.shard(chain(inner), in_strategy=others or None, mesh=mesh)
    assert_same_function(f, chain(torch.sin), (64, 32), (32, 64), (64, 16))


@pytest.mark.parametrize("mesh", [{"dp": 2, "tp": 2}, MESH], ids=["2x2", "2x4"])
@pytest.mark.parametrize("out", [(None, None), (None, "tp"), ("dp", None)], ids=str)
def test_a_module_inside_has_the_gradients_of_one_device(mesh: Any, out: Any) -> None:
    torch.manual_seed(0)
    plain = Outer().double()
    torch.manual_seed(0)
    model: Any = pw.shard(Outer(in_strategy=(WHOLE,), out_strategy=(out,)).double(), mesh=mesh)
    batch = CASES["mlp"].batch()
    loss, expected = gradients(plain, batch)
    found_loss, found = gradients(model, batch)
    torch.testing.assert_close(found_loss, loss, rtol=EXACT, atol=EXACT)
    assert_same_gradients(found, expected, EXACT)


# -- operators without a rule


def _bent(x: Tensor, w: Tensor) -> Tensor:
    return bend(torch.sigmoid(x @ w)) * 2


def _scattered(x: Tensor, w: Tensor) -> Tensor:
    return torch.as_strided_scatter(torch.sigmoid(x @ w), w[:8], (8, 24), (24, 1))


@pytest.mark.parametrize(
    ("fn", "name", "text"),
    [
        (_bent, "partway_tests.bend.default", "a b -> a b"),
        (_scattered, "aten.as_strided_scatter.default", "a b, a b -> a b"),
    ],
    ids=["bend", "as_strided_scatter"],
)
def test_an_operator_without_a_rule_runs_right_and_is_named_once(
    fn: Callable[..., Tensor], name: str, text: str
) -> None:
    f = pw.shard(fn, (("dp", None), (None, "tp")), mesh=MESH)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert_same_function(f, fn, (8, 16), (16, 24))
        f(torch.ones(8, 16).double(), torch.ones(16, 24).double())
        f(torch.ones(8, 16).double(), torch.ones(16, 24).double())
    found = [w for w in seen if issubclass(w.category, pw.UnknownOperatorWarning)]
    assert len(found) == 2  # one for each plan: with gradients, and without
    assert all(f"{name} " in str(w.message) and f', "{text}")' in str(w.message) for w in found)
    assert f.plan.unknown_operators == (name,)


@pytest.mark.parametrize("fn", [_bent, _scattered])
def test_an_operator_without_a_rule_can_be_an_error(fn: Callable[..., Tensor]) -> None:
    pw.set_auto_parallel_context(on_unknown_op="error")
    f = pw.shard(fn, (("dp", None), (None, "tp")), mesh=MESH)
    with pytest.raises(pw.OperatorError, match=r"Give it one, such as pw\.rule\("):
        f(torch.ones(8, 16), torch.ones(16, 24))
    with pytest.raises(RuntimeError, match="there is no plan yet"):
        f.plan


def test_an_output_beside_the_loss_that_the_loss_does_not_need_has_its_gradients() -> None:
    def forward(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return (x @ w).pow(2).sum(), torch.relu(x @ v)

    torch.manual_seed(0)
    x, w, v = (torch.randn(8, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    split = pw.shard(forward, in_strategy=((4, 1), (1, 1), (1, 1)), mesh={"a": 4})
    for results in (lambda fn: fn(x, w, v)[1].pow(2).sum(), lambda fn: sum(t.sum() for t in fn(x, w, v))):
        found = torch.autograd.grad(results(split), (x, w, v), allow_unused=True, materialize_grads=True)
        expected = torch.autograd.grad(results(forward), (x, w, v), allow_unused=True, materialize_grads=True)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)

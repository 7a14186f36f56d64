"""Models on the meta device: each rank gets its part, with the numbers that one device would have."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import whole
from torch import Tensor, nn
from zoo import CASES, gpt2

import partway as pw
from partway.engine import materialize as module

Ranks = Callable[..., list[Any]]
IDS = torch.arange(32).view(8, 4) % 16


class Net(nn.Module):
    """An embedding that is tied to the head, attention, norms, buffers, and an odd initialiser of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8, padding_idx=2)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.BatchNorm1d(8)
        self.scale = Scale()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        loss: Tensor = self.head(self.scale(self.norm(x.flatten(0, 1)))).square().mean()
        return loss


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.table = nn.Parameter(torch.empty(8, 8)), nn.Buffer(torch.empty(8), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.trunc_normal_(self.weight, std=0.5)
        self.weight.data.add_(torch.eye(8))
        self.table.copy_(torch.arange(8.0).exp())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x @ self.weight / self.table
        return y


class Orthogonal(Net):
    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.reset_parameters = lambda layer=layer: (  # type: ignore[method-assign]
                nn.init.orthogonal_(layer.weight),
                nn.init.uniform_(layer.bias),
            )


class ByValue(Net):
    """Draws until it likes what it sees: no graph says how often."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.reset_parameters = lambda layer=layer: liked(layer)  # type: ignore[method-assign]


def liked(layer: nn.Linear) -> None:
    nn.init.zeros_(layer.bias)
    nn.init.normal_(layer.weight)
    while layer.weight.sum().item() < 1:
        nn.init.normal_(layer.weight)


def on_meta(kind: Callable[[], nn.Module], mesh: dict[str, int], plan: dict[str, Any]) -> Any:
    with torch.device("meta"):
        model = kind()
    return pw.shard(model, mesh=mesh, parameter_plan=plan)


def values(model: nn.Module) -> dict[str, Tensor]:
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return {name: whole(tensor.detach()).clone() for name, tensor in named.items()}


def made(model: Any, seed: int = 1, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    model.materialize((IDS,), **options)
    return values(model)


SPLIT: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 4}, {"embedding.weight": ("tp", None), "layers.*.weight": ("tp", None)}),
    (
        {"dp": 2, "tp": 2},
        {"embedding.weight": (None, "tp"), "layers.*.weight": ("dp", "tp"), "scale.weight": ("tp", None)},
    ),
]


@pytest.mark.parametrize("kind", [Net, Orthogonal, ByValue])
def test_parameters_have_the_same_numbers_on_any_layout(kind: Callable[[], nn.Module]) -> None:
    expected = made(on_meta(kind, {"dp": 1}, {}))
    for mesh, plan in SPLIT:
        found = made(on_meta(kind, mesh, plan))
        assert not [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])]
    assert expected["layers.0.weight"].unique().numel() > 40
    assert not torch.equal(expected["layers.0.weight"], expected["layers.1.weight"])
    assert not torch.equal(
        expected["attention.in_proj_weight"], made(on_meta(kind, {"dp": 1}, {}), 2)["attention.in_proj_weight"]
    )
    assert expected["attention.out_proj.bias"].eq(0).all()  # set by the module that it is in
    assert expected["norm.running_var"].eq(1).all()
    torch.testing.assert_close(expected["scale.table"], torch.arange(8.0).exp())
    if kind is Orthogonal:
        weight = expected["layers.1.weight"]
        torch.testing.assert_close(weight @ weight.T, torch.eye(8), rtol=0, atol=1e-5)
    if kind is ByValue:
        assert expected["layers.0.weight"].sum() >= 1


def test_only_what_depends_on_values_is_initialised_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    before = module.PartInitialiser._whole

    def counting(self: Any, one: Any, layouts: Any) -> Any:
        seen.append(type(one.module).__name__)
        return before(self, one, layouts)

    monkeypatch.setattr(module.PartInitialiser, "_whole", counting)
    made(on_meta(ByValue, *SPLIT[0]))
    assert set(seen) <= {"Linear", "Scale"}
    assert seen.count("Linear") == 2


@pytest.mark.parametrize("kind", [Net, ByValue])
def test_pytorchs_numbers_are_those_of_reset_parameters(kind: Callable[[], nn.Module]) -> None:
    with torch.device("meta"):
        plain: Any = kind()
    plain.to_empty(device="cpu")
    plain.head.weight = plain.embedding.weight
    torch.manual_seed(1)
    plain.apply(lambda m: (getattr(m, "reset_parameters", None) or getattr(m, "_reset_parameters", lambda: None))())
    with pw.auto_parallel_context(random_numbers="torch"):
        found = made(on_meta(kind, *SPLIT[1]))
    for name, tensor in values(plain).items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_a_model_trains_with_an_optimizer_made_before() -> None:
    losses = []
    for mesh, plan in (({"dp": 1}, {}), SPLIT[1]):
        model = on_meta(lambda: Net().double(), mesh, plan)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        made(model)
        layouts = model.plan.parameters  # of the call that it was made for
        losses.append([])
        for _ in range(4):
            loss = model(IDS)
            assert model.plan.parameters == layouts
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0][-1] < losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_an_initialiser_of_the_callers_own() -> None:
    def init(m: nn.Module) -> None:
        for tensor in (*m.parameters(recurse=False), *m.buffers(recurse=False)):
            if tensor.is_floating_point():
                nn.init.normal_(tensor, 3.0, 0.01)
            else:
                tensor.zero_()

    found, expected = (made(on_meta(Net, *how), init=init) for how in (SPLIT[1], ({"dp": 1}, {})))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert (found["embedding.weight"] - 3).abs().max() < 0.06


def test_a_model_of_transformers_has_the_initialiser_of_its_own() -> None:
    case = CASES["gpt2"]
    found = []
    for mesh in ({"dp": 1, "tp": 1}, {"dp": 2, "tp": 2}):
        with torch.device("meta"):
            model = gpt2(n_layer=1)
        pw.shard(model, mesh=mesh, in_strategy=case.batch_split("dp"), parameter_plan=case.block_split("tp"))
        torch.manual_seed(1)
        model.materialize((), case.batch())
        found.append(values(model))
    assert all(torch.equal(tensor, found[1][name]) for name, tensor in found[0].items())
    ordinary = gpt2(n_layer=1)
    for name, parameter in ordinary.named_parameters():
        assert float(found[0][name].std()) == pytest.approx(float(parameter.detach().std()), rel=0.1, abs=1e-8), name


def test_a_call_of_a_model_on_meta_says_what_to_do() -> None:
    model = on_meta(Net, {"dp": 2}, {})
    text = (
        "16 tensors (embedding.weight, layers.0.weight, layers.0.bias and 13 more) are on the meta device, without "
        "values; call model.materialize(...) with the arguments of a call before"
    )
    with pytest.raises(RuntimeError, match=re.escape(text)):
        model(IDS)
    with pytest.raises(ValueError, match="materialize was given no tensor that lies on a device"):
        model.materialize(())
    made(model)
    assert model(IDS).isfinite()


def test_a_tensor_that_no_initialiser_writes_is_an_error() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.bare = nn.Linear(4, 4), nn.Parameter(torch.empty(4))

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x) + self.bare
            return y

    model = on_meta(Bare, {"dp": 2}, {})
    text = "1 tensor (bare) is on the meta device and written by no module's reset_parameters(); pass init, a function"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        model.materialize((torch.ones(4, 4),))


# -- processes


def on_processes(n: int) -> Any:
    model = on_meta(Net, *SPLIT[n == 4])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = made(model)
    parts = [tuple(p.to_local().shape) for p in model.layers.parameters()]
    loss = model(IDS)
    loss.backward()
    optimizer.step()
    return found, parts, loss.item(), values(model)["layers.0.weight"]


@pytest.mark.gloo
def test_processes_hold_their_parts_of_the_numbers_of_one_device(on_ranks: Ranks) -> None:
    model = on_meta(Net, {"dp": 1}, {})
    expected = made(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = model(IDS)
    loss.backward()
    optimizer.step()
    for found, parts, theirs, moved in on_ranks(4, on_processes, 4):
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        assert parts[0] == (4, 4)
        assert theirs == pytest.approx(loss.item(), rel=1e-5)
        torch.testing.assert_close(moved, model.layers[0].weight.detach(), rtol=1e-4, atol=1e-6)


def sharded_where_meta_is_the_default() -> Tensor:
    with torch.device("meta"):
        model = pw.shard(Net(), mesh={"dp": 1, "tp": 2}, parameter_plan=SPLIT[0][1])
    return made(model)["layers.0.weight"]


@pytest.mark.gloo
def test_a_model_is_sharded_in_the_block_that_makes_it_on_meta(on_ranks: Ranks) -> None:
    expected = made(on_meta(Net, {"dp": 1}, {}))["layers.0.weight"]
    assert all(torch.equal(found, expected) for found in on_ranks(2, sharded_where_meta_is_the_default))


class Wide(nn.Module):
    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def peak() -> int:
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def measures(width: int, layers: int, n: int) -> tuple[int, int]:
    """The bytes of a model, and by how many a process's memory grew at most while it was made."""
    with torch.device("meta"):
        model: Any = Wide(width, layers)
    held = sum(p.nbytes for p in model.parameters())
    pw.shard(model, mesh={"tp": n}, parameter_plan={"*": ("tp", None)})
    x = torch.ones(4, width)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    model.materialize((x,))
    return held, peak() - before


@pytest.mark.gloo
@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="reads the peak of a process's memory from Linux"
)
@pytest.mark.parametrize(
    ("width", "layers"), [(2048, 12), pytest.param(8192, 5, marks=pytest.mark.slow)], ids=["200MB", "1.3GB"]
)
def test_no_process_holds_more_than_its_part_of_a_model(on_ranks: Ranks, width: int, layers: int) -> None:
    for held, grown in on_ranks(4, measures, width, layers, 4):
        assert 0.5 * held / 4 < grown < held / 2

"""What is prepared for a capture is undone afterwards, and what would change a module is refused."""

import pytest
import torch
from torch import fx, nn

import partway as pw
from partway.propagation.capture.capture import capture
from partway.propagation.graph.port import Role
from partway.strategy import CaptureError


def names(graph, role):
    return [port.name for port in graph.inputs if port.role is role]


def run(graph, **tensors):
    """The outputs of a captured graph, its inputs given by name."""
    given = {**graph.constants, **tensors}
    return fx.Interpreter(graph.module).run(*(given[port.name] for port in graph.inputs))


def test_a_distribution_is_not_checked_while_it_is_captured():
    def fn(mean, x):
        found = torch.distributions.Normal(mean, 2.0)
        return found.log_prob(x).sum(), found

    mean, x = torch.zeros(3), torch.ones(3)
    graph = capture(fn, (mean, x), {})
    likely, found = graph.result.build(list(run(graph, mean=mean, x=x)))
    assert likely == fn(mean, x)[0]
    assert torch.equal(found.loc, mean)
    with pytest.raises(ValueError, match="constraint"):
        torch.distributions.Normal(mean, -1.0)


class Routed(nn.Module):
    """As the routers of some mixtures of experts, which compute in a dtype of their own."""

    def __init__(self, dtype):
        super().__init__()
        self.router, self.dtype = nn.Linear(4, 3), dtype

    def forward(self, x):
        self.router = self.router.to(self.dtype)
        return self.router(x.to(self.dtype)).sum()


def test_a_module_may_be_converted_to_what_it_is():
    model = Routed(torch.float32)
    weight = model.router.weight
    graph = capture(model, (torch.ones(2, 4),), {})
    assert names(graph, Role.PARAMETER) == ["router.weight", "router.bias"]
    assert model.router.weight is weight
    assert "_apply" not in vars(model.router)


def test_a_conversion_that_changes_a_module_is_refused():
    with pytest.raises(
        CaptureError, match=r"converts 'weight' of a Linear from float32 on cpu to float64 on cpu.* before shard"
    ):
        capture(Routed(torch.float64), (torch.ones(2, 4),), {})


def test_the_module_is_left_as_it_was():
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    state = torch.get_rng_state()
    capture(module, (torch.randn(4, 3, generator=torch.Generator()),), {})
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(state, torch.get_rng_state())


class Caches(nn.Module):
    """A module that keeps what it made, as ALiBi and rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.length, self.by_length = 0, {}
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        if self.length < x.shape[0]:
            self.length = x.shape[0]
            self.register_buffer("bias", torch.arange(4.0) * 2, persistent=False)
            self.plain = torch.ones(4)
            self.by_length[self.length] = torch.zeros(4)
            self.made = nn.ReLU()
        return self.inner(x) * self.bias * self.plain + self.by_length[self.length]


def test_no_fake_tensor_is_left_in_a_module():
    module = Caches()
    before = {name: value for name, value in vars(module).items() if name != "_modules"}
    for size in (2, 3):
        pw.compile(module, (torch.ones(size, 4),), mesh={"x": 1})
        assert {name: value for name, value in vars(module).items() if name != "_modules"} == before
        assert (list(module._buffers), list(module._modules), module.by_length) == ([], ["inner"], {})
    out = module(torch.ones(2, 4))
    assert type(out) is torch.Tensor
    assert module.length == 2

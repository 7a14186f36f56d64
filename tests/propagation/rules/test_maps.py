"""What nets on images compute of whole maps: losses, attention over channels, norms. No split map is gathered."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from partway.propagation.capture.capture import capture
from partway.propagation.graph.port import Role
from partway.propagation.problem.formulate import formulate
from partway.propagation.program.lower import lower
from partway.propagation.search.exact import dynamic_programming
from partway.strategy import Layout, Mesh, Shard
from partway.strategy.placement import Kind, kind

WIDE = Layout(Mesh({"a": 4}), (Shard(3),))


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Linear(8, 4), nn.Linear(4, 8)

    def forward(self, x):
        scale = self.up(F.relu(self.down(F.adaptive_avg_pool2d(x, 1).flatten(1)))).sigmoid()
        return x * scale[:, :, None, None]


class ConvNeXtBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.gamma, self.beta = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        y = F.gelu(self.up(self.norm(x.permute(0, 2, 3, 1))))
        size = torch.norm(y, p=2, dim=(1, 2), keepdim=True)  # global response normalization
        y = self.gamma * (y * size / (size.mean(-1, keepdim=True) + 1e-6)) + self.beta + y
        return x + self.down(y).permute(0, 3, 1, 2)


class Standardised(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8, 1, 1))

    def forward(self, x):
        return self.scale * (x - x.mean((2, 3), keepdim=True)) / (x.var((2, 3), keepdim=True) + 1e-5).sqrt()


class SpatialAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Parameter(torch.tensor([0.5, 2.0]))

    def forward(self, x):
        largest = x.max(1, keepdim=True)[0]
        return x * (self.mix[0] * x.amax(1, keepdim=True) + largest + self.mix[1] * x.mean(1, keepdim=True)).sigmoid()


def dice(x, target):
    probability, truth = x.softmax(1), F.one_hot(target, 8).permute(0, 3, 1, 2)
    both = (probability * truth).sum((0, 2, 3))
    return 1 - ((2 * both + 1) / (probability.sum((0, 2, 3)) + truth.sum((0, 2, 3)) + 1)).mean()


def focal(x, target):
    logs = x.log_softmax(1).gather(1, target.unsqueeze(1)).squeeze(1)
    return (-((1 - logs.exp()) ** 2) * logs).mean()


def focal_of_cross_entropy(x, target):
    loss = F.cross_entropy(x, target, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def accuracy(x, target):
    return (x.argmax(1) == target).double().mean() * x.logsumexp(1).mean()


MAPS = {
    "squeeze and excite": SqueezeExcite,
    "convnext": ConvNeXtBlock,
    "standardised": Standardised,
    "spatial attention": SpatialAttention,
    "group norm": lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU()),
    "instance norm": lambda: nn.InstanceNorm2d(8, affine=True),
    "layer norm": lambda: nn.LayerNorm([8, 4, 16]),
    "softmax": nn.Softmax2d,
    "log softmax": lambda: nn.LogSoftmax(1),
}
LOSSES = {
    "cross entropy": F.cross_entropy,
    "cross entropy with ignored": lambda x, t: F.cross_entropy(x, t, ignore_index=3),
    "cross entropy with weights": lambda x, t: F.cross_entropy(x, t, torch.arange(1, 9, dtype=torch.float64)),
    "smooth cross entropy": lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    "dice": dice,
    "focal": focal,
    "focal of cross entropy": focal_of_cross_entropy,
    "accuracy": accuracy,
    "binary": lambda x, t: F.binary_cross_entropy_with_logits(x[:, 0], (t > 3).double()),
    "binary of probabilities": lambda x, t: F.binary_cross_entropy(x.sigmoid().sum(1) / 8, (t > 3).double()),
    "mean squares": lambda x, t: F.mse_loss(x.mean(1), t.double()),
}


def check(lab, fn, args, allowed):
    """Split as `allowed` says, `fn` is that of one device, and no map is gathered."""
    graph = capture(fn, args, {})
    names = [port.name for port in graph.inputs if port.role is Role.INPUT]
    allowed = {name or names[0]: (layouts, "by hand") for name, layouts in allowed.items()}
    problem = formulate(graph, lab.settings_of(WIDE.mesh, stay_split=True, on_unknown_op="error"), allowed)
    choice = dynamic_programming(problem).choice
    tensors = lab.call_tensors(problem, fn, args)
    leaves = [t for t in tensors if t.requires_grad]
    lab.check_choice(problem, choice, fn, args, lab.value_and_gradients([fn(*args)], leaves), str(fn))
    moving = {Kind.ALL_GATHER, Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER}
    assert not [c for c in lower(problem, choice).conversions if kind(c.source, c.target) in moving]


def drawn():
    return torch.randn(2, 8, 4, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("name", MAPS)
def test_a_map_that_is_split_along_its_width_stays_split(lab, name):
    fn = MAPS[name]().double()
    check(lab, fn, (drawn(),), {"": (WIDE,), "result": (WIDE,)})


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_of_a_map_that_is_split_along_its_width(lab, name):
    target = torch.randint(0, 8, (2, 4, 16), generator=torch.Generator().manual_seed(1))
    check(lab, LOSSES[name], (drawn(), target), {"": (WIDE,)})

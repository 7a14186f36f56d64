"""Mixtures of experts: where tokens and experts are split over one axis, tokens go to their experts and come back by
all-to-all, and nothing is gathered."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from checks import assert_same_gradients, assert_same_loss, gradients
from torch import Tensor, nn

import partway as pw

GROUPS, TOKENS, WIDTH, HIDDEN, EXPERTS, CAPACITY = 8, 64, 32, 64, 8, 16


class Experts(nn.Module):
    """Two experts for each token. Tokens come in groups, of each of which an expert takes `CAPACITY` at most: the layer
    of GShard (Lepikhin et al., 2020, algorithm 1 without its random second expert)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN) / WIDTH**0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> Tensor:
        dispatch, combine = self.routes(self.gate(x).softmax(-1))
        taken = torch.einsum("gsec,gsm->egcm", dispatch, x)
        hidden = torch.relu(torch.einsum("egcm,emh->egch", taken, self.up))
        made = torch.einsum("egch,ehm->egcm", hidden, self.down)
        return torch.einsum("gsec,egcm->gsm", combine, made)

    def routes(self, chances: Tensor) -> tuple[Tensor, Tensor]:
        """Which place of which expert each token goes to, and with which weight it comes back: [g, s, e, c] both."""
        left, taken = chances, torch.zeros_like(chances[:, :1])
        dispatch, combine = [], []
        for _ in range(2):
            chosen = F.one_hot(left.argmax(-1), EXPERTS).to(chances.dtype)
            left = left * (1 - chosen)
            place = chosen.cumsum(1) - chosen + taken
            taken = taken + chosen.sum(1, keepdim=True)
            kept = chosen * (place < CAPACITY)
            slot = F.one_hot((place * kept).sum(-1).long(), CAPACITY).to(chances.dtype)
            dispatch.append(kept.unsqueeze(-1) * slot.unsqueeze(-2))
            combine.append((chances * kept).sum(-1, keepdim=True))
        total = sum(combine) + 1e-9
        weighted = [d * (c / total).unsqueeze(-1) for d, c in zip(dispatch, combine, strict=True)]
        return sum(dispatch[1:], dispatch[0]), sum(weighted[1:], weighted[0])


class Indexed(Experts):
    """The first expert of each token, which is written to its place by index, and read from there: Switch's layer
    (Fedus et al., 2021)."""

    def forward(self, x: Tensor) -> Tensor:
        groups, tokens, width = x.shape
        chances = self.gate(x).softmax(-1)
        weight, best = chances.max(-1)
        chosen = F.one_hot(best, EXPERTS)
        place = ((chosen.cumsum(1) - chosen) * chosen).sum(-1)
        nowhere = EXPERTS * CAPACITY
        slot = torch.where(place < CAPACITY, best * CAPACITY + place, nowhere)
        index = slot.unsqueeze(-1).expand(groups, tokens, width)
        places = x.new_zeros(groups, nowhere + 1, width).scatter(1, index, x)
        taken = places[:, :nowhere].unflatten(1, (EXPERTS, CAPACITY))
        hidden = torch.relu(torch.einsum("gecm,emh->gech", taken, self.up))
        made = torch.einsum("gech,ehm->gecm", hidden, self.down).flatten(1, 2)
        return F.pad(made, (0, 0, 0, 1)).gather(1, index) * weight.unsqueeze(-1)


class Block(nn.Module):
    """A residual layer of experts and a loss."""

    def __init__(self, layer: type[Experts]) -> None:
        super().__init__()
        self.layer = layer()

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.layer(x)).pow(2).mean()


def build(layer: type[Experts]) -> nn.Module:
    torch.manual_seed(0)
    return Block(layer).double()


@pytest.mark.parametrize("mesh", [{"ep": 8}, {"dp": 2, "ep": 4}], ids=str)
@pytest.mark.parametrize("layer", [Experts, Indexed])
def test_tokens_go_to_their_experts_and_back_by_all_to_all(layer: type[Experts], mesh: dict[str, int]) -> None:
    batch = {"x": torch.randn(GROUPS, TOKENS, WIDTH, dtype=torch.float64)}
    expected_loss, expected = gradients(build(layer), batch)
    model: Any = pw.shard(
        build(layer),
        mesh=mesh,
        in_strategy=((tuple(mesh), None, None),),
        parameter_plan={"*.up": ("ep", None, None), "*.down": ("ep", None, None)},
    )
    loss, found = gradients(model, batch)
    assert_same_loss(loss, expected_loss, 1e-10)
    assert_same_gradients(found, expected, 1e-10)
    parameters = {name for name, _ in model.named_parameters()}
    moved = [c for c in model.plan.collectives if c.tensor not in parameters and c.payload_bytes > 8]
    assert {str(c.kind) for c in moved} == {"all_to_all"}, "\n".join(map(str, moved))
    assert [c.phase for c in moved].count("forward") == 2

"""A network that enters autocast in several ways."""

from __future__ import annotations

import torch
from torch import Tensor, nn

WAYS = ("around", "inside", "nested", "both", "off inside")
AROUND = ("around", "both", "off inside")


class Net(nn.Module):
    """Two products with a norm between them; `way`: who enters autocast, and whether it is left within."""

    def __init__(self, way: str, dtype: torch.dtype = torch.bfloat16, device: str = "cpu") -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)
        self.inside = way in ("inside", "both", "nested")
        self.off, self.dtype, self.device = way in ("nested", "off inside"), dtype, device

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device, self.dtype, enabled=self.inside or torch.is_autocast_enabled(self.device)):
            hidden = self.norm(torch.relu(self.a(x)))
            with torch.autocast(self.device, enabled=not self.off and torch.is_autocast_enabled(self.device)):
                result: Tensor = self.b(hidden.float() if self.off else hidden)
        return result

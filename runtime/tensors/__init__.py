"""Tensors under a launcher: parameters and results that are split, and behave as on one device.

split_tensor.py     a DTensor with the values of one device; split_operators.py: operators on its parts
parameters.py       parameters as DTensors; replaced.py: stand-ins for the old objects; optimizers.py: their optimizers
own_parts.py        inputs of which each rank is given a part
tracked.py          facts about tensors, modules and optimizers, kept for as long as they live
gather.py           a whole tensor; transformed.py, batched.py: under transforms of torch.func
"""

from __future__ import annotations

from .optimizers import bring_up_to_date, by_element
from .own_parts import gathered, parts_now, places_of, recut, whole_shape
from .replaced import current

__all__ = [
    "bring_up_to_date",
    "by_element",
    "current",
    "gathered",
    "parts_now",
    "places_of",
    "recut",
    "whole_shape",
]

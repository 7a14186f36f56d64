"""The costs of operators, collectives, and all conversions between two layouts of a tensor.

Input: a `DeviceProfile` (figures of a device and its network), a mesh, and the `Weights` that the search minimises.
Output: seconds, bytes, and weighted costs.

profile.py       the figures, read from JSON and checked; profiles/ has those of known devices, one file each
cost.py          seconds of a collective and of an operator by these figures, and the weights of each `level=`
conversion.py    `ConversionTable`: the cost of every conversion between two layouts of one tensor, and the steps of
                 the cheapest chain
"""

from __future__ import annotations

from .cost import costs_over, kind_of_call, messages_by_level, name_of_call, sent_by_level, steps, wire_bytes
from .profile import ALONE, ByKind, DeviceProfile, NetworkLevel, PeakRates, Sources, Together, profile_of
from .rates import KNEES, OTHER, POINTWISE, VIEW, Floats, OperatorRates, Rates, features_of

__all__ = [
    "ALONE",
    "KNEES",
    "OTHER",
    "POINTWISE",
    "VIEW",
    "ByKind",
    "DeviceProfile",
    "Floats",
    "NetworkLevel",
    "OperatorRates",
    "PeakRates",
    "Rates",
    "Sources",
    "Together",
    "costs_over",
    "features_of",
    "kind_of_call",
    "messages_by_level",
    "name_of_call",
    "profile_of",
    "sent_by_level",
    "steps",
    "wire_bytes",
]

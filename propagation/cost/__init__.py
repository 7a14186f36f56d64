"""The costs of operators, collectives, and all conversions between two layouts of a tensor.

Input: a `DeviceProfile` (figures of a device and its network), a mesh, and the `Weights` that the search minimises.
Output: seconds, bytes, and weighted costs.

profile.py       the figures, read from JSON and checked; profiles/ has those of known devices, one file each
cost.py          seconds of a collective and of an operator by these figures, and the weights of each `level=`
conversion.py    `ConversionTable`: the cost of every conversion between two layouts of one tensor, and the steps of
                 the cheapest chain
"""

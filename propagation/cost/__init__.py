"""What things cost: operators, collectives, and every way from one layout of a tensor to another.

In: a `DeviceProfile` (figures of a device and its network), a mesh, and the `Weights` of what the search minimises.
Out: seconds, bytes, and weighted costs.

profile.py       the figures, read from JSON and checked; profiles/ has those of known devices, one file each
cost.py          seconds of a collective and of an operator by these figures, and the weights of each `level=`
conversion.py    `ConversionTable`: the cost of every conversion between two layouts of one tensor, and the steps of
                 the cheapest way
"""

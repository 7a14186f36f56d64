"""Tensors under a launcher: parameters and results that are split, and mean what they mean on one device.

split_tensor.py     a DTensor with the values of one device; split_operators.py: what operators do with parts
parameters.py       parameters as DTensors; replaced.py: what holds the old objects; optimizers.py: what steps them
own_parts.py        inputs of which each rank is given a part
tracked.py          what is known of tensors, modules and optimizers for as long as they live
gather.py           a whole tensor; transformed.py, batched.py: under transforms of torch.func
"""

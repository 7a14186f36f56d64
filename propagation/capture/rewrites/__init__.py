"""Captured operators written with others.

decomposition.py    operators without rules, written as PyTorch writes them; one_by_one.py copies what repeats
covariance.py, autograd_functions.py, control_flow.py
                    operators that need more than a decomposition
cleanup.py          tensors of the meta device, names, and dead code; overlap.py: tensors that share memory
"""

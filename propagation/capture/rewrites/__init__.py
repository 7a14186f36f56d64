"""Captured operators rewritten in terms of others.

decomposition.py    PyTorch's decompositions of operators without rules; one_by_one.py reuses those that repeat
covariance.py, autograd_functions.py, control_flow.py
                    operators that need more than a decomposition
cleanup.py          tensors of the meta device, names, and dead code; overlap.py: tensors that share memory
"""

"""Captured operators rewritten in terms of others.

decomposition.py    PyTorch's decompositions of operators without rules; one_by_one.py reuses those that repeat
covariance.py, autograd_functions.py, control_flow.py
                    operators that need more than a decomposition
masks.py            attention without masks that is_causal says, or that hide nothing
experts.py          mixtures of experts as rows that are dispatched and combined
cleanup.py          tensors of the meta device, names, and dead code; overlap.py: tensors that share memory
"""

"""Hooks of modules and tensors while a call is captured.

hooks.py            hooks inside a captured function, as operators of its graph
hook_kinds.py       tells hooks that belong to a model, only look, or compute parameters
module_hooks.py     hooks of modules; backward_hooks.py: full backward hooks
resting_hooks.py    hooks that do nothing for a while
"""

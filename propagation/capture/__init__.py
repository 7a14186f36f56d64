"""From Python to a Graph: one call of a function or module is traced with torch.export and cleaned up.

In come a callable, its arguments and, if it may ask for them, the values of its tensors; out comes a Graph that is
verified, or a CaptureError that names the caller's line. capture.py has the list of passes, and is the place to start.

    tracing.py          torch.export of one call: the modes that are on (modes.py, stand_ins.py, sizes.py), what is
                        prepared (preparation.py, random_state.py), what is checked (checks.py, overlap.py)
    failures.py         why a capture failed, in words; source_lines.py: where in the caller's code
    any_size.py         one capture for all sizes of some dims, and its graph at each
    questions.py        what a function asks of values, and the answers
    hooks.py            hooks of tensors and modules (module_hooks.py, backward_hooks.py, hook_kinds.py,
                        resting_hooks.py)
    decomposition.py    which operators are captured as others; covariance.py
    ports.py, cleanup.py, numbers.py, control.py, autograd_functions.py
                        passes over what torch.export left
    alike.py            modules that are alike are traced once: repeated.py (which look it), calls.py (which are it),
                        copies.py (their part of the graph)
    initialisers.py     the graph of what initialises a module's tensors
"""

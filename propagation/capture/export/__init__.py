"""Tracing of one call of a function with torch.export.

tracing.py          calls torch.export, with the help of the others
dispatch_modes.py, stand_ins.py, preparation.py, random_generators.py
                    temporary changes while a function is traced
questions.py, numbers.py, data_sizes.py
                    questions of a function about the values of its tensors
checks.py           checks of the exported program; failures.py: why it failed; source_lines.py: in which line
"""

"""Tracing of one call of a function with torch.export.

tracing.py          calls torch.export, with the help of the others
dispatch_modes.py   modes that watch and replace calls of PyTorch while a function is traced
preparation.py      temporary changes while it is traced, and checks of the exported program
questions.py, numbers.py, data_sizes.py
                    questions of a function about the values of its tensors
failures.py         why torch.export failed; source_lines.py: in which line
"""

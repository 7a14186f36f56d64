"""One call of a function through torch.export.

tracing.py          calls torch.export, with what the others provide
dispatch_modes.py, stand_ins.py, preparation.py, random_generators.py
                    what is different while a function is traced, and undone after
questions.py, numbers.py, data_sizes.py
                    what a function asks of the values of its tensors
checks.py           what torch.export made, checked; failures.py: why it failed; source_lines.py: in which line
"""

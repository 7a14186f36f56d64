"""Who runs a program: all ranks in this process, or this one of a process group.

simulate.py         all ranks in one process; meetings.py: each kind of collective; one_device.py: one rank
execute.py          one rank of a process group; issue.py: each kind of collective
waiting.py          gradients whose reductions wait
peak.py             how many bytes a rank holds while a step runs, from its text
"""

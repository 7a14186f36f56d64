"""What Partway and PyTorch take on this machine, measured: behind `partway calibrate` and `partway bench fusion`.

In goes a number of processes and a device, out come figures with a report to print.

    calibrate    a device profile of this machine: its memory, operators.py (timed in the steps of probes.py) and
                 collectives.py
    bench        one model with every fusion policy and with DDP: seconds a step, predicted and measured
    contenders   ways to train one model side by side: each is checked against one device, then they take turns
    clock        how long something takes
    workloads    the models that are measured, with their batches, and a model of the user's own

Nothing that plans or runs a model imports this package.
"""

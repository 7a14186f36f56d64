"""Measure Partway and PyTorch on this machine, for `partway calibrate` and `partway bench`.

The input is a number of processes and a device, the output figures with a report to print.

    calibrate    a device profile of this machine: its memory, operators.py (timed in the steps of probes.py) and
                 collectives.py
    bench        one model with every fusion policy and with DDP: seconds a step, predicted and measured
    bench_experts    a layer of experts in each form that it can be split in, and by hand
    contenders   ways to train one model side by side: each is checked against one device, then they take turns
    clock        times a function
    workloads    the models for measurements, with their batches, and a model of the user's own

No code that plans or runs a model imports this package.
"""

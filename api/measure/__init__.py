"""What Partway and PyTorch take on this machine, measured: behind `partway calibrate` and `partway bench fusion`.

In goes a number of processes and a device, out come figures with a report to print.

    calibrate    times compute, memory and collectives, and fits a device profile to them
    bench        one model with every fusion policy and with DDP: seconds a step, predicted and measured
    contenders   ways to train one model side by side: each is checked against one device, then they take turns
    workloads    the models that are measured, with their batches, and a model of the user's own

Nothing that plans or runs a model imports this package.
"""

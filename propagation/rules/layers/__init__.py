"""Rules of layers, the operators behind torch.nn: convolutions, pools, norms, attention, losses. A family a module."""

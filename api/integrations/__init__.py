"""Adapters for frameworks that would split data and wrap models themselves under a launcher.

accelerate.py      Accelerator: prepares sharded models, optimizers and loaders
transformers.py    Trainer: trains sharded models
"""

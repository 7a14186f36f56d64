"""Adapters for frameworks that would split data and wrap models themselves under a launcher.

accelerate.py      Accelerator: prepares sharded models, optimizers and loaders
lightning.py       PartwayStrategy: a strategy of lightning.Trainer
peft.py            save_pretrained: the adapter of a sharded model
transformers.py    Trainer: trains sharded models
"""

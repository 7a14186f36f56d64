"""Calls of a sharded function or module.

engine.py           plans the first call of a signature, and runs later ones with its runner
runner.py           from the tensors of a call, through the step, to its result
placing.py          all ranks simulated in this process, or this rank of a process group
rank_facts.py       the facts that must be the same on every rank
sharded.py, materialize.py, state_dicts.py
                    a sharded module: its class, its parameters, its state dicts
"""

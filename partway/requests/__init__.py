"""The checked requests of users: the arguments of `shard` and `compile`, DTensors, rules of operators.

request.py          the arguments of one `shard` or `compile`, the tensors that they name, and what can be split
dtensors.py         DTensors as annotations
user_rules.py       `partway.rule`
plan_inputs.py      all inputs of a plan
planning_log.py     the log and the live line of planning
"""

"""The checked requests of users: the arguments of `shard` and `compile`, DTensors, rules of operators.

request.py          the arguments of one `shard` or `compile`
shardable.py        checks that functions, modules and arguments can be split at all
attached.py         the engine that `shard` attaches to a module
dtensors.py         DTensors as annotations
user_rules.py       `partway.rule`
plan_inputs.py      all inputs of a plan
planning_log.py     the log and the live line of planning
"""

"""Pipelines: where a model is cut into stages, and the order in which each device runs their parts of a batch.

Input: the pieces of a model with their seconds and bytes, on how many devices, and the number of microbatches. Output:
a `Partition` with its `PipelineSchedule`, its seconds, and a bound on those of any partition.
Design: docs/design/pipeline_parallel.md.

actions.py    start here: what devices do, and the stages that they have
orders.py     the schedules
play.py       a schedule with the seconds of its stages
stages.py     the cuts
"""

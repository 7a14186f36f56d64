"""What a person wrote about a function, read as the layouts that each tensor may have.

In go `PlanInputs` (the captured graph, the `Request` of a `shard` or `compile`, the options). Out come the meshes to
try and, for each of them, `Annotations`: the layouts that the search may choose from, by the name of the tensor.

    names             which arguments and results the entries of a request speak of
    constrain         while a function is captured: marks the tensors that are annotated inside it
    constraint_text   a strategy as text, the form in which such a mark stands in the graph
    statements        every source (in_strategy, parameter_plan, dataset_strategy, ...) as statements on single tensors
    given             what each process is given of an input, as the dataset_strategy says
    meshes            the meshes to try
    annotate          all statements together: checked on the mesh, and merged into the allowed layouts

What is wrong is collected, and raised as one StrategyError. `strategy/validate.py` checks the strategies themselves.
"""

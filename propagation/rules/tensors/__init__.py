"""Rules of operators on tensors: elementwise, reductions, shapes, indexing, linear algebra. A family a module."""

"""What a graph promises is verified."""

import pytest
import torch

from partway.propagation.capture.capture import capture
from partway.propagation.graph.graph import verify
from partway.strategy import VerifyError

aten = torch.ops.aten


def test_verify_refuses_a_graph_with_other_calls():
    graph = capture(lambda x: x + 1, (torch.ones(2),), {})
    (node,) = graph.nodes
    node.target = torch.add
    with pytest.raises(VerifyError, match="which is not an operator"):
        verify(graph)
    node.target = aten.add_.Tensor
    with pytest.raises(VerifyError, match="writes to its operands"):
        verify(graph)
    node.target = aten.add.Tensor
    del node.meta["val"]
    with pytest.raises(VerifyError, match="has no value"):
        verify(graph)

"""What a rank's ledger holds of its calls."""

import torch

from partway.runtime.ledger import Written


def test_a_step_of_an_optimizer_between_two_calls_is_seen():
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    written, optimizer = Written(), torch.optim.Adam(parameters)
    assert written(parameters) == 0
    assert written(parameters) == 0
    for parameter in parameters[::2]:
        parameter.grad = torch.ones(2)
    optimizer.step()
    assert written(parameters) == 0b101
    assert written(parameters) == 0
    parameters[1] = torch.nn.Parameter(torch.ones(2))
    assert written(parameters) == 0b010

"""What the tests of plans share."""

from perceptron import of_the_version_before, plan

__all__ = ["of_the_version_before", "plan"]

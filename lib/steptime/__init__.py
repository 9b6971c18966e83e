"""What one training step costs, in which framework, on which machine, on how many of them, and why."""

__version__ = "0.1.0"

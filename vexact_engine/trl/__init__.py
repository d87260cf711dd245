"""TRL's GRPOTrainer with rollouts of this engine, whose log-probabilities are the bytes of its loss."""

from .grpo import GRPOTrainer

__all__ = ["GRPOTrainer"]

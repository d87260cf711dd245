"""Shows that a model's rollout and training agree, and says what this machine can run."""

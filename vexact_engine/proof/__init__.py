"""That rollout and training agree, asked of a model and shown to people; and what this machine can run."""

"""What verl's processes import in runs of rl_step.py: each module by itself, and nothing of ours beside it."""

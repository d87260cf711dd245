"""More than one process: replicas of a model, or stages of one."""

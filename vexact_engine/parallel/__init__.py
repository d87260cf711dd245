"""More than one engine: replicas of a model in processes of their own."""

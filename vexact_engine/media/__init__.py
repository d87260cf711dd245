"""Images and videos of prompts: opened within bounds, made into patches, and where they stand among the tokens."""

"""Weights from a trainer's process to an engine in another one of this host: sender, receiver, and what they share."""

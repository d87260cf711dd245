"""Whole training loops on the engine and the aligned ops, small enough to read: grpo.py first."""

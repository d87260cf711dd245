"""Benchmarks: `python -m benchmarks ROOM|all|engine|memory`. Bits are checked before anything is timed."""

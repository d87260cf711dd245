"""Tests with the real verl and VeOmni. A package: their conftest.py, and verl's own top-level `tests`, stay apart."""

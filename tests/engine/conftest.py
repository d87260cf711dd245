"""What tests of several files here are given."""

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def sockets(monkeypatch):
    """The folder of a hand-over's sockets: one of their own, that is empty again at the end."""
    with tempfile.TemporaryDirectory() as folder:  # a short name: sockets have at most 107 characters
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield Path(folder) / "vexact"
        assert not list(Path(folder, "vexact").glob("*")), "a socket was left behind"

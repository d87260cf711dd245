"""A thin inference engine that consumes vexact_ops alone. Names load lazily; importing has no side effects."""

import importlib
from typing import TYPE_CHECKING

# public name -> module that holds it
_WHERE = {
    "Engine": "engine",
    "EngineConfig": "config",
    "SamplingParams": "config",
    "Completion": "request",
    "Increment": "outputs",
}
__all__ = ["Completion", "Engine", "EngineConfig", "Increment", "SamplingParams"]


def __getattr__(name: str):
    if name in _WHERE:
        value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *__all__])


if TYPE_CHECKING:
    from .config import EngineConfig, SamplingParams
    from .engine import Engine
    from .outputs import Increment
    from .request import Completion

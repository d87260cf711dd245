"""The fingerprint: what fixes the bits in this process. Trainer and engine compare it before weights change hands, but
for what fixes gradients alone, which an engine does not compute.

It is derived from content: a digest for each room of the sources behind it (digest.py), and the versions of what lowers
or serves them. Nobody has to remember to raise a number when bits change.
"""

import importlib
import pkgutil
from collections.abc import Mapping

import torch

from . import digest, native
from .backend import ROOMS, BackendUnavailable, Room

CONTRACT_VERSION = 1
# Their kernels serve on SM90, where installed. In a forward pass only those that were found equal to ours byte for
# byte; but attention's gradients are flash-attn-4's own.
_THIRD_PARTIES = "flash-attn-4", "quack-kernels", "nvidia-cutlass-dsl"
_IEEE = "subnormals kept, rounding to nearest"


def _import_rooms() -> None:
    package = importlib.import_module("vexact_ops")
    for module in pkgutil.iter_modules(package.__path__):
        if module.ispkg and not module.name.startswith("_") and module.name not in ("patch", "testing"):
            importlib.import_module(f"vexact_ops.{module.name}.op")


def numerics_class(device: torch.device | str = "cpu") -> str:
    """The set of kernels whose bits are equal: "cpu" for any x86-64 with FMA, "sm90" and the like for a GPU."""
    device = torch.device(device)
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm{major}{minor}"
    raise ValueError(f"numerics: device: got {device}, expected a cpu or cuda device")


def _in_use(room: Room, device: torch.device) -> str:
    """The backend of a call that names none, or why there is none."""
    try:
        return room.resolve(device, None)
    except BackendUnavailable as error:
        return str(error)


def _sources(room: Room, device: torch.device) -> str:
    """A digest of the backend in use; of all of the device's where these are proven equal, for then a call may name any
    and kernels of one stand in for those of another."""
    used = _in_use(room, device)
    backends = {used} if used in room.backends(device.type) else set()
    if room.one_class or not backends:
        backends |= set(getattr(room, device.type))
    return digest.sources(room.name, backends)


def _float_mode(device: torch.device) -> str:
    """How arithmetic treats subnormals, and where it rounds. Our kernels keep to IEEE 754's default whatever the thread
    has (on a GPU that is settled when they are compiled), but what stands between them in a model is torch's."""
    if device.type != "cpu" or native.unavailable():
        return _IEEE
    mode = native.float_mode()
    if mode in (0, native.DEFAULT_FLOAT_MODE):
        return _IEEE
    flushed = {0x8040: "flushed", 0x8000: "flushed in results", 0x0040: "flushed in operands"}.get(
        mode & 0x8040, "kept"
    )
    rounding = {0x2000: "down", 0x4000: "up", 0x6000: "to zero"}.get(mode & 0x6000, "to nearest")
    return f"subnormals {flushed}, rounding {rounding}"


def _libraries(device: torch.device, backends: set[str]) -> dict[str, str | None]:
    found = {}
    if device.type == "cuda":  # on a CPU nothing but the processor stands between our sources and the bits
        found = {"torch": str(torch.__version__), "cuda": torch.version.cuda, "driver": digest.driver()}
    if device.type == "cuda" or "triton" in backends:
        found["triton"] = digest.version("triton")
    return found


def _gradients(name: str, backends: set[str]) -> dict[str, str | None]:
    if name != "sm90" or "cuda" not in backends:
        return {}
    return {package: digest.version(package) for package in _THIRD_PARTIES}


def numerics(device: torch.device | str | None = None, **options: bool | int | float | str | None) -> dict:
    """Everything that fixes the bits, as a JSON-serialisable dictionary: two processes with equal ones promise equal
    bits. numerics_difference says where two differ.

    device      whose class is meant; by default the current GPU where there is one, else the CPU
    options     further declared options that change bits, such as kv_segment=2048; None stands for one that is not set
    "contract"  the version of the contract
    "class"     the set of kernels that are equal bit for bit: "cpu", or a GPU's such as "sm90"
    "rooms"     of every room a digest of the sources that fix its bits: its op, the kernels in use (all of the device's
                that are proven equal), what they are composed of, in Python and in the extension, and the flags of
                its build. On a CPU no compiler, Python, torch or instruction set is in it: none of them changes a bit
    "backends"  {room: backend in use}, of rooms whose backends are not equal bit for bit
    "float_mode"  how this thread treats subnormals and rounds: our kernels do as IEEE 754 has it in any thread (on a
                GPU as they were compiled, which is the same), torch's operations between them as the thread does
    "libraries"  on a GPU the versions of what lowers our sources or serves beside them: torch, CUDA, driver, triton
    "gradients"  on SM90 the versions of flash-attn-4, whose attention gradients are its own where it is installed, and
                of quack and cutlass-dsl. No bit of a forward pass depends on them: there their kernels serve only where
                they were found equal to ours byte for byte
    "options"   those given
    raises      TypeError on an option of another type, ValueError on another device
    """
    for key, value in options.items():
        if not isinstance(value, bool | int | float | str | None):
            raise TypeError(f"numerics: {key}: got {type(value).__name__}, expected a bool, a number, a string or None")
    _import_rooms()
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name, device = numerics_class(device), torch.device(device)
    rooms = [ROOMS[room] for room in sorted(ROOMS)]
    in_use = {_in_use(room, device) for room in rooms}
    return {
        "contract": CONTRACT_VERSION,
        "class": name,
        "rooms": {room.name: _sources(room, device) for room in rooms},
        "backends": {
            room.name: _in_use(room, device)
            for room in rooms
            if not room.one_class and len(room.backends(device.type)) > 1
        },
        "float_mode": _float_mode(device),
        "libraries": _libraries(device, in_use),
        "gradients": _gradients(name, in_use),
        "options": {key: options[key] for key in sorted(options) if options[key] is not None},
    }


_ADAPTERS = "model.adapters."  # of a patched model's numbers (vexact_ops/patch/facts.py)


def numerics_difference(
    a: Mapping[str, object], b: Mapping[str, object], *, forward: bool = False
) -> dict[str, tuple[object, object]]:
    """Where two fingerprints differ: {"rooms.linear": (a's value, b's)}, None where one has no such entry; empty where
    they are equal. What has been through JSON compares as what has not. A list holds values that compute alike: it
    equals each of them. What adapters are multiplied by counts where both have some: one that has none computes with
    what they have been merged into, or beside what they are disabled in.

    forward   leave out what fixes the bits of gradients alone: equal log-probabilities are all that is asked
    raises    TypeError where one is no dictionary
    example
    >>> vx.numerics_difference(vx.numerics("cpu"), vx.numerics("cpu"))
    {}
    """
    for arg, value in (("a", a), ("b", b)):
        if not isinstance(value, Mapping):
            raise TypeError(
                f"numerics_difference: {arg}: got {type(value).__name__}, expected a dictionary as "
                "vexact_ops.numerics() returns it"
            )
    flat_a, flat_b = _flat(a), _flat(b)
    keys = [*flat_a, *(key for key in flat_b if key not in flat_a)]
    pairs = {key: (flat_a.get(key), flat_b.get(key)) for key in keys}
    if not all(any(key.startswith(_ADAPTERS) for key in flat) for flat in (flat_a, flat_b)):
        pairs = {key: values for key, values in pairs.items() if not key.startswith(_ADAPTERS)}
    differ = {key: values for key, values in pairs.items() if not _alike(*values)}
    return {key: values for key, values in differ.items() if not (forward and key.startswith("gradients."))}


def _alike(a: object, b: object) -> bool:
    return a == b or (isinstance(a, list) and b in a) or (isinstance(b, list) and a in b)


def _flat(nested: Mapping[str, object], before: str = "") -> dict[str, object]:
    found = {}
    for key, value in nested.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found

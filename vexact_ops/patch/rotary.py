"""Rotary tables: how they are recognised, and the frequencies that they are made from.

Frequencies are buffers that no checkpoint holds: every process computes its own. A cast of the whole model
(`.bfloat16()`) rounds them, and another device's `pow` may differ in the last bit, so a patch puts back what the
configuration says wherever what it finds is a rounding of that.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn

import vexact_ops as vx

from ..rope.reference import rope_cos_sin_ref
from .pieces import ONCE, PAIRS, NotCovered, agree, class_of, laid_out, run_stock, twin

LONGROPE = ("short", "long")
_NARROW = torch.bfloat16, torch.float16
_DEVICES = 2**-20  # relative: what another device's pow may differ by, far below any change that somebody made


def prefixes(module: nn.Module) -> list[str]:
    """Of the module's `inv_freq` buffers: one per layer type, or the empty one."""
    names = [name for name in module._buffers if name.endswith("inv_freq") and not name.endswith("original_inv_freq")]
    return [name.removesuffix("inv_freq") for name in names]


def frequencies(module: nn.Module, longrope: str | None) -> dict[str, Tensor]:
    """What a patched module's buffers of them hold, by name; of those on the meta device, what they will have to."""
    names = [f"{prefix}inv_freq" for prefix in prefixes(module)]
    if not any(module._buffers[name].is_meta for name in names):
        return {name: module._buffers[name] for name in names}
    configured = configured_of(module, longrope)
    return {name: configured[name] if module._buffers[name].is_meta else module._buffers[name] for name in names}


def _types(module: nn.Module) -> list[str]:
    kinds = getattr(module, "rope_type", "default")
    return list(kinds.values()) if isinstance(kinds, dict) else [kinds]


def goes_by_length(module: nn.Module) -> bool:
    """Whether its own forward looks at the longest sequence of a batch, so that `longrope` is to be declared."""
    return any(kind == "longrope" or "dynamic" in kind for kind in _types(module))


def check_longrope(where: str, longrope: str | None) -> None:
    if longrope is not None and longrope not in LONGROPE:
        raise ValueError(f"{where}: longrope: got {longrope!r}, expected None, 'short' or 'long'")


def rotary(module: nn.Module, longrope: str | None = None) -> tuple[Callable, str, dict[str, Tensor], str]:
    """The aligned forward of a rotary embedding, a note, by name the frequencies that have to be put into its buffers,
    and in which layout its own tables are ("", PAIRS or ONCE); the forward's are in the usual one. NotCovered."""
    dynamic = any("dynamic" in kind for kind in _types(module))
    if goes_by_length(module) and longrope is None:
        raise NotCovered(
            f"rope type {'dynamic' if dynamic else 'longrope'!r}: its frequencies depend on the longest sequence of "
            "the batch, so a token's bits would depend on its neighbours: "
            + (
                "declare, on both sides, that none is longer than max_position_embeddings: longrope='short'"
                if dynamic
                else "declare the factors of all sequences, on both sides: longrope='short' (those within "
                "original_max_position_embeddings) or longrope='long'"
            )
        )
    if dynamic and longrope == "long":
        raise NotCovered(
            "rope type 'dynamic': beyond max_position_embeddings every length has frequencies of its own: expected "
            "longrope='short'"
        )
    if module._parameters or module._modules:
        raise NotCovered("a rotary embedding of another form")
    configured = configured_of(module, longrope)
    found, notes = {}, []
    for prefix in prefixes(module):
        name = f"{prefix}inv_freq"
        value, note = judged(module, name, configured)
        if value is not None:
            found[name] = value
        notes += [note] if note else []
    forward, layout = _forward(module, configured, found)
    return forward, "; ".join(dict.fromkeys([layout] * bool(layout) + notes)), found, layout


def _numbers(module: nn.Module) -> str:
    """What its config has for rope_theta, and the factor of a scaling."""
    parameters = getattr(getattr(module, "config", None), "rope_parameters", None) or {}
    each = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    found = {name: [str(part[name]) for part in each if name in part] for name in ("rope_theta", "factor")}
    return ", ".join(f"{name} is {', '.join(values)}" for name, values in found.items() if values)


def _widths(module: nn.Module) -> str:
    """What its config has of the width that it rotates."""
    config = getattr(module, "config", None)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    shares = {part["partial_rotary_factor"] for part in each if part.get("partial_rotary_factor") is not None}
    return f"head_dim is {head}" + "".join(f", partial_rotary_factor {share}" for share in sorted(shares))


def configured_of(module: nn.Module, longrope: str | None) -> dict[str, Tensor]:
    """What a module of its class and configuration is made with, on a CPU; empty where that cannot be made."""
    try:
        with torch.device("cpu"):
            cls = class_of(module)
            fresh = cls(module.config) if hasattr(module, "config") else cls(module.dim, module.theta)
            found = {name: buffer for name, buffer in fresh._buffers.items() if buffer is not None}
            if longrope == "long":
                found |= _long(module)
    except Exception as error:
        if goes_by_length(module) or any(b is not None and b.is_meta for b in module._buffers.values()):
            what = "declared frequencies" if goes_by_length(module) else "frequencies, which are on the meta device,"
            raise NotCovered(f"its {what} cannot be made from its config") from error
        return {}
    return found


def _long(module: nn.Module) -> dict[str, Tensor]:
    """As transformers' own forward computes them for a sequence beyond the original length."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found = {}
    for prefix in prefixes(module):
        kind = prefix.removesuffix("_")
        of = module.config.rope_parameters[kind] if kind else module.config.rope_parameters
        if of["rope_type"] == "longrope":
            options = {"layer_type": kind} if kind else {}
            length = of["original_max_position_embeddings"] + 1
            make = ROPE_INIT_FUNCTIONS["longrope"]
            found[f"{prefix}inv_freq"] = make(module.config, torch.device("cpu"), seq_len=length, **options)[0]
    return found


def judged(module: nn.Module, name: str, configured: dict[str, Tensor]) -> tuple[Tensor | None, str]:
    """What has to stand there instead, or None, and what to say of it."""
    buffer, wanted = module._buffers[name], configured.get(name)
    if buffer.is_meta:
        return None, ""
    here = buffer.detach().cpu()
    dtype = str(buffer.dtype).removeprefix("torch.")
    if wanted is None or wanted.shape != here.shape:
        if buffer.dtype in _NARROW:
            raise NotCovered(f"its {name} is {dtype}, and {_CAST}; it cannot be computed again from its config")
        return None, ""
    put = wanted.to(buffer.device)
    if buffer.dtype == torch.float32 and torch.equal(here, wanted):
        return None, ""
    if goes_by_length(module):  # whatever a forward before has left there
        return put, "longrope: declared factors"
    for narrow in _NARROW:
        if torch.equal(here.double(), wanted.to(narrow).double()):
            return put, f"{name} was rounded to {str(narrow).removeprefix('torch.')}: computed again from its config"
    if buffer.dtype in _NARROW:
        raise NotCovered(
            f"its {name} is {dtype}, and {_CAST}; it is not what its config gives, rounded, so that it cannot be "
            "computed again"
        )
    near = bool(((here.double() - wanted.double()).abs() <= _DEVICES * wanted.double().abs()).all())
    if near:
        return put, f"{name} was computed on another device or in {dtype}: computed again from its config"
    return None, f"{name} is not what its config gives: kept, and compared with the engine's"


_CAST = "frequencies are float32: load with dtype=... or cast parameters alone, not by .bfloat16() or .to(dtype)"


def _forward(module: nn.Module, configured: dict[str, Tensor], put: dict[str, Tensor]) -> tuple[Callable, str]:
    several = hasattr(module, "mrope_section")
    positions = _PLACES[:, None] if several else _PLACES[:1]
    dtypes, layouts, axes = set(), {"", PAIRS, ONCE}, None
    for prefix in prefixes(module):
        name = f"{prefix}inv_freq"
        buffers = {
            key: configured.get(key) if b is None or b.is_meta else b.cpu() for key, b in module._buffers.items()
        }
        buffers |= {key: value.cpu() for key, value in put.items()}
        if (given := buffers[name]) is not None and not given.isfinite().all():
            numbers = _numbers(module)
            raise NotCovered(
                f"its {name} has {given[~given.isfinite()][0].item()}" + (f": {numbers}" if numbers else "")
            )
        if given is not None and not given.numel():
            raise NotCovered(f"it rotates nothing: {_widths(module)}: a rotation takes two numbers of a head at least")
        tried = twin(module)
        tried.__dict__["_buffers"] = buffers
        if goes_by_length(module):  # its own forward would put others there
            tried.__dict__["rope_type"] = _of_fixed_types(module)
        if several:
            axes = _axes_of(tried, name, _scaling(module, prefix))
        for dtype in (torch.float32, torch.bfloat16):
            args = [torch.zeros(1, 5, 4, dtype=dtype), positions, *([prefix.removesuffix("_")] if prefix else [])]
            got = run_stock(tried, *args)
            places = _PLACES if axes else _PLACES[0]
            expected = rope_cos_sin_ref(places, buffers[name], axes=axes, scaling=_scaling(module, prefix))
            tolerance = 1e-2 if got[0].dtype == torch.bfloat16 else 1e-4
            layouts = {
                layout
                for layout in layouts
                if len(got) == 2 and all(agree(g, laid_out(e, layout)[None], tolerance) for g, e in zip(got, expected))
            }
            if not layouts:
                raise NotCovered("a rotary embedding whose tables no aligned op computes")
            dtypes.add((dtype, got[0].dtype))
    if dtypes == {(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16)}:
        return _rotary_forward(True, axes), min(layouts)  # of one angle both are the same
    if {out for _, out in dtypes} == {torch.float32}:
        return _rotary_forward(False, axes), min(layouts)
    raise NotCovered("a rotary embedding whose tables have another dtype")


# of a trial, on three axes, as models of images take them
_PLACES = torch.tensor([[0, 1, 2, 7, 300], [5, 3, 9, 11, 200], [2, 8, 4, 100, 50]], dtype=torch.int64)


def _axes_of(tried: nn.Module, name: str, scaling: float) -> tuple[int, ...]:
    """Which axis each frequency turns with, of a module whose frequencies may all be the same one. Its tables are
    multiplied by `scaling` (of YaRN)."""
    count = len(tried._buffers[name])
    same = torch.full((count,), 2**-6, dtype=torch.float32)
    other = twin(tried)
    other.__dict__["_buffers"] = {**tried._buffers, name: same}
    sin = run_stock(other, torch.zeros(1, 5, 4, dtype=torch.float32), _PLACES[:, None])[1][0, :, :count]
    alone = [rope_cos_sin_ref(axis, same, scaling=scaling)[1][:, :1] for axis in _PLACES]
    near = torch.stack([((sin - one).abs() < 1e-4).all(0) for one in alone])
    if sin.shape != (5, count) or not bool((near.sum(0) == 1).all()):
        raise NotCovered("a rotary embedding whose frequencies turn with none of three axes")
    return tuple(near.int().argmax(0).tolist())


def _of_fixed_types(module: nn.Module):
    kinds = module.rope_type
    return dict.fromkeys(kinds, "default") if isinstance(kinds, dict) else "default"


def _scaling(module: nn.Module, prefix: str) -> float:
    return float(getattr(module, f"{prefix}attention_scaling", 1.0))


class Tables:
    """cos and sin, to be unpacked or indexed as a tuple is. FSDP2 rounds tensors in tuples, dictionaries and
    dataclasses on their way into a unit (MixedPrecisionPolicy.cast_forward_inputs); into another object it does not
    look."""

    __slots__ = ("_pair",)

    def __init__(self, cos: Tensor, sin: Tensor) -> None:
        self._pair = cos, sin

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index):
        return self._pair[index]

    def __iter__(self):
        return iter(self._pair)


@functools.cache
def _rotary_forward(cast: bool, axes: tuple[int, ...] | None) -> Callable:
    def rotary_forward(self, x, position_ids, layer_type=None):
        prefix = "" if layer_type is None else f"{layer_type}_"
        inv_freq = getattr(self, f"{prefix}inv_freq").to(x.device, torch.float32)
        dtype = x.dtype if cast else torch.float32
        several = axes is not None and position_ids.dim() == 3
        flat = (position_ids.flatten(1) if several else position_ids.reshape(-1)).to(x.device)
        options = {"scaling": _scaling(self, prefix), "dtype": dtype, "axes": axes if several else None}
        tables = vx.rope_cos_sin(flat, inv_freq, **options)
        cos, sin = (t.view(*position_ids.shape[-2:], -1) for t in tables)
        return Tables(cos, sin) if not cast and self._vexact.sharded() else (cos, sin)

    return rotary_forward

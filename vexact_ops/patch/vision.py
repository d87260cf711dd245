"""The pieces of an image encoder (a tower), and of the model that puts what it makes of images among the tokens.

Each is tried like all others (see pieces.py): the class's own forward, on small stand-ins for the modules inside, has
to agree with ours. Blocks, mergers and layers stay the model's own Python.
"""

import functools
import inspect
import itertools
import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

import vexact_ops as vx

from ..rope.reference import rope_cos_sin_ref, rope_ref
from . import rotary
from .batch import heads_last
from .grids import Grid, Lattice, axes_of, grids_of, lattice, patches
from .images import Vision, compute, images_of
from .pieces import NotCovered, agree, class_of, random, run_stock, twin
from .slots import without_slots

TURN = "apply_rotary_pos_emb_vision"

# patches: a convolution whose stride is its kernel


def is_patches(module: nn.Module) -> bool:
    return [type(child) for child in module.children()] in ([nn.Conv3d], [nn.Conv2d]) and not module._parameters


def patches_forward(module: nn.Module) -> Callable:
    ((name, conv),) = module.named_children()
    whole = conv.stride == conv.kernel_size and set(conv.padding) == {0} and set(conv.dilation) == {1}
    if not whole or conv.groups != 1:
        raise NotCovered("a convolution whose patches overlap, or are cut otherwise than in a row")
    width = conv.in_channels * math.prod(conv.kernel_size)
    weight, x = random(conv.out_channels, width, seed=1), random(3, width, seed=2)
    other = twin(conv)
    held = {"weight": weight.view(conv.weight.shape)}
    if conv.bias is not None:
        held["bias"] = random(conv.out_channels, seed=3)
    other.__dict__["_parameters"] = {**conv._parameters, **{n: nn.Parameter(p) for n, p in held.items()}}
    expected = x @ weight.t() + held.get("bias", 0)
    if not agree(run_stock(twin(module, {name: other}), x), expected, 1e-9):
        raise NotCovered("patches that are computed otherwise than by one product")
    return _patches_forward(name)


@functools.cache
def _patches_forward(name: str) -> Callable:
    def patches_forward(self, hidden_states):
        conv = self._modules[name]
        weight = conv.weight.flatten(1)
        return vx.linear(hidden_states.view(-1, weight.shape[1]).to(weight.dtype), weight, conv.bias)

    return patches_forward


# attention: the module's own code, with the globals that it calls replaced


def is_image_attention(module: nn.Module) -> bool:
    function = inspect.unwrap(class_of(module).forward)
    takes = inspect.signature(function).parameters
    return "cu_seqlens" in takes and "ALL_ATTENTION_FUNCTIONS" in function.__code__.co_names


class _Interface:
    def get_interface(self, name, default=None):
        return attend_images


def attend_images(
    module, query, key, value, attention_mask=None, scaling=None, dropout=0.0, cu_seq_lens_q=None, is_causal=False,
    vexact_longest=None, **kwargs,
):  # fmt: skip
    """As batch.attend; patches see those of their own image's frame, or of their window."""
    if vexact_longest is None:
        raise RuntimeError("vexact attention: call the patched tower, not its blocks: its forward lays out the images")
    if dropout or is_causal:
        raise ValueError(f"vexact attention: got dropout={dropout}, is_causal={is_causal}, expected neither")
    q, k, v = heads_last(query), heads_last(key), heads_last(value)
    out = vx.attention_varlen(q, k, v, cu_seq_lens_q, vexact_longest, scale=scaling, causal=False)
    return out[None], None


@functools.cache
def image_attention_forward(cls: type) -> Callable:
    original = inspect.unwrap(cls.forward)
    scope = {**original.__globals__, "ALL_ATTENTION_FUNCTIONS": _Interface()}
    scope.pop("__name__", None)
    scope["is_flash_attention_requested"] = lambda *args, **kwargs: True  # all images in one call
    scope["get_max_seqlen"] = lambda cu_seqlens, *args, **kwargs: None
    if TURN not in original.__code__.co_names:
        raise NotCovered(f"attention of images without {TURN}")
    _check_turn(without_slots(scope[TURN]))
    scope[TURN] = vx.rope
    forward = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    forward.__kwdefaults__ = original.__kwdefaults__
    forward.__qualname__, forward.__module__ = original.__qualname__, "vexact_ops.patch"
    return forward


def _check_turn(apply: Callable) -> None:
    q, k, angle = random(5, 2, 12, seed=1), random(5, 2, 12, seed=2), random(5, 6, seed=3)
    cos, sin = (torch.cat((f(angle), f(angle)), -1) for f in (torch.cos, torch.sin))
    first, others = itertools.islice(takes := inspect.signature(apply).parameters, 4), list(takes.values())[4:]
    if [*first] != ["q", "k", "cos", "sin"] or any(p.default is p.empty for p in others):
        raise NotCovered(f"{TURN} takes other arguments than q, k, cos, sin")
    got = apply(q, k, cos, sin)
    if not all(agree(g, e, 1e-5) for g, e in zip(got, rope_ref(q, k, cos, sin))):
        raise NotCovered(f"{TURN} rotates in a way that no aligned op computes")


# the tower


def is_tower(module: nn.Module) -> bool:
    return {"patch_embed", "blocks", "merger", "rotary_pos_emb"} <= set(module._modules)


class Sizes(NamedTuple):
    """Of a tower: blocks of merge x merge patches, the side of its table of positions, blocks in a row of a window, and
    which layers see whole frames all the same."""

    merge: int
    side: int | None
    window: int | None
    whole: frozenset[int]

    @classmethod
    def of(cls, tower: nn.Module) -> "Sizes":
        table, window, merge = tower._modules.get("pos_embed"), None, tower.spatial_merge_size
        if hasattr(tower, "window_size"):
            window = tower.window_size // merge // tower.patch_size
        side = None if table is None else int(table.num_embeddings**0.5)
        return cls(merge, side, window, frozenset(getattr(tower, "fullatt_block_indexes", ())))


def _lattice(tower: nn.Module, grids: tuple[Grid, ...], device: torch.device) -> Lattice:
    sizes = Sizes.of(tower)
    found = lattice(grids, sizes.merge, sizes.side, sizes.window)
    if device.type == "cpu":
        return found
    there = [x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in found]
    if found.windows is not None:
        parts = (x.to(device, non_blocking=True) if isinstance(x, Tensor) else x for x in found.windows)
        there[-1] = type(found.windows)(*parts)
    return Lattice(*there)


def interpolated(table: Callable[[Tensor], Tensor], taps: Tensor, weights: Tensor) -> Tensor:
    """Each patch's position: rows of the table times fp32 weights, rounded, and added in the taps' order. table(ids)
    gives rows. A row depends on its own taps alone; the sum of products that transformers takes has the same bits."""
    total = None
    for tap, weight in zip(taps.unbind(1), weights.unbind(1)):  # order: taps ascending
        part = table(tap) * weight[:, None]
        total = part if total is None else total + part
    return total


@functools.cache
def _takes_longest(cls: type) -> bool:
    return "max_seqlen" in inspect.signature(inspect.unwrap(cls.forward)).parameters


def make_tower_forward(output: type) -> Callable:
    def tower_forward(self, hidden_states, grid_thw, return_dict=True, **kwargs):
        """(N, channels * patch) pixels of all images to a row for each token."""
        sizes = Sizes.of(self)
        grids = grids_of("tower", grid_thw, sizes.merge)
        if hidden_states.dim() != 2 or len(hidden_states) != sum(map(patches, grids)):
            got, expected = tuple(hidden_states.shape), sum(map(patches, grids))
            raise ValueError(f"pixel_values: got shape {got}, expected the {expected} patches of image_grid_thw")
        found = _lattice(self, grids, hidden_states.device)
        x = self.patch_embed(hidden_states)
        if found.taps is not None:
            x = x + interpolated(self.pos_embed, found.taps, found.weights).to(x.dtype)
        places, block = found.places, sizes.merge**2
        if found.windows is not None:
            x = x.view(-1, block, x.shape[-1])[found.windows.order].view(x.shape)
            places = places.view(2, -1, block)[:, found.windows.order].reshape(2, -1)
        tables, features = self.rotary_pos_emb(places), []
        if any(isinstance(layer, FSDPModule) for layer in self.blocks):
            tables = rotary.Tables(*tables)  # which would be rounded on their way into a unit
        taken = list(getattr(self, "deepstack_visual_indexes", ()))
        for i, layer in enumerate(self.blocks):
            by = found if found.windows is None or i in sizes.whole else found.windows
            more = {"max_seqlen": by.longest} if _takes_longest(class_of(layer)) else {}  # VeOmni's
            x = layer(x, cu_seqlens=by.cu_seqlens, position_embeddings=tables, vexact_longest=by.longest, **more)
            if i in taken:
                features.append(self.deepstack_merger_list[taken.index(i)](x))
        merged = self.merger(x)
        if found.windows is not None:
            merged = merged[found.windows.back]
        more = {"deepstack_features": features} if "deepstack_features" in output.__dataclass_fields__ else {}
        return output(last_hidden_state=x, pooler_output=merged, **more)

    return tower_forward


_made_tower_forward = functools.cache(make_tower_forward)


def tables_forward(self, places: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 tables of (2, N) rows and columns: half of the angles turn with the row, half with the column."""
    inv_freq = self.inv_freq.to(places.device, torch.float32)
    count = len(inv_freq)
    return vx.rope_cos_sin(places, inv_freq.repeat(2), axes=(0,) * count + (1,) * count)


class _Stand(nn.Module):
    """Stands for a module in a trial, and has what a tower or model reads of it."""

    def __init__(self, function: Callable, **known: Any):
        super().__init__()
        self.__dict__.update(function=function, **known)

    def forward(self, *args, **kwargs):
        return self.function(*args, **kwargs)


_H = 6  # width of a trial


def _block(mix: Tensor) -> Callable:
    """Tells tables, boundaries and its input apart."""

    def block(x, cu_seqlens, position_embeddings, **kwargs):
        cos, sin = position_embeddings
        owner = torch.searchsorted(cu_seqlens.long(), torch.arange(len(x)), right=True).double()
        return (
            0.9 * x + (cos.double() @ mix[: cos.shape[-1]] + sin.double() @ mix[-sin.shape[-1] :]) + owner[:, None] / 9
        )

    return block


def tower_forward(module: nn.Module, longrope: str | None = None) -> tuple[Callable, dict[str, Tensor], str]:
    """The aligned forward of a tower, frequencies that have to be put into its tables, and a note."""
    try:
        sizes, tables = Sizes.of(module), module.rotary_pos_emb
    except AttributeError as error:
        raise NotCovered(f"an image encoder of another form: it has no {error.name}") from error
    configured = rotary.configured_of(tables, None)
    buffers, notes = {}, []
    for name in ("inv_freq",):
        put, note = rotary.judged(tables, name, configured)
        buffers |= {} if put is None else {name: put}
        notes += [note] if note else []
    small = twin(tables)
    small.__dict__["_buffers"] = {
        name: (configured.get(name) if b is None or b.is_meta else b.cpu()) for name, b in tables._buffers.items()
    } | {name: b.cpu() for name, b in buffers.items()}
    count, m = len(small._buffers["inv_freq"]), sizes.merge
    mix = random(4 * count, _H, seed=5)
    merger = _Stand(lambda x: x.reshape(-1, _H * m * m))
    children: dict[str, nn.Module] = {
        "patch_embed": _Stand(lambda x: x),
        "rotary_pos_emb": small,
        "blocks": nn.ModuleList(_Stand(_block(mix * (i + 1))) for i in range(len(module.blocks))),
        "merger": merger,
    }
    if "pos_embed" in module._modules:
        children["pos_embed"] = nn.Embedding(sizes.side**2, _H, _weight=random(sizes.side**2, _H, seed=6))
    if "deepstack_merger_list" in module._modules:
        each = range(len(module.deepstack_merger_list))
        children["deepstack_merger_list"] = nn.ModuleList(
            _Stand(lambda x, i=i: (i + 2) * x.reshape(-1, _H * m * m)) for i in each
        )
    if strangers := set(module._modules) - set(children):
        raise NotCovered(f"an image encoder of another form: it has {', '.join(sorted(strangers))}")
    grids = (1, 4 * m, 7 * m), (2, 2 * m, 10 * m), (1, m, m)
    x, tried = random(sum(map(patches, grids)), _H, seed=7), twin(module, children)
    tried.__dict__["training"] = False
    got = run_stock(tried, x, grid_thw=torch.tensor(grids, dtype=torch.int64))
    children["rotary_pos_emb"] = _Stand(lambda places: _reference_tables(places, small._buffers["inv_freq"]))
    with torch.no_grad():
        ours = make_tower_forward(type(got))(twin(module, children), x, grids)
    fields = "last_hidden_state", "pooler_output"
    same = all(agree(getattr(ours, f), getattr(got, f).double(), 1e-5) for f in fields)
    stacks = [getattr(out, "deepstack_features", None) or [] for out in (ours, got)]
    if not same or len(stacks[0]) != len(stacks[1]) or not all(map(agree, *stacks)):
        raise NotCovered("an image encoder that lays out or mixes its patches in another way")
    return _made_tower_forward(type(got)), buffers, "; ".join(notes)


def _reference_tables(places: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
    count = len(inv_freq)
    return rope_cos_sin_ref(places, inv_freq.repeat(2), axes=[0] * count + [1] * count)


# the layers' additions


def has_deepstack(module: nn.Module) -> bool:
    return hasattr(type(module), "_deepstack_process")


def deepstack_process(self, hidden_states: Tensor, visual_pos_masks: Tensor, visual_embeds: Tensor) -> Tensor:
    """The rows of image tokens and theirs, added; without asking how many there are."""
    where = visual_pos_masks[..., None]
    added = torch.zeros_like(hidden_states).masked_scatter(where, visual_embeds.to(hidden_states.dtype))
    return torch.where(where, hidden_states + added, hidden_states)


def check_deepstack(module: nn.Module) -> None:
    hidden, rows = random(2, 5, 4, seed=1), random(3, 4, seed=2)
    mask = torch.tensor([[0, 1, 0, 0, 1], [0, 0, 1, 0, 0]], dtype=torch.bool)
    got = run_stock(module, hidden, mask, rows, forward=type(module)._deepstack_process.__get__(module))
    if not agree(got, deepstack_process(module, hidden, mask, rows), 1e-12):
        raise NotCovered("it adds features to image tokens in another way")


# the model around the tower and the decoder


def is_image_model(base: nn.Module) -> bool:
    names = set(base._modules)
    return any(is_tower(child) for child in base.children()) and len(names) == 2


_MARKS = {"begin": "start", "end": "end"}


def image_model(base: nn.Module) -> Vision:
    """What is known of it, once its class's own forward is known to do nothing else than ours."""
    (tower, encoder), (decoder, _) = sorted(base.named_children(), key=lambda item: not is_tower(item[1]))
    token, merge = getattr(base.config, "image_token_id", None), encoder.spatial_merge_size
    if token is None:
        raise NotCovered("its config names no image_token_id")
    deepstack = len(getattr(encoder, "deepstack_merger_list", ()))
    conv = next(encoder.patch_embed.children())
    marks = {name: getattr(base.config, f"vision_{kind}_token_id", None) for name, kind in _MARKS.items()}
    vision = Vision(tower, decoder, token, merge, deepstack, conv.weight[0].numel(), object, **marks)
    grids = ((1, 2 * merge, 3 * merge), (1, merge, 2 * merge))
    row = 6 * [token], 2 * [-1], 2 * [token], [-1]
    output = _output_of(vision, base, row, {"image": grids})
    if output is None:
        raise NotCovered("it puts images among the tokens, or counts positions, in another way")
    return _with_videos(replace(vision, output=output), base)


def _with_videos(vision: Vision, base: nn.Module) -> Vision:
    """Where it puts videos among the tokens as we do, and images beside them."""
    video, merge = getattr(base.config, "video_token_id", None), vision.merge
    if video is None:
        return vision
    per_second = float(getattr(base.config.vision_config, "tokens_per_second", None) or 1)
    grids = {"image": ((1, merge, merge),) * 2, "video": ((2, merge, 2 * merge), (3, merge, merge))}
    for apart in (True, False):
        found = replace(vision, video=video, frames_apart=apart, per_second=per_second)
        text = [-1] * apart
        first, second = 2 * (2 * [video] + text), 3 * ([video, *text])
        row = [vision.token], [-1], first, [-1], [vision.token], [-1], second
        if _output_of(found, base, row, grids) is not None:
            return found
    return vision


def _output_of(vision: Vision, base: nn.Module, parts: Sequence[list[int]], grids: Mapping[str, tuple]) -> type | None:
    """The class of what its own forward returns for a row of these tokens (-1: text), with images and videos of these
    grids; None where ours has other values."""
    taken = {-1, vision.token, vision.video}
    text = next(i for i in range(3) if i not in taken)
    ids = torch.tensor([[text, *itertools.chain(*parts)]], dtype=torch.int64)
    ids = torch.where(ids == -1, text, ids)
    block, table = vision.merge**2 * vision.width, random(5, 4, seed=2)
    mixes = [random(block, 4, seed=1 + 2 * i) / block**0.5 for i in range(1 + vision.deepstack)]

    def kind_of(ids):
        return (ids == vision.token).long() + 2 * (ids == vision.video)

    def tower_call(x, grid_thw, **kwargs):
        pooled, *features = (x.reshape(-1, block) @ mix for mix in mixes)  # of each token's own patches
        given = {"deepstack_features": features} if features else {}
        return types.SimpleNamespace(pooler_output=pooled, **given)

    def stack_call(input_ids=None, inputs_embeds=None, position_ids=None, **kwargs):
        from transformers.modeling_outputs import MoeModelOutputWithPast  # some read router_logits, which may be None

        masks, stacks = kwargs.get("visual_pos_masks"), kwargs.get("deepstack_visual_embeds") or ()
        total = inputs_embeds + position_ids.double().sum(0)[..., None] / 7 + position_ids[2].double()[..., None]
        for given in stacks:
            total = deepstack_process(base, 2 * total, masks, torch.cat(tuple(given)) if _is_list(given) else given)
        return MoeModelOutputWithPast(last_hidden_state=total)

    known = {"dtype": torch.float64, "spatial_merge_size": vision.merge}
    embedding = _Stand(lambda ids: table[kind_of(ids)])
    stand = _Stand(stack_call, embed_tokens=embedding, get_input_embeddings=lambda: embedding)
    tried = twin(base, {vision.tower: _Stand(tower_call, **known), vision.decoder: stand})
    tried.__dict__["get_input_embeddings"] = lambda: embedding
    given = {"mm_token_type_ids": kind_of(ids).int()}
    for (kind, each), name in zip(grids.items(), ("pixel_values", "pixel_values_videos")):
        given[name] = random(sum(map(patches, each)), vision.width, seed=9 + len(given)) + 5
        given[f"{kind}_grid_thw"] = torch.tensor(each, dtype=torch.int64)
    if "video" in grids and not vision.frames_apart:
        given["second_per_grid_ts"] = torch.tensor([1.5, 0.7], dtype=torch.float32)
    try:
        got = run_stock(tried, input_ids=ids, **given)
    except NotCovered:
        if "video" in grids:
            return None
        raise
    encoded, waiting = images_of(vision, tried, ids, given, False)
    places = axes_of(ids[0].tolist(), waiting, vision.merge, "trial")
    ours = compute(replace(vision, output=type(got)), tried, ids, embedding(ids), encoded, places[:, None], {})
    return type(got) if agree(ours.last_hidden_state, got.last_hidden_state, 1e-9) else None


def _is_list(value: object) -> bool:
    return isinstance(value, list | tuple)

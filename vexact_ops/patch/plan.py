"""What becomes of each module of a model: a change, a reason to keep it as it is, or a problem.

A patch (state.py) is what the answers are written to.
"""

import functools
import inspect
import itertools
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from .._core.backend import BackendUnavailable
from . import audit, lora, mixture, pieces
from .description import Pages
from .pieces import NotCovered
from .recognise import INNER, Facts, Keep, Replace, cache_name, check_own_forward, recognise

if TYPE_CHECKING:
    from .state import Patch

_KNOWN_KWARGS = {
    "position_ids", "use_cache", "cache_position", "is_causal", "output_attentions", "output_hidden_states",
    "output_router_logits",
}  # fmt: skip


class UnsupportedModule(ValueError):
    """The model holds modules whose bits would depend on the batch; the message names all of them."""


def refuse_problems(patch: "Patch") -> None:
    if not patch.problems:
        return
    alike: dict[tuple[str, str], list[str]] = {}
    for path, cls, reason in patch.problems:
        alike.setdefault((cls, reason), []).append(path or "(root)")
    lines = [
        f"  {paths[0]} ({cls}){f' and {len(paths) - 1} more' if len(paths) > 1 else ''}: {reason}"
        + "".join(f"\n    {path}" for path in paths[1:] if len(paths) <= 8)
        for (cls, reason), paths in alike.items()
    ]
    raise UnsupportedModule(
        f"patch.hf: {type(patch.model).__name__} has modules whose bits could depend on the batch:\n" + "\n".join(lines)
    ) from patch.cause


def find(patch: "Patch") -> None:
    """Sort every module into a change, a reason to keep it, or a problem."""
    model = patch.model
    patch.base = model.base_model
    patch.head = model.get_output_embeddings()
    if patch.head is None and (score := pieces.score_head(model)) is not None:
        patch.head, patch.classifies = score, True
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"patch.hf: model: got {type(model).__name__}, an encoder and a decoder, expected a decoder alone"
        )
    for config in (model.config, getattr(patch.base, "config", None)):
        if not getattr(config, "return_dict", True):
            raise ValueError(
                f"patch.hf: model: config.return_dict is {config.return_dict} in a {type(model).__name__}, whose own "
                "forward raises with it: set it to True, and call the model with return_dict=False for a tuple"
            )
    children = dict(model.named_children())
    parts = {id(part) for part in (patch.base, patch.head)}
    if patch.head is not None:
        patch.heads = {id(m) for m in (lora.copies(patch.head) if lora.is_saved(patch.head) else [patch.head])}
    if patch.base is not model and {id(child) for child in children.values()} != parts:
        raise ValueError(
            f"patch.hf: model: got {type(model).__name__} (of {', '.join(children)}), expected a decoder, or a causal "
            "language model of a decoder and an output layer"
        )
    facts, placed, layouts = _facts(patch), set[int](), set[str]()
    for path, module in model.named_modules():
        if "_vexact" in module.__dict__:
            raise ValueError(f"patch.hf: model: its part {path} is already patched on its own: undo that first")
        drops = _drops(module) if patch.trains else []
        for reason in drops:
            patch.refuse(path, module, reason)
        if drops and not patch.strict:
            continue
        try:
            check_own_forward(module)
            pieces.check_plain(module)
            if id(module) in patch.inner and any(hooks_of(module)):
                raise NotCovered("it has a hook that would not run, for its block computes what it would: take it off")
            if id(module) in placed:
                continue
            parent = path.rpartition(".")[0]
            strange = parent in patch.blocks and bool(pieces.strangers(model.get_submodule(parent)))
            answer = recognise(module, replace(facts, path=path, inner=id(module) in patch.inner, strange=strange))
        except NotCovered as reason:
            patch.refuse(path, module, str(reason), reason.__cause__)
        else:
            placed |= _write(patch, path, module, answer)
            layouts |= {answer.tables} - {None} if isinstance(answer, Replace) else set()
    patch.tables = layouts or {""}
    if len(layouts) > 1:
        patch.refuse("", model, "its rotary tables are laid out in another way than its attention takes them")
    if patch.options["latent"] and not any(row.note == "latent" for row in patch.report):
        patch.refuse("", model, "latent: no attention of it is latent")


def leave_head_stock(patch: "Patch") -> None:
    """Of a patch that is not strict, before it is tried: where the output layer or the forward around it is refused,
    both compute what they did, for one calls the other in a way of ours."""
    whole = {id(patch.model), *patch.heads} - {id(patch.base)}
    modules = dict(patch.model.named_modules())
    patch.headless = any(id(modules[path]) in whole for path, _, _ in patch.problems)
    if patch.headless:
        _take_back(patch, whole)


def leave_stock(patch: "Patch") -> None:
    """And once it has been: attention that only a run has shown to ask for something else is taken back too, and
    whatever stays stock and takes a mask gets the model's own.

    raises   UnsupportedModule where what stays stock would be given what it does not know: experts an aligned router's
             choice, attention tables in our layout, or no mask, where layers are told of the batch by that alone
    """
    modules = dict(patch.model.named_modules())
    refused = [modules[path] for path, _, _ in patch.problems]
    _take_back(patch, {id(module) for module in refused if pieces.is_attention(module)})
    within = [module for module in refused if module is not patch.model and module is not patch.base]
    patch.own_masks = any(map(_takes_masks, within))
    untold = patch.own_masks and (patch.by_mask or patch.tables != {""})
    if untold or any(map(mixture.is_experts, within)):
        refuse_problems(patch)


def _take_back(patch: "Patch", modules: set[int]) -> None:
    """What was changed about these modules, by their ids."""
    for change in [change for change in patch.changes if id(change.module) in modules]:
        patch.take_back(change)
    paths = {path for path, module in patch.model.named_modules() if id(module) in modules}
    patch.report = type(patch.report)(row for row in patch.report if row.path not in paths or not row.replacement)


def _takes_masks(module: nn.Module) -> bool:
    takes = inspect.signature(pieces.class_of(module).forward).parameters.values()
    return any(p.name == "attention_mask" or p.kind is p.VAR_KEYWORD for p in takes)


def around_the_whole(patch: "Patch") -> tuple[int, ...]:
    """Hooks on the whole model, by number: those that neither FSDP2 has put there nor the decoder's own call runs."""
    if patch.model is patch.base or isinstance(patch.model, FSDPModule):
        return ()
    return *patch.model._forward_pre_hooks, *patch.model._forward_hooks


def hooks_of(module: nn.Module) -> tuple[dict, ...]:
    """Where its hooks stand, by kind."""
    return module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks


def _facts(patch: "Patch") -> Facts:
    try:
        cache = cache_name(patch.base)
    except NotCovered:  # said of the decoder, when its turn comes
        cache = patch.cache
    kept, options = frozenset(mixture.kept_in_fp32(patch.model)), patch.options
    heads = frozenset(patch.heads)
    return Facts(
        patch.model, patch.base, patch.head, heads, kept, cache, options["latent"], options["longrope"], patch.tried
    )


def _write(patch: "Patch", path: str, module: nn.Module, answer: Replace | Keep) -> set[int]:
    """Returns the children for whom it has spoken."""
    if answer.unaligned:
        patch.blocks[path] = answer.unaligned
    if isinstance(answer, Keep):
        if patch.rows is not None and isinstance(module, nn.Embedding):
            patch.replace(path, module, pieces.class_of(module).forward, "embedding", answer.note)
        else:
            patch.keep(path, module, answer.note)
        return set()
    vars(patch).update(answer.known)
    patch.inner.update(map(id, answer.computes))
    for name, tensor in answer.buffers.items():
        patch.put(module, name, tensor)
    patch.replace(path, module, answer.forward, answer.ops, answer.note, answer.name)
    for name, child in answer.children.items():
        if isinstance(child, Keep) and child.note == INNER:
            patch.inner.add(id(module._modules[name]))
        _write(patch, f"{path}.{name}", module._modules[name], child)
    return {id(module._modules[name]) for name in answer.children}


_OF_NO_BIT = {"training", "gradient_checkpointing", "name_or_path", "in_features", "out_features", "architectures"}
_OF_NO_BIT |= {"use_cache", "output_hidden_states", "return_dict", "tie_word_embeddings", "is_decoder"}
_OF_NO_BIT |= {"forward"}  # a layer's may be set, and taken back, by a patch itself; others' is looked for elsewhere
# What forwards and masks take from a config, whatever it is there at first.
_OF_FORWARDS = {"logits_scaling", "final_logit_softcapping", "output_router_logits", "sliding_window", "is_causal"}
_IMPLEMENTATIONS = "_attn_implementation_internal", "_experts_implementation_internal"  # by name, of a registry
_BIDIRECTIONAL = "use_bidirectional_attention"  # and in the masks of a class that reads it
# By which a forward may choose what it computes, and which of them it calls.
_CHOICES = (int, float, str, type(None), types.FunctionType, types.BuiltinFunctionType, functools.partial)


def numbers(patch: "Patch") -> tuple[list[dict], list[str], list]:
    """Where numbers stand that a forward, or who has read its description, may have from the time of the patch, their
    names, and what they were: those of the modules (an epsilon, a window, top_k), with names and functions that they
    choose by, and of the config, lists (layer_types) too; and the configs themselves. So do parameters and buffers that
    are None, a bias that a module does not have.
    """
    holders = []
    configs = patch.model.config, patch.base.config, patch.base.config.get_text_config()
    for config in {id(config): config for config in configs}.values():
        kinds = (int, float, bool, list)
        names = {n for n, v in vars(config).items() if type(v) in kinds and not n.endswith("_token_id")}
        names = names - _OF_NO_BIT | _OF_FORWARDS
        names = [name for name in sorted(names) if not name.startswith("_")]
        holders += [(vars(config), name) for name in (*names, *_IMPLEMENTATIONS)]
    for module in patch.model.modules():
        if not lora.is_peft(module):
            own = (n for n, value in vars(module).items() if n == "config" or isinstance(value, _CHOICES))
            holders += [(vars(module), n) for n in own if n not in _OF_NO_BIT and not n.startswith("_")]
    for module in patch.model.modules():
        for store in (module._parameters, module._buffers):
            holders += [(store, name) for name, tensor in store.items() if tensor is None]
    values = [h.get(n) for h, n in holders]
    return [h for h, _ in holders], [n for _, n in holders], [list(v) if type(v) is list else v for v in values]


def own_methods(module: nn.Module) -> list[str]:
    """What stands on this very module in the place of methods of its class, forward apart."""
    return [n for n in vars(module) if n != "forward" and callable(getattr(type(module), n, None))]


def tensors(model: nn.Module) -> list[tuple]:
    """The parameters and buffers that a model has, in which shapes and dtypes, whatever they hold."""
    stores = ((path, s) for path, module in model.named_modules() for s in (module._parameters, module._buffers))
    found = ((path, name, tensor) for path, store in stores for name, tensor in store.items())
    return [(path, name, None if t is None else (t.shape, t.dtype)) for path, name, t in found]


def around_attention(patch: "Patch") -> list[nn.Module]:
    """Attention's modules, and all that they are in but the decoder itself."""
    modules = dict(patch.base.named_modules())
    paths = {path for path, module in modules.items() if pieces.is_attention(module)}
    for path in list(paths):
        while path := path.rpartition(".")[0]:
            paths.add(path)
    return [modules[path] for path in sorted(paths - {""})]


def _rates(module: nn.Module, *words: str) -> dict[str, float]:
    """Its numbers above 0 that have one of these words in their names."""
    if isinstance(module, nn.Dropout):
        return {"p": module.p} if module.p > 0 else {}
    named = {n: v for n, v in vars(module).items() if isinstance(v, float) and v > 0}
    return {n: v for n, v in named.items() if any(word in n for word in words)}


def _drops(module: nn.Module) -> list[str]:
    """What a module drops in training (whole layers too: layerdrop), and how not to."""
    return [
        f"{name} is {value}: a dropped value is not aligned, set it to 0"
        + (f" (from_pretrained(..., {name}=0.0))" if hasattr(getattr(module, "config", None), name) else "")
        for name, value in _rates(module, "dropout", "layerdrop").items()
    ]


def passed_over(patch: "Patch") -> list[tuple[nn.Module, dict[str, float]]]:
    """Of a patch that is not for training: modules that drop something in training, or add noise, and at which rates.
    Some do so in the middle of their own forward, where no piece sees it."""
    words, modules = ("dropout", "layerdrop", "noise"), () if patch.trains else patch.model.modules()
    return [(module, rates) for module in modules if (rates := _rates(module, *words))]


def check_runs(patch: "Patch") -> None:
    """Run the patched model on fake tensors and refuse what is neither aligned nor exact. What has been refused already
    runs as stock: of that, nothing more is said of the operations that it runs."""
    modules = dict(patch.model.named_modules())
    refused = {path for path, _, _ in patch.problems}
    patch.seen = []
    try:
        call = functools.partial(_small_call, patch=patch)
        found = audit.run(patch.model, {id(m): path for path, m in modules.items()}, call, patch.trains)
    except BackendUnavailable:  # no fault of the model's
        raise
    except Exception as error:
        path = _blame(error, {id(m): path for path, m in modules.items()})
        known = isinstance(error, NotCovered)
        if refused and not known:  # what is refused may well be why
            return
        reason = str(error) if known else f"it does not run on a small batch ({type(error).__name__}: {error})"
        patch.refuse(path, modules[path], reason, None if known else error)
        return
    finally:
        runs, patch.seen = patch.seen, None
    for path, operations in found.items():
        if path in refused:
            continue
        _refuse_operations(patch, modules, path, f"runs {', '.join(sorted(operations))} outside the aligned ops")
    paths = {id(m): path for path, m in modules.items()}
    patch.attended = tuple(memory for _, _, memory in runs[0]) if runs else ()
    read = set().union(*(_names_read(module) for module in (patch.base, *around_attention(patch))))
    for place, (module, asked, memory) in itertools.chain.from_iterable(map(enumerate, runs)):
        if not isinstance(memory, Pages):
            continue
        path = paths[id(module)]
        given = {**asked, "dropout": None} if path in refused else asked
        config = patch.base.config.get_text_config()
        for reason in _attention_problems(config, module, place, memory.window, given, read):
            patch.refuse(path, modules[path], reason)


def _refuse_operations(patch: "Patch", modules: dict[str, nn.Module], path: str, what: str) -> None:
    """By the name of what it is for: in a feed-forward block that has no aligned form, of what was put into that."""
    block = next((p for p in (path, path.rpartition(".")[0]) if p in patch.blocks), None)
    if block is None:
        patch.refuse(path, modules[path], what)
        return
    strange = pieces.strangers(modules[block])
    for name in strange:
        cls = pieces.class_of(modules[block]).__name__
        patch.refuse(
            f"{block}.{name}",
            modules[block]._modules[name],
            f"the forward of {cls} does not know it, and with it {block} has no aligned form: {path} {what}",
        )
    if not strange:
        patch.refuse(path, modules[path], f"{what}, for {block} is {patch.blocks[block]}")


def _blame(error: BaseException, paths: dict[int, str]) -> str:
    """The innermost module whose forward was running."""
    frame, path = error.__traceback__, ""
    while frame is not None:
        path = paths.get(id(frame.tb_frame.f_locals.get("self")), path)
        frame = frame.tb_next
    return path


def _small_call(model: nn.Module, ids: Tensor, patch: "Patch"):
    vision = patch.vision
    if vision is not None:
        side, device = 2 * vision.merge, ids.device
        row = torch.full((1, 6), vision.token, dtype=torch.int64, device=device)
        pixels = torch.zeros(side * side, vision.width, dtype=torch.float32, device=device)
        ends = torch.tensor([0, 6], dtype=torch.int32, device=device)
        model(
            input_ids=torch.cat((ids[:1, :2], row[:, :4]), 1),
            position_ids=torch.zeros(4, 1, 6, dtype=torch.int64, device=device),
            cu_seq_lens_q=ends,
            max_length_q=6,
            pixel_values=pixels,
            image_grid_thw=((1, side, side),),
            use_cache=False,
        )
    out = model(input_ids=ids, use_cache=False)
    if patch.call is not None:
        (called, made, writes), patch.call = patch.call, None
        other = "is called with" if called is not ids or ids._version else ""
        if getattr(out, "logits", None) is not made or made._version != writes:
            other = "returns"
        if other:
            raise NotCovered(
                f"a hook on it changes what the whole model {other}: log-probabilities are formed inside that call, "
                "and an engine makes none: take the hook off"
            )
    return out


def _names_read(module: nn.Module) -> set[str]:
    """What the forward of its class calls and reads, by name."""
    codes = [inspect.unwrap(pieces.class_of(module).forward).__code__]
    for code in codes:  # some make each kind of mask in a lambda
        codes += [inner for inner in code.co_consts if isinstance(inner, types.CodeType)]
    return {name for code in codes for name in code.co_names}


def _attention_problems(
    config, module: nn.Module, place: int, window: int | None, kwargs: dict, read: set[str]
) -> Iterator[str]:
    """What an attention module asks for beyond what our attention does, or asks for in its mask alone: the masks, which
    are not built here, are made from the decoder's config, by the module's place among those that remember. Which of
    its numbers they follow, and whether they have windows, what the forwards read says (`read`)."""
    windows = any(name.startswith("create_") and ("sliding" in name or "masks_for" in name) for name in read)
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _KNOWN_KWARGS)
    if unknown:
        yield f"it asks attention for {', '.join(unknown)}"
    if not getattr(module, "is_causal", True) or not getattr(config, "is_causal", True):
        yield "its attention is not causal"
    elif _BIDIRECTIONAL in read and getattr(config, _BIDIRECTIONAL, False):
        yield f"its attention is not causal: {_BIDIRECTIONAL} of the config is {getattr(config, _BIDIRECTIONAL)}"
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[place] if layer_types and place < len(layer_types) else None
    if kind not in (None, "full_attention", "sliding_attention"):
        yield f"its layer type is {kind!r}"
        return  # whose mask is another
    masked = getattr(config, "sliding_window", None) if kind != "full_attention" else None
    if window is not None and masked == window and not windows:
        yield (
            f"it asks attention for a window of {window}, but its mask has none: without the patch it would have the "
            "window with some implementations of attention alone: set sliding_window of the config to None"
        )
    elif masked != window:
        yield (
            f"its mask has a window of {masked}, but it asks attention for {window}: sliding_window and layer_types of "
            "the config say what masks and caches of transformers have: set them to what its attention asks for"
        )
    elif kind == "sliding_attention" and masked is None:
        yield "its layer type is 'sliding_attention', but sliding_window is None: without the patch it raises"

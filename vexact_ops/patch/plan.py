"""What becomes of each module of a model: a change, a reason to keep it as it is, or a problem.

A patch (state.py) is what the answers are written to.
"""

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .._core.backend import BackendUnavailable
from . import audit, delta, forwards, gates, lora, mixture, pieces, rotary, slots
from . import latent as latent_form
from .description import Pages
from .pieces import NotCovered

if TYPE_CHECKING:
    from .state import Patch

_STRUCTURE = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity)
EXACT = "stock: elementwise and correctly rounded, or a copy"
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
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"patch.hf: model: got {type(model).__name__}, an encoder and a decoder, expected a decoder alone"
        )
    patch.kept = pieces.kept_in_fp32(model)
    children = dict(model.named_children())
    parts = {id(part) for part in (patch.base, patch.head)}
    if patch.head is not None:
        patch.heads = {id(m) for m in (lora.copies(patch.head) if lora.is_saved(patch.head) else [patch.head])}
    if patch.base is not model and {id(child) for child in children.values()} != parts:
        raise ValueError(
            f"patch.hf: model: got {type(model).__name__} (of {', '.join(children)}), expected a decoder, or a causal "
            "language model of a decoder and an output layer"
        )
    for path, module in model.named_modules():
        if "_vexact" in module.__dict__:
            raise ValueError(f"patch.hf: model: its part {path} is already patched on its own: undo that first")
        drops = _drops(module) if patch.trains else []
        for reason in drops:
            patch.refuse(path, module, reason)
        if drops and not patch.strict:
            continue
        try:
            _place(patch, path, module)
        except NotCovered as reason:
            patch.refuse(path, module, str(reason), reason.__cause__)
    if patch.options["latent"] and not any(row.note == "latent" for row in patch.report):
        patch.refuse("", model, "latent: no attention of it is latent")


_OF_NO_BIT = {"training", "gradient_checkpointing", "name_or_path", "in_features", "out_features"}


def numbers(patch: "Patch") -> tuple[list[dict], list[str], list]:
    """Where numbers stand that a forward, or who has read its description, may have from the time of the patch, their
    names, and what they were: those of the decoder's modules (an epsilon, a window, top_k) and of its config. So do
    parameters and buffers that are None, a bias that a module does not have, of all modules."""
    holders = []
    for config in {id(part.config): part.config for part in (patch.model, patch.base)}.values():
        names = {"logits_scaling", "final_logit_softcapping", "output_router_logits"}
        names |= {n for n, v in vars(config).items() if type(v) in (int, float) and not n.endswith("_token_id")}
        holders += [(vars(config), name) for name in sorted(names) if not name.startswith("_")]
    for module in patch.base.modules():
        if not lora.is_peft(module):
            own = (name for name, value in vars(module).items() if value is None or isinstance(value, int | float))
            holders += [(vars(module), n) for n in own if n not in _OF_NO_BIT and not n.startswith("_")]
    for module in patch.model.modules():
        for store in (module._parameters, module._buffers):
            holders += [(store, name) for name, tensor in store.items() if tensor is None]
    return [h for h, _ in holders], [n for _, n in holders], [h.get(n) for h, n in holders]


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


def _drops(module: nn.Module) -> list[str]:
    """What a module drops in training, and how not to."""
    if isinstance(module, nn.Dropout):
        found = {"p": module.p} if module.p > 0 else {}
    else:
        found = {n: v for n, v in vars(module).items() if "dropout" in n and isinstance(v, float) and v > 0}
    return [
        f"{name} is {value}: a dropped value is not aligned, set it to 0"
        + (f" (from_pretrained(..., {name}=0.0))" if hasattr(getattr(module, "config", None), name) else "")
        for name, value in found.items()
    ]


def _place(patch: "Patch", path: str, module: nn.Module) -> None:
    cls = pieces.class_of(module)
    if "forward" in module.__dict__:
        raise NotCovered("its forward has been replaced on this instance (by hooks or kernels of another library)")
    if id(module) in patch.heads:
        if lora.is_peft(module):
            raise NotCovered("LoRA of the output layer: its logits are formed from one weight")
        pieces.check_linear(module, head=True)
        patch.replace(path, module, pieces.head_forward, "linear_logits", "fp32 logits")
    elif isinstance(module, nn.Linear):
        pieces.check_linear(module, head=False)
        patch.replace(path, module, pieces.linear_forward, "linear")
    elif isinstance(module, nn.Dropout):
        patch.replace(path, module, pieces.identity_forward, "(identity)")
    elif isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            raise NotCovered("max_norm rescales rows by their norm")
        patch.keep(path, module, "stock: a lookup is exact")
    elif isinstance(module, nn.Conv1d) and id(module) in patch.inner:
        patch.keep(path, module)
    elif isinstance(module, _STRUCTURE):
        patch.keep(path, module, "holds modules")
    elif cls.__module__.startswith("torch.nn.modules.activation") and not module._parameters:
        patch.keep(path, module)
    elif isinstance(module, nn.ParameterDict) and not len(module):
        patch.keep(path, module, "holds nothing")
    elif lora.is_peft(module):
        patch.keep(path, module, lora.check(module, patch.tried))
    elif not cls.__module__.startswith(("transformers.", slots.GENERATED)):
        raise NotCovered("no module of transformers, and none of torch's that an aligned op covers")
    elif module is patch.model and module is not patch.base:
        patch.replace(path, module, _causal_forward(patch), "linear_logits", _loss(patch))
    elif module is patch.base:
        patch.cache = _cache_name(module)
        patch.lax = cls.__module__.startswith(slots.GENERATED)  # VeOmni's collators name more than its models read
        patch.replace(path, module, forwards.base_forward, "(lays out the batch)", f"{EXACT}; autocast is off inside")
    elif rotary.prefixes(module):
        forward, note, put = rotary.rotary(module, patch.options["longrope"])
        for name, value in put.items():
            patch.put(module, name, value)
        patch.replace(path, module, forward, "rope_cos_sin", note)
    elif pieces.is_attention(module) and patch.cache not in (names := pieces.cache_names(module)):
        raise NotCovered(f"it takes a cache as {names[0]}, its decoder as {patch.cache}: it would not get one")
    elif pieces.is_attention(module) and patch.options["latent"]:
        if not latent_form.is_latent(module):
            raise NotCovered("latent: its keys and values are not made from compressed ones")
        patch.replace(path, module, *latent_form.latent_forward(module, patch.tried), "latent")
    elif pieces.is_attention(module):
        patch.replace(path, module, *pieces.attention_forward(module))
    elif mixture.is_experts(module):
        forward, note = mixture.experts_forward(module)
        patch.replace(path, module, forward, "fused_moe", note)
        patch.inner.update(id(m) for m in module.children())
    elif id(module) in patch.joined:
        return
    elif mixture.is_router(module):
        forward, note = mixture.router_forward(module, f"{path}.weight" in patch.kept)
        patch.replace(path, module, forward, "linear, moe_route", note)
    elif delta.is_delta(module):
        patch.replace(path, module, *delta.delta_forward(module, patch.tried))
        patch.inner.add(id(module.conv1d))
        patch.states = True
    elif delta.is_gated_norm(module):
        patch.replace(path, module, delta.gated_norm_forward(module), "rmsnorm_gated")
    elif module._parameters:
        forward, style = pieces.norm_forward(module)
        patch.replace(path, module, forward, "rmsnorm", style)
    else:
        mixture.check_block(module)
        if mixture.chooses(module):
            logits, choice, note = mixture.choice_forwards(module, f"{path}.gate.weight" in patch.kept)
            patch.joined.add(id(module.gate))
            patch.replace(path, module, choice, "moe_route", note, mixture.CHOICE)
            patch.replace(f"{path}.gate", module.gate, logits, "linear", "logits; its block chooses")
            return
        if pieces.is_mlp(module):
            try:
                forward, activation = pieces.mlp_forward(module)
                patch.replace(path, module, forward, "silu_mul", activation)
                patch.inner.update(id(m) for m in module.children() if not pieces.is_linear(m))
                return
            except NotCovered as reason:  # its linear layers are covered; the audit judges the rest
                patch.blocks[path] = str(reason)
        if gates.calls_sigmoid(module):
            patch.replace(path, module, gates.sigmoid_forward(type(module)), "sigmoid_mul", f"{EXACT} but for sigmoids")
            return
        patch.keep(path, module)


def _cache_name(base: nn.Module) -> str:
    """By which name caches come and go: what goes in is what comes out."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    names = pieces.cache_names(base)
    found = [name for name in names if name in CausalLMOutputWithPast.__dataclass_fields__]
    if not found:
        raise NotCovered(f"its forward takes a cache as {names[0]}, but transformers' outputs have none of that name")
    return found[0]


def check_runs(patch: "Patch") -> None:
    """Run the patched model on fake tensors and refuse what is neither aligned nor exact. What has been refused already
    runs as stock: of that, nothing more is said of the operations that it runs."""
    modules = dict(patch.model.named_modules())
    refused = {path for path, _, _ in patch.problems}
    patch.seen = []
    try:
        found = audit.run(patch.model, {id(m): path for path, m in modules.items()}, _small_call, patch.trains)
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
        seen, patch.seen = patch.seen, None
    for path, operations in found.items():
        if path in refused:
            continue
        _refuse_operations(patch, modules, path, f"runs {', '.join(sorted(operations))} outside the aligned ops")
    paths = {id(m): path for path, m in modules.items()}
    patch.attended = {module.layer_idx: memory for module, _, memory in seen if hasattr(module, "layer_idx")}
    for module, asked, memory in seen:
        if not isinstance(memory, Pages):
            continue
        path = paths[id(module)]
        given = {**asked, "dropout": None} if path in refused else asked
        for reason in _attention_problems(patch.base.config, module, memory.window, given):
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


def _small_call(model: nn.Module, ids: Tensor):
    return model(input_ids=ids, use_cache=False)


def _attention_problems(config, module: nn.Module, window: int | None, kwargs: dict) -> Iterator[str]:
    """What an attention module asks for beyond what our attention does, or asks for in its mask alone: the masks, which
    are not built here, are made from the decoder's config."""
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _KNOWN_KWARGS)
    if unknown:
        yield f"it asks attention for {', '.join(unknown)}"
    if not getattr(module, "is_causal", True) or not getattr(config, "is_causal", True):
        yield "its attention is not causal"
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[module.layer_idx] if layer_types and hasattr(module, "layer_idx") else None
    if kind not in (None, "full_attention", "sliding_attention"):
        yield f"its layer type is {kind!r}"
        return  # whose mask is another
    masked = getattr(config, "sliding_window", None) if kind != "full_attention" else None
    if masked != window:
        yield f"its mask has a window of {masked}, but it asks attention for {window}"


def _causal_forward(patch: "Patch") -> Callable:
    """The forward of decoder + output layer, once the class's own one is known to do nothing else."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    model, config = patch.model, patch.model.config
    if getattr(config, "output_router_logits", False):
        raise NotCovered("config.output_router_logits asks for a load balancing loss, which no aligned op computes")
    base_name, head_name = (
        next(name for name, m in model.named_children() if m is part) for part in (patch.base, patch.head)
    )

    class Hidden(nn.Module):
        def __getattr__(self, name):
            raise AttributeError(f"no {name}", name=name, obj=self)

        def forward(self, *args, **kwargs):
            return MoeModelOutputWithPast(last_hidden_state=hidden)

    hidden, head = 3 * pieces.random(2, 4, 8, seed=1), pieces.small_linear(8, 11, seed=2)
    tried = pieces.twin(model, {base_name: Hidden(), head_name: head})
    try:
        got = pieces.run_stock(tried, input_ids=torch.zeros(2, 4, dtype=torch.int64))
    except NotCovered as reason:
        missing = getattr(reason.__cause__, "name", None)
        if not isinstance(reason.__cause__, AttributeError) or not missing:
            raise
        of = type(patch.base).__name__ + ("" if isinstance(reason.__cause__.obj, nn.Module) else "'s output")
        raise NotCovered(
            f"it is more than a decoder and an output layer: its forward reads {missing!r} of its {of}"
        ) from reason.__cause__
    patch.scale = float(getattr(config, "logits_scaling", None) or 1.0)
    patch.softcap = getattr(config, "final_logit_softcapping", None)
    expected = hidden @ head.weight.detach().t() / patch.scale
    if patch.softcap is not None:
        expected = torch.tanh(expected / patch.softcap) * patch.softcap
    if not pieces.agree(got.logits, expected):
        factor = float((got.logits / expected).median())
        if pieces.agree(got.logits, expected * factor):
            raise NotCovered(f"it multiplies the logits by {factor:.6g}, and not by one over config.logits_scaling")
        raise NotCovered("it does something to the logits that no aligned op computes")
    if math.frexp(patch.scale)[0] != 0.5:
        raise NotCovered(f"it divides the logits by {patch.scale}: only powers of two are exact in the hidden states")
    if not slots.has_loss_slot(model):
        return forwards.wrapped_causal_forward()
    if patch.scale != 1 or patch.softcap is not None:
        raise NotCovered("VeOmni's slot of the loss knows neither logits_scaling nor final_logit_softcapping")
    return slots.causal_forward(pieces.class_of(model))


def _loss(patch: "Patch") -> str:
    if slots.has_loss_slot(patch.model):
        patch.loss = False  # not read: the slot is
        return "VeOmni's own forward; loss: linear_cross_entropy, log-probabilities: linear_logprobs"
    from transformers.loss.loss_utils import ForCausalLMLoss

    used = patch.model.loss_function
    if slots.is_of_veomni(used):  # which puts its own in transformers' place, for the whole process
        used = ForCausalLMLoss
    patch.loss = used is ForCausalLMLoss and "_loss_function" not in patch.model.__dict__
    return "loss: linear_cross_entropy" if patch.loss else "loss: your own function, not covered"

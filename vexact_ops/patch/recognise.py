"""The table of pieces: what becomes of one module, by the first piece that knows it.

Each piece is `recognise(module, facts) -> Replace | Keep | None`, and raises NotCovered where the module looks like it
and is not. Facts are what is known of the model before; plan.py writes the answers down.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from . import classifier, delta, forwards, gates, lora, mixture, pieces, rotary, slots, vision
from . import latent as latent_form
from .pieces import NotCovered

_STRUCTURE = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity)
EXACT = "stock: elementwise and correctly rounded, or a copy"
INNER = "not run: its block computes it"


@dataclass(frozen=True)
class Facts:
    """Of a model, and of the module that is looked at.

    head     of its copies, if PEFT made any, each is in `heads`
    kept     names of parameters and buffers that the class keeps in fp32
    cache    by which name the decoder's own forward takes one
    tried    what is known of modules that are alike: a memory of the trials, no fact
    inner    whether the module's block computes what it would
    strange  whether its feed-forward block holds modules that its class does not know, and has no aligned form
    """

    model: nn.Module
    base: nn.Module
    head: nn.Module | None
    heads: frozenset[int]
    kept: frozenset[str]
    cache: str
    latent: bool
    longrope: str | None
    tried: dict = field(repr=False, compare=False)
    path: str = ""
    inner: bool = False
    strange: bool = False


@dataclass(frozen=True)
class Replace:
    """Another forward (or, by name, another method).

    buffers   those that have to be other ones, by name
    computes  modules whose work this forward does
    children  what becomes of children by name, who are not looked at themselves
    known     what the model is now known to do, by the name of the patch's field
    unaligned why the block around it has no aligned form
    tables    in which layout its class makes or takes rotary tables, which is to be one; None: it does neither
    """

    forward: Callable
    ops: str
    note: str = ""
    name: str = "forward"
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    computes: tuple[nn.Module, ...] = ()
    children: Mapping[str, "Replace | Keep"] = field(default_factory=dict)
    known: Mapping[str, Any] = field(default_factory=dict)
    unaligned: str = ""
    tables: str | None = None


@dataclass(frozen=True)
class Keep:
    """The module's own forward, and why its bits are those of a row alone."""

    note: str = EXACT
    unaligned: str = ""


Answer = Replace | Keep | None


def check_own_forward(module: nn.Module) -> None:
    if "forward" in module.__dict__:
        raise NotCovered("its forward has been replaced on this instance (by hooks or kernels of another library)")


def recognise(module: nn.Module, facts: Facts) -> Replace | Keep:
    """What becomes of it. Raises NotCovered."""
    return next(answer for piece in PIECES if (answer := piece(module, facts)) is not None)


# Of torch and of PEFT


def head(module: nn.Module, facts: Facts) -> Answer:
    if id(module) not in facts.heads:
        return None
    if lora.is_peft(module):
        raise NotCovered("LoRA of the output layer: its logits are formed from one weight")
    pieces.check_linear(module)
    note = "fp32 logits" if module.bias is None else "fp32 logits, a bias"
    return Replace(pieces.head_forward, "linear_logits", note)


def linear(module: nn.Module, facts: Facts) -> Answer:
    if not isinstance(module, nn.Linear):
        return None
    pieces.check_linear(module)
    return Replace(pieces.linear_forward, "linear")


def dropout(module: nn.Module, facts: Facts) -> Answer:
    return Replace(pieces.identity_forward, "(identity)") if pieces.class_of(module) is nn.Dropout else None


def embedding(module: nn.Module, facts: Facts) -> Answer:
    if not isinstance(module, nn.Embedding):
        return None
    if module.max_norm is not None:
        raise NotCovered("max_norm rescales rows by their norm")
    return Keep("stock: a lookup is exact")


def inner_convolution(module: nn.Module, facts: Facts) -> Answer:
    return Keep() if facts.inner and isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) else None


def structure(module: nn.Module, facts: Facts) -> Answer:
    return Keep("holds modules") if isinstance(module, _STRUCTURE) else None


def layer_norm(module: nn.Module, facts: Facts) -> Answer:
    if not pieces.is_layer_norm(module):
        return None
    forward, note = pieces.layer_norm_forward(module)
    return Replace(forward, "layer_norm", note)


def ungated(module: nn.Module, facts: Facts) -> Answer:
    """An activation without a gate."""
    holds = module._parameters or module._modules or module._buffers
    if holds or facts.inner or (form := pieces.ungated_form(module)) is None:
        return None
    if form == pieces.SILU:
        if facts.strange:
            return None
        return Replace(pieces.silu_forward, "silu_mul", "without a gate")
    return Replace(pieces.gelu_forward(form), "gelu", "erf" if form == "none" else form)


def transposed_linear(module: nn.Module, facts: Facts) -> Answer:
    if not pieces.is_transposed_linear(module):
        return None
    return Replace(pieces.transposed_linear_forward(module), "linear", "its matrix is transposed")


def activation(module: nn.Module, facts: Facts) -> Answer:
    of_torch = pieces.class_of(module).__module__.startswith("torch.nn.modules.activation")
    return Keep() if of_torch and not module._parameters else None


def empty(module: nn.Module, facts: Facts) -> Answer:
    return Keep("holds nothing") if isinstance(module, nn.ParameterDict) and not len(module) else None


def adapter(module: nn.Module, facts: Facts) -> Answer:
    return Keep(lora.check(module, facts.tried)) if lora.is_peft(module) else None


def stranger(module: nn.Module, facts: Facts) -> Answer:
    if not pieces.class_of(module).__module__.startswith(("transformers.", slots.GENERATED)):
        raise NotCovered("no module of transformers, and none of torch's that an aligned op covers")
    return None


# The model and its decoder


def causal_model(module: nn.Module, facts: Facts) -> Answer:
    if module is not facts.model or module is facts.base:
        return None
    if facts.model.get_output_embeddings() is None:
        _check_classifier(facts)
        return Replace(
            classifier.wrapped_classifier_forward(), "linear_logits", "of a sequence's last token; loss: stock"
        )
    forward, scale, softcap = _causal_forward(facts)
    ours, note = _loss(module)
    return Replace(forward, "linear_logits", note, known={"scale": scale, "softcap": softcap, "loss": ours})


def decoder(module: nn.Module, facts: Facts) -> Answer:
    if module is not facts.base:
        return None
    cache_name(module)
    lax = pieces.class_of(module).__module__.startswith(slots.GENERATED)  # its collators name more than models read
    note = f"{EXACT}; autocast is off inside"
    known = {"cache": facts.cache, "lax": lax}
    if vision.is_image_model(module):
        known["vision"] = vision.image_model(module)
        note += "; images among the tokens"
    return Replace(forwards.base_forward, "(lays out the batch)", note, known=known)


def cache_name(base: nn.Module) -> str:
    """By which name caches come and go: what goes in is what comes out. Raises NotCovered."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    names = pieces.cache_names(base)
    found = [name for name in names if name in CausalLMOutputWithPast.__dataclass_fields__]
    if not found:
        raise NotCovered(f"its forward takes a cache as {names[0]}, but transformers' outputs have none of that name")
    return found[0]


def _causal_forward(facts: Facts) -> tuple[Callable, float, float | None]:
    """The forward of decoder + output layer, once the class's own one is known to do nothing else."""
    from transformers.modeling_outputs import MoeModelOutputWithPast

    @dataclass
    class Output(MoeModelOutputWithPast):
        cross_attentions: Any = None
        image_outputs: Any = None
        video_outputs: Any = None
        rope_deltas: Any = None

    model, base, config = facts.model, facts.base, facts.model.config.get_text_config()
    if getattr(config, "output_router_logits", False):
        raise NotCovered("config.output_router_logits asks for a load balancing loss, which no aligned op computes")
    base_name, head_name = (
        next(name for name, m in model.named_children() if m is part) for part in (base, facts.head)
    )

    class Hidden(nn.Module):
        def __getattr__(self, name):
            raise AttributeError(f"no {name}", name=name, obj=self)

        def forward(self, *args, **kwargs):
            return Output(last_hidden_state=hidden)

    softcap = getattr(config, "final_logit_softcapping", None)
    hidden, head = 3 * pieces.random(2, 4, 8, seed=1), pieces.small_linear(8, 11, seed=2)
    hidden = hidden * (softcap or 1)  # where any cap shows
    tried = pieces.twin(model, {base_name: Hidden(), head_name: head})
    try:
        got = pieces.run_stock(tried, input_ids=torch.zeros(2, 4, dtype=torch.int64))
    except NotCovered as reason:
        missing = getattr(reason.__cause__, "name", None)
        if not isinstance(reason.__cause__, AttributeError) or not missing:
            raise
        of = type(base).__name__ + ("" if isinstance(reason.__cause__.obj, nn.Module) else "'s output")
        raise NotCovered(
            f"it is more than a decoder and an output layer: its forward reads {missing!r} of its {of}"
        ) from reason.__cause__
    scales = dict.fromkeys((float(getattr(config, "logits_scaling", None) or 1.0), *_factors(config)))

    def logits(scale: float) -> Tensor:
        expected = hidden @ head.weight.detach().t() / scale
        return expected if softcap is None else torch.tanh(expected / softcap) * softcap

    scale = next((scale for scale in scales if pieces.agree(got.logits, logits(scale))), None)
    if scale is None:
        if pieces.agree(got.logits, hidden @ head.weight.detach().t()):
            named = {"logits_scaling": getattr(config, "logits_scaling", None), "final_logit_softcapping": softcap}
            unread = " and ".join(f"{name} {value}" for name, value in named.items() if value is not None)
            raise NotCovered(f"its config has {unread}, which its class does not read: take that out")
        expected = logits(next(iter(scales)))
        factor = float((got.logits / expected).median())
        if pieces.agree(got.logits, expected * factor):
            raise NotCovered(f"it multiplies the logits by {factor:.6g}, which its config does not name")
        raise NotCovered("it does something to the logits that no aligned op computes")
    if not slots.has_loss_slot(model):
        return forwards.wrapped_causal_forward(), scale, softcap
    if scale != 1 or softcap is not None:
        raise NotCovered("VeOmni's slot of the loss knows neither logits_scaling nor final_logit_softcapping")
    if facts.head.bias is not None:
        raise NotCovered("VeOmni's slot of the loss knows no bias of the output layer: train it by transformers' class")
    return slots.causal_forward(pieces.class_of(model)), scale, softcap


def _check_classifier(facts: Facts) -> None:
    """That its class scores the last token of a row that is no padding, by one product, and does nothing else."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class Hidden(nn.Module):
        def forward(self, *args, **kwargs):
            return BaseModelOutputWithPast(last_hidden_state=hidden)

    model, pad = facts.model, facts.model.config.get_text_config().pad_token_id
    rows = [[1, 2, 0, 0], [0, 0, 3, 4], [1, 2, 3, 4]]
    ids = torch.tensor(rows, dtype=torch.int64) + (0 if pad is None else pad)
    ids = ids[2:] if pad is None else ids
    hidden, score = 3 * pieces.random(len(ids), 4, 8, seed=1), pieces.small_linear(8, 3, seed=2)
    base_name = next(name for name, m in model.named_children() if m is facts.base)
    tried = pieces.twin(model, {base_name: Hidden(), "score": score})
    tried.__dict__["num_labels"] = 3
    got = pieces.run_stock(tried, input_ids=ids)
    last = classifier.last_tokens(ids, pad)
    expected = hidden[torch.arange(len(ids)), last] @ score.weight.detach().t()
    if not pieces.agree(got.logits, expected, 1e-9):
        raise NotCovered("a classifier that scores something else than a sequence's last token")


def _factors(config) -> list[float]:
    """By what logits may be divided, of those numbers of a configuration that multiply them."""
    found = (getattr(config, name, None) for name in ("logit_scale", "logits_scaling", "lm_head_multiplier"))
    return [1 / value for value in found if isinstance(value, int | float) and value > 0]


def _loss(model: nn.Module) -> tuple[bool, str]:
    """Whether its loss function is to be ours, and what is computed."""
    if slots.has_loss_slot(model):  # the function is not read, the slot is
        return False, "VeOmni's own forward; loss: linear_cross_entropy, log-probabilities: linear_logprobs"
    from transformers.loss.loss_utils import ForCausalLMLoss

    used = model.loss_function
    if slots.is_of_veomni(used):  # which puts its own in transformers' place, for the whole process
        used = ForCausalLMLoss
    if used is ForCausalLMLoss and "_loss_function" not in model.__dict__:
        return True, "loss: linear_cross_entropy"
    return False, "loss: your own function, not covered"


# Images


def patches(module: nn.Module, facts: Facts) -> Answer:
    if not vision.is_patches(module):
        return None
    return Replace(vision.patches_forward(module), "linear", "patches", computes=tuple(module.children()))


def tower(module: nn.Module, facts: Facts) -> Answer:
    if not vision.is_tower(module):
        return None
    forward, buffers, note = vision.tower_forward(module)
    tables = Replace(vision.tables_forward, "rope_cos_sin", note or "rows and columns", buffers=buffers)
    return Replace(forward, "(lays out the images)", EXACT, children={"rotary_pos_emb": tables})


def image_attention(module: nn.Module, facts: Facts) -> Answer:
    if not vision.is_image_attention(module):
        return None
    _check_attention(module)
    forward = vision.image_attention_forward(pieces.class_of(module))
    return Replace(forward, "attention_varlen, rope", "not causal, by image")


def additions(module: nn.Module, facts: Facts) -> Answer:
    """A decoder whose first layers are followed by an image's features."""
    if not vision.has_deepstack(module):
        return None
    vision.check_deepstack(module)
    return Replace(vision.deepstack_process, "(adds rows of images)", EXACT, "_deepstack_process")


# Layers


def rotary_tables(module: nn.Module, facts: Facts) -> Answer:
    if not rotary.prefixes(module):
        return None
    forward, note, buffers, layout = rotary.rotary(module, facts.longrope)
    return Replace(forward, "rope_cos_sin", note, buffers=buffers, tables=layout)


def _check_attention(module: nn.Module) -> None:
    registry = inspect.unwrap(pieces.class_of(module).forward).__globals__.get("ALL_ATTENTION_FUNCTIONS")
    pieces.check_implementation(module, "attention", registry)


def attention(module: nn.Module, facts: Facts) -> Answer:
    if not pieces.is_attention(module):
        return None
    _check_attention(module)
    names = pieces.cache_names(module)
    if facts.cache not in names and forwards.LAYERS_CACHE not in names:
        raise NotCovered(f"it takes a cache as {names[0]}, its decoder as {facts.cache}: it would not get one")
    if not facts.latent:
        return Replace(*pieces.attention_forward(module), tables=pieces.tables_of(module))
    if not latent_form.is_latent(module):
        raise NotCovered("latent: its keys and values are not made from compressed ones")
    return Replace(*latent_form.latent_forward(module, facts.tried), "latent", tables=pieces.tables_of(module))


def experts(module: nn.Module, facts: Facts) -> Answer:
    if not mixture.is_experts(module):
        return None
    outer = inspect.getclosurevars(pieces.class_of(module).forward).nonlocals
    pieces.check_implementation(module, "experts", outer.get("experts_interface"))
    forward, note = mixture.experts_forward(module)
    return Replace(forward, "fused_moe", note, computes=tuple(module.children()))


def router(module: nn.Module, facts: Facts) -> Answer:
    form = mixture.form_of(module)
    if form is None:
        return None
    name = ".".join(filter(None, (facts.path, form.weight, "weight")))
    forward, note = mixture.router_forward(module, name in facts.kept)
    children = dict.fromkeys(form.children(), Keep(INNER))
    return Replace(forward, "linear, moe_route", note, children=children)


def delta_net(module: nn.Module, facts: Facts) -> Answer:
    if not delta.is_delta(module):
        return None
    forward, ops = delta.delta_forward(module, facts.tried)
    return Replace(forward, ops, computes=(module.conv1d,), known={"states": True, "packed": delta.is_packed(module)})


def gated_norm(module: nn.Module, facts: Facts) -> Answer:
    return Replace(delta.gated_norm_forward(module), "rmsnorm_gated") if delta.is_gated_norm(module) else None


def norm(module: nn.Module, facts: Facts) -> Answer:
    if not module._parameters:
        return None
    reason = None
    norms = ("rmsnorm", pieces.norm_forward), ("layer_norm", pieces.layer_norm_forward)
    for op, covers in (*norms, ("layer_norm", pieces.head_norm_forward)):
        try:
            forward, note = covers(module)
        except NotCovered as error:
            reason = reason or error
        else:
            return Replace(forward, op, note)
    raise reason


def choice(module: nn.Module, facts: Facts) -> Answer:
    """A block that chooses experts by its router's logits."""
    mixture.check_block(module)
    if not mixture.chooses(module):
        return None
    logits, chosen, note = mixture.choice_forwards(module, f"{facts.path}.gate.weight" in facts.kept)
    gate = Replace(logits, "linear", "logits; its block chooses")
    return Replace(chosen, "moe_route", note, mixture.CHOICE, children={"gate": gate})


def block(module: nn.Module, facts: Facts) -> Answer:
    """All that is left: a feed-forward block, or what adds, moves and calls, which the audit judges."""
    unaligned = ""
    if pieces.is_mlp(module):
        try:
            forward, activation = pieces.mlp_forward(module)
            computes = tuple(m for m in module.children() if not pieces.is_linear(m))
            return Replace(forward, "silu_mul", activation, computes=computes)
        except NotCovered as reason:  # its linear layers are covered; the audit judges the rest
            unaligned = str(reason)
    if gates.calls_sigmoid(module):
        forward = gates.sigmoid_forward(type(module))
        return Replace(forward, "sigmoid_mul", f"{EXACT} but for sigmoids", unaligned=unaligned)
    return Keep(unaligned=unaligned)


PIECES: tuple[Callable[[nn.Module, Facts], Answer], ...] = (
    head, linear, dropout, embedding, inner_convolution, structure, layer_norm, ungated, activation, empty, adapter,
    stranger, causal_model, decoder, patches, tower, image_attention, additions, transposed_linear, rotary_tables,
    attention, experts, router, delta_net,
    gated_norm, norm, choice, block,
)  # fmt: skip

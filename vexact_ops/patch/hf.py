"""Hugging Face decoders on aligned ops, one model at a time: nothing outside the given instance changes."""

import logging
import math
import re
import threading
import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor, nn

from ..attention.op import KEY_BLOCK
from ..attention.op import ROOM as ATTENTION
from . import audit, forwards, lora, mixture, pieces
from . import latent as latent_form
from .pieces import NotCovered
from .report import table

_LOCK = threading.RLock()
_LOG = logging.getLogger(__name__)
_STRUCTURE = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.Identity)
_EXACT = "stock: elementwise and correctly rounded, or a copy"
_KNOWN_KWARGS = {
    "position_ids", "use_cache", "cache_position", "is_causal", "output_attentions", "output_hidden_states",
}  # fmt: skip


class UnsupportedModule(ValueError):
    """The model holds modules whose bits would depend on the batch; the message names all of them."""


@dataclass(frozen=True)
class Row:
    """What became of one module."""

    path: str
    cls: str
    replacement: str  # the aligned ops that compute it now, or "" where it stays stock
    note: str


class Report(list):
    """The rows, one per module; as a string a table with one line for all modules that are alike."""

    def __str__(self) -> str:
        lines = Counter((re.sub(r"\.\d+(?=\.|$)", ".*", r.path), r.cls, r.replacement or "-", r.note) for r in self)
        rows = [(f"{p or '(root)'}" + (f" x{n}" if n > 1 else ""), *rest) for (p, *rest), n in lines.items()]
        return table(("module", "class", "aligned ops", "note"), rows)


@dataclass
class _Change:
    module: nn.Module
    forward: Callable  # (self, ...) -> ...


class _Patch:
    """All that is changed about one model, shared by its nested handles. Lives in the `__dict__` of what it changed."""

    def __init__(self, model: nn.Module, options: dict, strict: bool):
        self.model, self.options, self.strict, self.handles = model, options, strict, 0
        self.clear()

    def clear(self) -> None:
        self.report, self.problems, self.changes, self.cause = Report(), [], [], None
        self.base = self.head = self.loss = self.seen = None
        self.heads: set[int] = set()  # the output layer, or its copies
        self.scale, self.softcap = 1.0, None
        self.tried = {}  # what is known of modules that are alike
        self.inner: set[int] = set()  # modules whose block computes what they would
        self.tree: tuple[list, list, list] = [], [], []

    def build(self) -> None:
        """Find out what becomes of each module, and change them; an error leaves the model as it was."""
        _plan(self)
        if self.strict:
            _raise(self)
        self.apply()
        try:
            _audit(self)
            if self.strict:
                _raise(self)
        except BaseException:
            self.revert()
            raise
        children = [module._modules for module in self.model.modules()]
        parents = [c for c in children if c]
        self.tree = parents, [tuple(c.values()) for c in parents], [c for c in children if not c]

    def changed(self) -> bool:
        """A module of the tree has other children than when it was patched. 18 us for the 727 of 48 layers."""
        parents, children, leaves = self.tree
        return [tuple(c.values()) for c in parents] != children or any(leaves)

    changed._dynamo_marked_constant = True  # a new trace looks at the modules of now (as _core/backend.py's _reason)

    def check(self) -> None:
        """Before a forward: cover what has been put in since, or refuse it."""
        if not self.changed():
            return
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "patch.hf: modules were put in or taken out after the patch: call the model once without "
                "torch.compile, which covers them or says why not, and compile it then"
            )
        with _LOCK:
            if not self.changed():
                return
            before = dict(self.__dict__)
            self.revert()
            self.clear()
            try:
                self.build()
            except BaseException:
                self.__dict__.update(before)
                self.apply()
                raise

    def replace(self, path: str, module: nn.Module, forward: Callable, ops: str, note: str = "") -> None:
        self.changes.append(_Change(module, forward))
        self.report.append(Row(path, type(module).__name__, ops, note))

    def keep(self, path: str, module: nn.Module, note: str = _EXACT) -> None:
        if id(module) in self.inner:
            note = "not run: its block computes it"
        self.report.append(Row(path, type(module).__name__, "", note))

    def refuse(self, path: str, module: nn.Module, reason: str, cause: BaseException | None = None) -> None:
        if any(path == known for known, _, _ in self.problems):
            return
        if cause is not None:
            _LOG.debug("patch.hf: %s (%s): %s", path or "(root)", type(module).__name__, reason, exc_info=cause)
            self.cause = self.cause or cause
        self.problems.append((path, type(module).__name__, reason))
        self.report = Report(row for row in self.report if row.path != path or row.replacement)
        self.keep(path, module, f"NOT COVERED: {reason}")

    def apply(self) -> None:
        for change in self.changes:
            change.module.__dict__["_vexact"] = self
            change.module.__dict__["forward"] = types.MethodType(change.forward, change.module)
        if self.loss:
            self.model.__dict__["_loss_function"] = forwards.aligned_loss

    def revert(self) -> None:
        for change in self.changes:
            forward = change.module.__dict__.get("forward")
            if getattr(forward, "__func__", None) is not change.forward:
                raise RuntimeError(
                    f"undo: something replaced the forward of a {type(change.module).__name__} after the patch; take "
                    "that back first"
                )
        for change in self.changes:
            del change.module.__dict__["forward"], change.module.__dict__["_vexact"]
        if self.loss and self.model.__dict__.get("_loss_function") is forwards.aligned_loss:
            del self.model.__dict__["_loss_function"]

    def __reduce_ex__(self, protocol):
        raise TypeError(
            "a patched model cannot be copied or pickled: undo its patch first, or use its state_dict (PEFT copies "
            "modules_to_save: wrap first, then patch)"
        )


class Handle:
    """One patch of one model. A context manager; `undo()` takes it back, and does so at most once.

    Patching a patched model again gives another handle on the same patch: the model is stock again when the last of
    them is undone, in whatever order.
    """

    def __init__(self, patch: _Patch):
        self._patch, self._active = patch, True

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "active" if self._active else "undone"
        return f"<vexact patch of {type(self._patch.model).__name__}, {state}, {len(self._patch.changes)} modules>"

    def report(self) -> Report:
        """A row for every module: what computes it now, or why it may stay as it is. str() makes a table of it."""
        return self._patch.report

    def undo(self) -> None:
        """Give the model its own forwards back (with the last handle). Raises RuntimeError where something else has
        replaced a patched forward meanwhile."""
        with _LOCK:
            if not self._active:
                return
            if self._patch.handles == 1:
                self._patch.revert()
            self._patch.handles -= 1
            self._active = False

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., H) final hidden states to (..., V) fp32 logits, with the model's scaling and softcap; never rounded."""
        self._check()
        return forwards.logits_of(self._patch, hidden)

    @overload
    def logprobs(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        temperature: float = 1.0,
        return_entropy: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def logprobs(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        temperature: float = 1.0,
        return_entropy: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    def logprobs(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        temperature: float = 1.0,
        return_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The log-probability of each next token, with gradients and without ever holding T x V logits.

        input_ids       (B, S), or one packed row (1, T) or (T,)
        cu_seqlens      (N + 1,) where the packed row's sequences begin, and its end
        attention_mask  (B, S) of a batch padded left or right
        position_ids    (B, S); without the two above, a sequence ends where they do not go on by one
        temperature     logits are divided by it
        return_entropy  also the entropy of each distribution
        returns         fp32 like input_ids: at t, log p(input_ids[t + 1] | input_ids[..t]); 0 at the last token of a
                        sequence and at padding
        bits            a value depends on its own sequence, the weights and the temperature alone
        raises          ValueError on shapes, RuntimeError after undo()
        """
        self._check()
        patch = self._patch
        if patch.head is None:
            raise ValueError(f"logprobs: {type(patch.model).__name__} has no output layer")
        if input_ids.dim() not in (1, 2):
            raise ValueError(f"logprobs: input_ids: got shape {tuple(input_ids.shape)}, expected (B, S) or (T,)")
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError("logprobs: attention_mask: got one next to cu_seqlens, expected one of them")
        ids = input_ids if input_ids.dim() == 2 else input_ids[None]
        if position_ids is not None and position_ids.dim() == 1:
            position_ids = position_ids[None]
        follows = torch.ones_like(ids, dtype=torch.bool)
        follows[:, -1] = False
        if attention_mask is not None:
            follows[:, :-1] = (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)
        elif cu_seqlens is not None:
            ends = cu_seqlens[1:].long() - 1
            follows[0, ends[cu_seqlens.diff() > 0]] = False
        elif position_ids is not None:
            follows[:, :-1] = position_ids.expand_as(ids).diff(dim=1) == 1
        index = follows.flatten().nonzero()[:, 0]
        # Through the model itself, as any forward: what wraps it (FSDP, hooks) gathers the output layer's weight there.
        values = patch.model(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seq_lens_q=cu_seqlens,
            use_cache=False,
            vexact_score=(index, ids.flatten()[index + 1], temperature, return_entropy),
        )
        whole = tuple(v.view(input_ids.shape) for v in values)
        return whole if return_entropy else whole[0]

    def _check(self) -> None:
        if not self._active:
            raise RuntimeError("this patch has been undone")


def hf(model: nn.Module, *, strict: bool = True, kv_segment: int | None = None, latent: bool = False) -> Handle:
    """Run a Hugging Face decoder on aligned ops: training, generation and a paged engine get the same bits.

    model       a loaded causal language model of transformers, or its decoder alone, in PEFT's wrapper or not; nothing
                else is touched, not its class, its config or any registry, so other models of the same class stay stock
    strict      refuse a model that holds anything whose bits could depend on the batch; False leaves such modules
                stock, says so in the report, and keeps no promise
    kv_segment  cut attention's keys at multiples of this many (see attention_varlen): declare it on both sides
    latent      keep latent attention (DeepSeek, Moonlight) compressed: one key head of kv_lora_rank + rope, and values
                that are its first kv_lora_rank, in training as in a paged cache. Other bits than the expanded form, a
                smaller cache, more work in attention (latent.py says how much): declare it on both sides
    returns     a Handle: context manager, report(), undo(), logprobs(), logits()

    What changes, for this instance: linear layers, root-mean-square norms, gated feed-forward blocks, the routers and
    experts of mixtures, rotary tables and the rotation of heads, attention, the output layer (fp32 logits) and the
    loss. Residual sums, scalings and embedding lookups stay: they are exact. Weights are read at every call, so
    load_state_dict, optimizer steps, `.to(...)` and train()/eval() work as ever. The forward takes, besides the usual
    arguments, padded batches (2-D attention_mask, left or right; positions then count a row's own tokens unless
    position_ids are given), packed rows (cu_seq_lens_q, or position_ids that restart), a DynamicCache, and
    `vexact_paged=PagedBatch(...)` from an engine. Padding rows come out as numbers without meaning.

    No list says which families are covered: each piece is tried against the op that would replace it, and the patched
    model runs once on fake tensors to see that nothing else reduces. Those that were seen to be covered, tiny and
    random, are vexact_ops.patch.COVERED (DeepSeek-V3's kind of mixture where transformers' router returns the choice:
    5.17 does, 5.5 does not; Granite where its logits are scaled by a power of two). Latent keys and values are expanded
    before attention, in a paged cache too. A load balancing loss is refused.

    Modules that are put in or taken out after the patch are noticed by the next forward, which covers them too or
    raises UnsupportedModule naming them. So PEFT may come before or after: LoRA on linear layers is covered (several
    adapters, disabled, merged, adapter_names; rank-stabilised; modules_to_save where PEFT came first). Its sum is
    base(x) + scaling * B(A(x)), adapter by adapter in their active order, A and B in their own dtype, rounded once to
    the base layer's. Merged weights are rounded ones: other bits than the unmerged sum. Refused by name: DoRA and other
    forms of LoRA, dropout above 0, LoRA of embeddings, experts or the output layer, other methods of PEFT.

    Not while another thread runs the same model; different models may be patched and used in different threads. Patch
    before torch.compile; FSDP2 may come before or after, and weights may be on meta still. Gradient checkpointing,
    FSDP2 (mixed precision too) and torch.compile keep the bits; Inductor keeps those of gradients with its option
    emulate_precision_casts alone, for it leaves out the roundings between elementwise kernels that it joins. Under
    autocast aligned ops compute in the dtypes of their tensors: it is off inside, and weights that are fp32 then are
    refused (cast the model, or let FSDP2's mixed precision do so). The output layer and the embedding may be FSDP2
    units of their own. A patched model refuses deepcopy and pickle (undo first).

    grad        first derivatives in reverse mode; more is refused (see the ops)
    raises      UnsupportedModule (a ValueError) naming every module that is not covered, and why: the model is then
                as it was; TypeError where it is no transformers model; ValueError where it is no decoder, where a part
                of it has been patched on its own, where it is patched already with other options, or on kv_segment
    """
    from transformers import PreTrainedModel

    model = lora.base_of(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"patch.hf: model: got {type(model).__name__}, expected a transformers PreTrainedModel")
    if kv_segment is not None:
        block = _key_block(model)
        if not isinstance(kv_segment, int) or kv_segment <= 0 or kv_segment % block:
            raise ValueError(f"patch.hf: kv_segment: got {kv_segment}, expected None or a multiple of {block}")
    if not isinstance(latent, bool):
        raise TypeError(f"patch.hf: latent: got {type(latent).__name__}, expected a bool")
    options = {"kv_segment": kv_segment, "latent": latent}
    with _LOCK:
        patch = model.__dict__.get("_vexact")
        if patch is None:
            patch = _Patch(model, options, strict)
            patch.build()
        elif patch.model is not model:
            raise ValueError(
                f"patch.hf: model: got a part of a {type(patch.model).__name__} that is patched as a whole: patch that"
            )
        elif patch.options != options:
            raise ValueError(f"patch.hf: options: got {options}, but the model is patched with {patch.options}")
        else:
            patch.check()
            if strict:
                _raise(patch)
        patch.handles += 1
        return Handle(patch)


def _key_block(model: nn.Module) -> int:
    """Where attention can end a segment on the model's device."""
    device = next(model.parameters()).device  # of weights that are still on meta: whatever a GPU here will take
    if device.type == "meta" and torch.cuda.is_available():
        device = torch.device("cuda")
    return KEY_BLOCK[ATTENTION.resolve(device if device.type == "cuda" else torch.device("cpu"), None)]


def _raise(patch: _Patch) -> None:
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


def _plan(patch: _Patch) -> None:
    """Sort every module into a change, a reason to keep it, or a problem."""
    model = patch.model
    patch.base = model.base_model
    patch.head = model.get_output_embeddings()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"patch.hf: model: got {type(model).__name__}, an encoder and a decoder, expected a decoder alone"
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
    for path, module in model.named_modules():
        if "_vexact" in module.__dict__:
            raise ValueError(f"patch.hf: model: its part {path} is already patched on its own: undo that first")
        try:
            _place(patch, path, module)
        except NotCovered as reason:
            patch.refuse(path, module, str(reason), reason.__cause__)
    if patch.options["latent"] and not any(row.note == "latent" for row in patch.report):
        patch.refuse("", model, "latent: no attention of it is latent")


def _place(patch: _Patch, path: str, module: nn.Module) -> None:
    cls = pieces.class_of(module)
    if "forward" in module.__dict__:
        raise NotCovered("its forward has been replaced on this instance (by hooks or kernels of another library)")
    for name, value in vars(module).items():
        if "dropout" in name and isinstance(value, float) and value > 0:
            raise NotCovered(f"{name} is {value}: a dropped value is not aligned, set it to 0")
    if id(module) in patch.heads:
        if lora.is_peft(module):
            raise NotCovered("LoRA of the output layer: its logits are formed from one weight")
        pieces.check_linear(module, head=True)
        patch.replace(path, module, pieces.head_forward, "linear_logits", "fp32 logits")
    elif isinstance(module, nn.Linear):
        pieces.check_linear(module, head=False)
        patch.replace(path, module, pieces.linear_forward, "linear")
    elif isinstance(module, nn.Dropout):
        if module.p > 0:
            raise NotCovered(f"p is {module.p}: a dropped value is not aligned, set it to 0")
        patch.replace(path, module, pieces.identity_forward, "(identity)")
    elif isinstance(module, nn.Embedding):
        if module.max_norm is not None:
            raise NotCovered("max_norm rescales rows by their norm")
        patch.keep(path, module, "stock: a lookup is exact")
    elif isinstance(module, _STRUCTURE):
        patch.keep(path, module, "holds modules")
    elif cls.__module__.startswith("torch.nn.modules.activation") and not module._parameters:
        patch.keep(path, module)
    elif isinstance(module, nn.ParameterDict) and not len(module):
        patch.keep(path, module, "holds nothing")
    elif lora.is_peft(module):
        patch.keep(path, module, lora.check(module, patch.tried))
    elif not cls.__module__.startswith("transformers."):
        raise NotCovered("no module of transformers, and none of torch's that an aligned op covers")
    elif module is patch.model and module is not patch.base:
        patch.replace(path, module, _causal_forward(patch), "linear_logits", _loss(patch))
    elif module is patch.base:
        patch.replace(path, module, forwards.base_forward, "(lays out the batch)", f"{_EXACT}; autocast is off inside")
    elif pieces.frequencies(module):
        note = next((f"inv_freq is {b.dtype}" for b in module.buffers() if b.dtype != torch.float32), "")
        patch.replace(path, module, pieces.rotary_forward(module), "rope_cos_sin", note)
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
    elif mixture.is_router(module):
        forward, note = mixture.router_forward(module)
        patch.replace(path, module, forward, "linear, moe_route", note)
    elif module._parameters:
        forward, style = pieces.norm_forward(module)
        patch.replace(path, module, forward, "rmsnorm", style)
    else:
        mixture.check_block(module)
        if pieces.is_mlp(module):
            try:
                forward, activation = pieces.mlp_forward(module)
                patch.replace(path, module, forward, "silu_mul", activation)
                patch.inner.update(id(m) for m in module.children() if not pieces.is_linear(m))
                return
            except NotCovered:
                pass  # its linear layers are covered; the audit judges the rest
        patch.keep(path, module)


def _audit(patch: _Patch) -> None:
    """Run the patched model on fake tensors and refuse what is neither aligned nor exact."""
    modules = dict(patch.model.named_modules())
    patch.seen = []
    try:
        found = audit.run(patch.model, {id(m): path for path, m in modules.items()}, _small_call)
    except Exception as error:
        path = _blame(error, {id(m): path for path, m in modules.items()})
        known = isinstance(error, NotCovered)
        reason = str(error) if known else f"it does not run on a small batch ({type(error).__name__}: {error})"
        patch.refuse(path, modules[path], reason, None if known else error)
        return
    finally:
        seen, patch.seen = patch.seen, None
    for path, operations in found.items():
        patch.refuse(path, modules[path], f"runs {', '.join(sorted(operations))} outside the aligned ops")
    paths = {id(m): path for path, m in modules.items()}
    reasons = {}
    for module, window, kwargs in seen:
        reason = _attention_problem(patch.base.config, module, window, kwargs)
        if reason:
            reasons[paths[id(module)]] = reason
    for path, reason in reasons.items():
        patch.refuse(path, modules[path], reason)


def _blame(error: BaseException, paths: dict[int, str]) -> str:
    """The innermost module whose forward was running."""
    frame, path = error.__traceback__, ""
    while frame is not None:
        path = paths.get(id(frame.tb_frame.f_locals.get("self")), path)
        frame = frame.tb_next
    return path


def _small_call(model: nn.Module, ids: Tensor):
    return model(input_ids=ids, use_cache=False)


def _attention_problem(config, module: nn.Module, window: int | None, kwargs: dict) -> str | None:
    """What an attention module asks for beyond what our attention does, or asks for in its mask alone: the masks, which
    are not built here, are made from the decoder's config."""
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _KNOWN_KWARGS)
    if unknown:
        return f"it asks attention for {', '.join(unknown)}"
    if not getattr(module, "is_causal", True) or not getattr(config, "is_causal", True):
        return "its attention is not causal"
    layer_types = getattr(config, "layer_types", None)
    kind = layer_types[module.layer_idx] if layer_types and hasattr(module, "layer_idx") else None
    if kind not in (None, "full_attention", "sliding_attention"):
        return f"its layer type is {kind!r}"
    masked = getattr(config, "sliding_window", None) if kind != "full_attention" else None
    if masked != window:
        return f"its mask has a window of {masked}, but it asks attention for {window}"
    return None


def _causal_forward(patch: _Patch) -> Callable:
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
    return forwards.wrapped_causal_forward()


def _loss(patch: _Patch) -> str:
    from transformers.loss.loss_utils import ForCausalLMLoss

    patch.loss = patch.model.loss_function is ForCausalLMLoss and "_loss_function" not in patch.model.__dict__
    return "loss: linear_cross_entropy" if patch.loss else "loss: your own function, not covered"

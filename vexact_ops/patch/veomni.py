"""VeOmni's trainers on aligned ops: its registries learn the name vexact, and a model that it built is covered.

The process's part and the model's part are two steps, because VeOmni's are: kernels are chosen by name when a model is
built, and what no name reaches (linear layers, routers, rotary tables, the head) lies in the instance.

    veomni = vexact_ops.patch.veomni()
    ops = OpsImplementationConfig(**veomni.fields)
    model = build_foundation_model(config_path, weights_path, "float32", init_device="meta", ops_implementation=ops)
    handle = veomni.cover(model)  # here, or after build_parallelize_model
    model = build_parallelize_model(model, weights_path=weights_path, init_device="meta")
    out = model(input_ids=ids, labels=ids, cu_seq_lens_q=cu, cu_seq_lens_k=cu, return_log_probs=True, temperature=0.7)
    out.fused_linear_aux.log_probs  # the engine's, byte for byte
"""

import functools
import importlib.metadata
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor, nn

import vexact_ops as vx

from ..fused_moe import swiglu
from . import batch, expert_parallel, mixture, slots
from .hf import Handle, hf
from .pieces import rotation
from .plan import UnsupportedModule
from .report import table
from .state import LOCK

VERSION = "0.1.12"
NAME = "vexact"
PIP = f"pip install --no-deps veomni=={VERSION}"
FIELDS = MappingProxyType(
    {
        "attn_implementation": NAME,
        "moe_implementation": f"fused_{NAME}",
        "cross_entropy_loss_implementation": NAME,
        "rms_norm_implementation": NAME,
        "swiglu_mlp_implementation": NAME,
        "rotary_pos_emb_implementation": NAME,
        "rms_norm_gated_implementation": "eager",  # a class: cover() gives its instances their forward
        "causal_conv1d_implementation": NAME,
        "chunk_gated_delta_rule_implementation": NAME,
    }
)


# Its classes that are not covered where transformers' of the same type are, and why.
REFUSED = MappingProxyType(
    {
        "qwen2_5_vl": "VeOmni's class leaves its rotary tables on three axes and joins them in its attention, which no "
        "aligned op does; transformers' class is covered (verl: strategy=fsdp2)"
    }
)


@dataclass(frozen=True)
class Row:
    """One thing of VeOmni's or transformers' that was changed for the process."""

    where: str
    what: str


class Report(list):
    """The rows; as a string a table."""

    def __str__(self) -> str:
        return table(("in this process", "change"), [(row.where, row.what) for row in self])


class VeOmni:
    """VeOmni with the name vexact in its registries. A context manager; `undo()` takes it back, at most once.

    fields  VeOmni's own fields that choose vexact, for OpsImplementationConfig(**fields), or for verl's
            actor_rollout_ref.actor.veomni.*
    """

    fields = FIELDS

    def __init__(self, process: "_Process"):
        self._process, self._active, self._handles = process, True, []

    def __enter__(self) -> "VeOmni":
        return self

    def __exit__(self, *exception) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"<vexact in VeOmni {VERSION}, {'active' if self._active else 'undone'}>"

    def report(self) -> Report:
        """What is changed for the process. What became of a model's modules: cover(model).report()."""
        return Report(self._process.rows)

    def cover(
        self, model: nn.Module, *, kv_segment: int | None = None, latent: bool = False, longrope: str | None = None
    ) -> Handle:
        """Run a model that VeOmni built on aligned ops alone: patch.hf for VeOmni's generated classes.

        model       of build_foundation_model with `fields` chosen, on meta or not, before or after
                    build_parallelize_model (FSDP2, expert parallelism, gradient checkpointing)
        kv_segment  and latent, longrope: as in patch.hf, declared alike in the engine
        returns     patch.hf's Handle: report(), undo(), logprobs()

        The causal language model's forward stays VeOmni's, so that its output keeps its fields: loss, and with
        return_log_probs=True fused_linear_aux.log_probs and .entropy at `temperature`; without labels, fp32 logits.
        Sequences are packed in one row with cu_seq_lens_q (and _k), or lie in a padded batch. Under VeOmni's Ulysses
        each rank has its share of the row, cu_seq_lens_q is of the whole, and vexact_score goes in place of labels.

        Parameters are bf16 when the forward runs: FSDP2's mixed precision sees to that, with fp32 masters. At world
        size 1 VeOmni has no FSDP and wants init_device="cuda": there build with torch_dtype="bfloat16" and
        MixedPrecisionConfig(enable=False), or call fully_shard yourself; fp32 parameters under autocast raise.

        raises  ValueError where a slot of the model's module, or attn_implementation, holds something else than
                vexact (naming VeOmni's field), or under context parallelism; TypeError where VeOmni did not build it;
                UnsupportedModule as patch.hf; RuntimeError after undo()
        """
        with LOCK:
            if not self._active:
                raise RuntimeError("patch.veomni: this patch has been undone")
            _check_built(model)
            shared = slots.sequence_parallel()
            handle = hf(model, kv_segment=kv_segment, latent=latent, longrope=longrope, sequence_parallel=shared)
            self._handles.append(handle)
            return handle

    def undo(self) -> None:
        """Give the covered models and, with the last of several, the process back what they had. Slots that hold vexact
        are emptied (VeOmni's eager code), and a model built with attn_implementation="vexact" needs another one
        (model.set_attn_implementation)."""
        with LOCK:
            if not self._active:
                return
            while self._handles:
                self._handles[-1].undo()
                self._handles.pop()
            self._active = False
            self._process.release()


def veomni() -> VeOmni:
    """Teach VeOmni (0.1.12) the name vexact, for this process; `cover` then covers the models that it builds.

    returns  a VeOmni: context manager, fields, cover(model), report(), undo(). Called again: another one of the same,
             and the process is as it was when the last is undone

    What changes: KernelSpecs named vexact for rms_norm/standard and /qwen3_5, rotary_pos_emb/full, swiglu_mlp/standard,
    moe_experts/standard and /gpt_oss, causal_conv1d/standard, chunk_gated_delta_rule/standard and
    cross_entropy_loss/causal (cross_entropy_loss/seq_cls is bound by the same field: it raises when called); attention
    as transformers' ALL_ATTENTION_FUNCTIONS["vexact"], for packed rows with cu_seq_lens_q; three functions of VeOmni's
    that refuse names that they do not know are wrapped, for the name vexact alone: apply_veomni_fused_moe_patch,
    install_loss_mapping and, of DeepSeek-V3, apply_per_model_patches.

    VeOmni replaces transformers' LOSS_MAPPING for the whole process, with functions that return tuples; with
    cross_entropy_loss_implementation="vexact" a Hugging Face model beside it still gets transformers' own loss.

    raises   RuntimeError where VeOmni is missing or of another version, with the pip line
    """
    with LOCK:
        return VeOmni(_Process.acquire())


def _check_version() -> None:
    try:
        found = importlib.metadata.version("veomni")
    except importlib.metadata.PackageNotFoundError:
        found = None
    if found != VERSION:
        got = "it is not installed" if found is None else f"got {found}"
        raise RuntimeError(f'patch.veomni: veomni: {got}, expected {VERSION}: {PIP} "transformers<5.23"')
    try:
        import veomni  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"patch.veomni: veomni {VERSION} cannot be imported ({error}); it wants: "
            'pip install "transformers<5.23" psutil'
        ) from error


def _check_built(model: nn.Module) -> None:
    cls = next((c for c in type(model).__mro__ if c.__module__.startswith(slots.GENERATED)), None)
    if cls is None:
        raise TypeError(
            f"patch.veomni: model: got {type(model).__module__}.{type(model).__name__}, expected one of VeOmni's "
            "generated classes, as build_foundation_model makes them (not with MODELING_BACKEND=hf); others: "
            "patch.hf"
        )
    if (kind := model.config.model_type) in REFUSED:
        raise UnsupportedModule(f"patch.veomni: {cls.__name__} ({kind}): {REFUSED[kind]}")
    wrong = []
    for slot in _slots(sys.modules[cls.__module__]):
        if (slot.op_name, slot.variant) in _kernels() and slot._impl_name != NAME:
            field = "moe" if slot.op_name == "moe_experts" else slot.op_name
            wrong.append((f"{field}_implementation", slot._impl_name or "nothing bound"))
    attention = getattr(model.config, "_attn_implementation", None)
    if attention != NAME:
        wrong.append(("attn_implementation", attention))
    if wrong:
        lines = "".join(f"\n  {field}: got {got}, expected {FIELDS[field]}" for field, got in sorted(set(wrong)))
        raise ValueError(
            f"patch.veomni: {cls.__name__} was built on other kernels where aligned ones are (all of them: "
            f"OpsImplementationConfig(**veomni.fields)):{lines}"
        )


def _slots(module) -> list:
    return [value for value in vars(module).values() if slots.is_slot(value)]


# what the registries get


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return vx.rmsnorm(x, weight, eps)


def _one_plus_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return vx.rmsnorm(x, weight, eps, style="gemma")


def _causal_conv(x, weight, bias=None, activation=None, seq_idx=None, backend=None, cu_seqlens=None):
    """(1, T, C) of packed sequences, (C, taps) -> (1, T, C), and nothing of a state."""
    if seq_idx is not None or x.shape[0] != 1:
        raise ValueError("vexact causal_conv1d: got seq_idx or several rows, expected one row of packed sequences")
    return vx.causal_conv(x[0], weight, bias, cu_seqlens=cu_seqlens, activation=activation)[None], None


def _gated_delta(
    q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None
):
    """(1, T, heads, dim) of packed sequences -> (1, T, heads, dv), and nothing of a state."""
    if initial_state is not None or output_final_state or cu_seqlens is None:
        raise ValueError(
            "vexact chunk_gated_delta_rule: got a state, or no cu_seqlens: expected whole sequences, packed in one row"
        )
    rows = (t[0] for t in (q, k, v, g, beta))
    return vx.gated_delta_varlen(*rows, cu_seqlens, qk_l2norm=use_qk_l2norm_in_kernel)[None], None


def _rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, position_ids=None, unsqueeze_dim: int = 1):
    return rotation("halves", True)(q, k, cos, sin, position_ids, unsqueeze_dim)


def _swiglu(module: nn.Module, x: Tensor) -> Tensor:
    act = getattr(module.config, "hidden_act", "silu")
    if act not in ("silu", "swish"):
        raise ValueError(f"vexact swiglu_mlp: hidden_act: got {act!r}, expected 'silu'")
    return module.down_proj(vx.silu_mul(module.gate_proj(x), module.up_proj(x)))


def _experts(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    if getattr(module, "limit", None) is not None:
        raise ValueError(f"vexact moe_experts: a clamped gate (limit {module.limit}) is not covered")
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    out = expert_parallel.experts(module, x, top_k_weights.float(), top_k_index.int(), "silu")
    return out.view(hidden_states.shape)


def _gpt_oss_experts(module: nn.Module, hidden_states: Tensor, router_indices: Tensor, weights: Tensor) -> Tensor:
    if (module.alpha, module.limit) != (swiglu.ALPHA, swiglu.LIMIT):
        raise ValueError(f"vexact moe_experts: a gate of alpha {module.alpha}, limit {module.limit} is not covered")
    return mixture.biased_experts_forward(module, hidden_states, router_indices, weights).view(hidden_states.shape)


def _no_classifier(*args, **kwargs):
    raise NotImplementedError("vexact: the loss of sequence classification has no aligned op: choose another kernel")


def _kernels() -> dict[tuple[str, str], Callable]:
    return {
        ("rms_norm", "standard"): _rms_norm,
        ("rms_norm", "qwen3_5"): _one_plus_norm,
        ("causal_conv1d", "standard"): _causal_conv,
        ("chunk_gated_delta_rule", "standard"): _gated_delta,
        ("rotary_pos_emb", "full"): _rotary,
        ("swiglu_mlp", "standard"): _swiglu,
        ("moe_experts", "standard"): _experts,
        ("moe_experts", "gpt_oss"): _gpt_oss_experts,
        (slots.LOSS, "causal"): slots.causal_loss,
        (slots.LOSS, "seq_cls"): _no_classifier,
    }


@dataclass
class _Stacked:
    """Experts as VeOmni's flat function gets them."""

    num_experts: int
    gate_up_proj: Tensor
    down_proj: Tensor


def _fused_moe_forward(
    num_experts, routing_weights, selected_experts, hidden_states, fc1_1_weight, fc1_2_weight, fc2_weight,
    fc1_1_2_weight=None, swiglu_limit=None,
):  # fmt: skip
    if fc1_1_2_weight is None or swiglu_limit is not None:
        raise ValueError("vexact fused_moe: expected gate and up in one weight, and no limit")
    return _experts(_Stacked(num_experts, fc1_1_2_weight, fc2_weight), hidden_states, selected_experts, routing_weights)


def _attention(module, query, key, value, attention_mask, dropout=0.0, *, cu_seq_lens_q=None, **kwargs):
    """Of a covered model, what its forward laid out; of another one, packed rows with cu_seq_lens_q."""
    kwargs.pop("cu_seq_lens_k", None)
    longest = kwargs.pop("max_length_q", None)
    if kwargs.get("vexact_layout") is None:
        if cu_seq_lens_q is None or attention_mask is not None or query.shape[0] != 1:
            raise ValueError(
                "vexact attention: got no cu_seq_lens_q, or not one row of packed sequences: cover the model "
                "(vexact_ops.patch.veomni().cover(model)), or pack"
            )
        slots.refuse_sequence_parallel("cover the model (vexact_ops.patch.veomni().cover(model))")
        kwargs["vexact_layout"] = batch.packed(cu_seq_lens_q, query.shape[2], longest)
    return batch.attend(module, query, key, value, attention_mask, dropout=dropout, **kwargs)


class _Process:
    """What is changed for the process, shared by all VeOmni objects."""

    current: "_Process | None" = None

    @classmethod
    def acquire(cls) -> "_Process":
        if cls.current is None:
            _check_version()
            process = cls()
            try:
                process.install()
            except BaseException:
                process.revert()
                raise
            cls.current = process
        cls.current.users += 1
        return cls.current

    def release(self) -> None:
        self.users -= 1
        if not self.users:
            type(self).current = None
            self.revert()

    def __init__(self):
        self.users, self.rows = 0, Report()
        self.undone: list[Callable[[], None]] = []  # what takes back, in the order of what was done

    def revert(self) -> None:
        while self.undone:
            self.undone.pop()()
        self.rows.clear()

    def _did(self, where: str, what: str, undo: Callable[[], None]) -> None:
        self.rows.append(Row(where, what))
        self.undone.append(undo)

    def install(self) -> None:
        from transformers.loss.loss_utils import LOSS_MAPPING
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
        from veomni.models.transformers.deepseek_v3 import device_patch
        from veomni.ops.config import singleton
        from veomni.ops.kernel_registry import KERNEL_REGISTRY, HardwareRequirement, KernelSpec
        from veomni.ops.kernels import cross_entropy, moe

        config = singleton.get_ops_config()
        self.undone += [lambda: self._reset_config(singleton, config), self._empty_slots]
        for (op, variant), kernel in _kernels().items():
            bucket = KERNEL_REGISTRY._specs.setdefault((op, variant), {})
            if NAME in bucket:
                raise RuntimeError(
                    f"patch.veomni: {op}/{variant}: a kernel named {NAME} is registered already, by another"
                )
            any_device = HardwareRequirement(device_type="any")
            spec = KernelSpec(NAME, op, variant, lambda kernel=kernel: kernel, any_device, "VeXact's aligned op")
            KERNEL_REGISTRY.register(spec)
            what = "raises when called" if kernel is _no_classifier else "KernelSpec vexact"
            self._did(f"KERNEL_REGISTRY {op}/{variant}", what, functools.partial(bucket.pop, NAME, None))
        attention = ALL_ATTENTION_FUNCTIONS._global_mapping
        ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)
        self._did(
            "transformers.ALL_ATTENTION_FUNCTIONS", "attention vexact", functools.partial(attention.pop, NAME, None)
        )
        self._wrap(moe, "apply_veomni_fused_moe_patch", _binding_experts(moe))
        pointer = moe._fused_moe_forward
        self.undone.append(lambda: self._put_back(moe, "_fused_moe_forward", _fused_moe_forward, pointer))
        self._wrap(cross_entropy, "install_loss_mapping", _installing_losses(cross_entropy, LOSS_MAPPING))
        losses = dict(LOSS_MAPPING)
        self._did(
            "transformers.LOSS_MAPPING",
            "VeOmni replaces it for the process; with vexact, a Hugging Face model keeps its own loss",
            lambda: self._put_back_losses(LOSS_MAPPING, losses),
        )
        self._wrap(
            device_patch, "apply_per_model_patches", _without_vexact(device_patch.apply_per_model_patches, singleton)
        )

    def _wrap(self, module, name: str, wrapper: Callable) -> None:
        original = getattr(module, name)
        setattr(module, name, functools.wraps(original)(wrapper))
        self._did(
            f"{module.__name__}.{name}",
            "knows the name vexact",
            lambda: self._put_back(module, name, getattr(module, name), original),
        )

    @staticmethod
    def _put_back(module, name: str, ours, before) -> None:
        if getattr(module, name) is ours:
            setattr(module, name, before)

    @staticmethod
    def _put_back_losses(mapping, before: dict) -> None:
        for name, function in list(mapping.items()):
            if isinstance(function, _Loss):
                mapping[name] = before[name]

    @staticmethod
    def _reset_config(singleton, before) -> None:
        now = singleton.get_ops_config()
        if now is not None and any(getattr(now, field) == value for field, value in FIELDS.items()):
            singleton.set_ops_config(before)

    @staticmethod
    def _empty_slots() -> None:
        for name, module in list(sys.modules.items()):
            if name.startswith(slots.GENERATED):
                for slot in _slots(module):
                    if slot._impl_name == NAME:
                        slot._kernel = slot._impl_name = None


def _binding_experts(moe) -> Callable:
    original = moe.apply_veomni_fused_moe_patch

    def apply_veomni_fused_moe_patch(fused_moe_kernel: str = "triton") -> None:
        if fused_moe_kernel != NAME:
            return original(fused_moe_kernel)
        from veomni.lora.ops import bind_lora_moe_kernels

        moe._fused_moe_forward = _fused_moe_forward
        bind_lora_moe_kernels(NAME)  # none
        return None

    return apply_veomni_fused_moe_patch


class _Loss:
    """Stands in LOSS_MAPPING: ours for VeOmni's classes, which hand in the output layer's weight, and transformers' for
    Hugging Face's, which do not."""

    def __init__(self, stock: Callable):
        self.stock = stock

    def __call__(self, *args, weights: Tensor | None = None, **kwargs):
        if weights is None:
            return self.stock(*args, **kwargs)
        return slots.causal_loss(*args, weights=weights, **kwargs)


def _installing_losses(cross_entropy, mapping) -> Callable:
    original = cross_entropy.install_loss_mapping

    def install_loss_mapping(impl: str = "eager") -> str:
        if impl != NAME:
            return original(impl)
        from transformers.loss.loss_utils import ForCausalLMLoss

        for name in ("ForCausalLM", "ForConditionalGeneration"):
            mapping[name] = _Loss(ForCausalLMLoss)
        return f"CrossEntropy ({NAME})"

    return install_loss_mapping


def _without_vexact(original: Callable, singleton) -> Callable:
    """DeepSeek-V3 has no slots of norm and rotation: a covered model has them replaced, and here nothing is to do."""

    def apply_per_model_patches(hf_module, model_name, targets, **kwargs) -> None:
        config = singleton.get_ops_config()
        left = {
            op: attribute
            for op, attribute in targets.items()
            if config is None or getattr(config, f"{op}_implementation") != NAME
        }
        original(hf_module, model_name, left, **kwargs)

    return apply_per_model_patches

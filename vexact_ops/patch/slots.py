"""VeOmni's generated classes: Hugging Face's code with slots in it, globals of their module that may hold a kernel.

    if veomni_rms_norm.use_non_eager_impl:
        return veomni_rms_norm(hidden_states, self.weight, self.variance_epsilon)

What a slot holds is the process's choice, so a class is tried without them, and a patched instance runs without them,
but for the one of the loss in the causal language model's forward: on the instance it is ours.
"""

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import vexact_ops as vx

from . import forwards

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

GENERATED = "veomni.models.transformers."
LOSS = "cross_entropy_loss"


def is_slot(value: object) -> bool:
    cls = type(value)
    return cls.__name__ == "OpSlot" and cls.__module__ == "veomni.ops.dispatch"


def slots_of(function: Callable) -> dict[str, object]:
    """The slots that a function reads, by their names in its module."""
    code = getattr(function, "__code__", None)
    if code is None:
        return {}
    scope = function.__globals__
    return {name: scope[name] for name in code.co_names if is_slot(scope.get(name))}


def is_of_veomni(loss: Callable) -> bool:
    """A loss of causal models that VeOmni, or veomni.py, put into transformers' LOSS_MAPPING."""
    function = getattr(loss, "func", loss)
    module = getattr(function, "__module__", None) or type(function).__module__
    return module.startswith(("veomni.ops.kernels.cross_entropy", f"{__package__}.veomni"))


class _Empty:
    """A slot that holds nothing: the class's own code runs."""

    use_non_eager_impl, use_eager_impl = False, True


def without_slots(function: Callable) -> Callable:
    """The function as it is while nothing is bound to its slots."""
    slots = slots_of(function)
    return _with(function, dict.fromkeys(slots, _Empty())) if slots else function


def _with(function: Callable, names: dict[str, object]) -> Callable:
    """The same code, with these globals of its own."""
    scope = {**function.__globals__, **names}
    scope.pop("__name__", None)  # as in pieces.py: torch.compile would look there
    made = types.FunctionType(function.__code__, scope, function.__name__, function.__defaults__, function.__closure__)
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__, made.__module__ = function.__qualname__, "vexact_ops.patch"
    return made


def has_loss_slot(model: nn.Module) -> bool:
    slots = slots_of(inspect.unwrap(type(model).forward))
    return any(slot.op_name == LOSS for slot in slots.values())


class _Loss:
    """A slot of the loss that holds ours."""

    use_non_eager_impl = True

    def __call__(self, *args, **kwargs):
        return causal_loss(*args, **kwargs)


@functools.cache
def causal_forward(cls: type) -> Callable:
    """The forward of the class itself, whose output has more fields than transformers' (log-probabilities and entropy
    next to the loss), with our loss in its slot."""
    from transformers.utils import can_return_tuple

    own = inspect.unwrap(cls.forward)
    held = {name: _Loss() if slot.op_name == LOSS else _Empty() for name, slot in slots_of(own).items()}
    own = can_return_tuple(_with(own, held))

    @forwards.without_autocast
    def causal_forward(self, *args, vexact_score=None, vexact_autocast=False, **kwargs):
        refuse_replay()
        if vexact_score is not None:
            return forwards.causal_forward(
                self, *args, vexact_score=vexact_score, vexact_autocast=vexact_autocast, **kwargs
            )
        self._vexact.check()
        if kwargs.get("output_router_logits"):
            raise ValueError("output_router_logits: got True, but the load balancing loss it asks for is not covered")
        return own(self, *args, vexact_checked=True, vexact_autocast=vexact_autocast, **kwargs)

    return causal_forward


def causal_loss(
    logits: Tensor | None = None,
    labels: Tensor | None = None,
    vocab_size: int | None = None,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    *,
    hidden_states: Tensor | None = None,
    weights: Tensor | None = None,
    return_log_probs: bool = False,
    temperature: float | Tensor = 1.0,
    teacher_topk_ids: Tensor | None = None,
    teacher_topk_log_probs: Tensor | None = None,
    **kwargs,
):
    """VeOmni's slot cross_entropy_loss/causal by linear_cross_entropy and linear_logprobs; no T x V logits.

    hidden_states     (..., H) final hidden states; weights (V, H) of the output layer, in the same dtype
    labels            (...) int64 ids, shifted here; or shift_labels, ids of the next tokens
    return_log_probs  instead of the loss: log p(next token) and the entropy of its distribution, fp32 like the labels,
                      at this temperature (a number, or fp32 like the labels, which FSDP2's mixed precision casts on
                      its way in: that raises); 0 where the label is ignore_index
    returns           (loss, None, None), or (None, None, FusedLinearAuxOutput(log_probs, entropy))
    raises            ValueError without hidden states, weights or labels, under sequence parallelism, or on what is not
                      covered: distillation from a teacher's top k; TypeError on a temperature of another dtype
    """
    refuse_sequence_parallel("give vexact_score=vexact_ops.patch.Score(...) in place of labels")
    if hidden_states is None or weights is None or (labels is None and shift_labels is None):
        raise ValueError("vexact loss: got no hidden_states, weights or labels, expected all: logits are not read")
    if teacher_topk_ids is not None or teacher_topk_log_probs is not None:
        raise ValueError("vexact loss: teacher_topk_ids: distillation from a teacher's top k is not covered")
    target = forwards.next_tokens(labels, shift_labels, ignore_index).to(hidden_states.device)
    rows = hidden_states.flatten(0, -2)
    if not return_log_probs:
        options = {"ignore_index": ignore_index, "reduction": "mean" if num_items_in_batch is None else "sum"}
        loss = vx.linear_cross_entropy(rows, weights, target, **options)
        return loss if num_items_in_batch is None else forwards.per_item(loss, num_items_in_batch), None, None
    from veomni.utils.model_outputs import FusedLinearAuxOutput

    shape = (labels if shift_labels is None else shift_labels).shape
    index = (target != ignore_index).nonzero()[:, 0]
    if isinstance(temperature, Tensor):
        if temperature.dtype != torch.float32:
            raise TypeError(
                f"vexact loss: temperature: got a tensor of {temperature.dtype}, expected a number or float32 (FSDP2 "
                "casts what a model is called with: pass a number, or vexact_score=vexact_ops.patch.Score(...))"
            )
        temperature = temperature.expand(shape).reshape(-1)[index]
    options = {"temperature": temperature, "return_entropy": True}
    values = vx.linear_logprobs(rows.index_select(0, index), weights, target[index], **options)
    whole = [value.new_zeros(target.shape[0]).index_copy(0, index, value).view(shape) for value in values]
    return None, None, FusedLinearAuxOutput(log_probs=whole[0], entropy=whole[1])


def sequence_parallel() -> "ProcessGroup | None":
    """The ranks of VeOmni's Ulysses, None where it is off. ValueError where its context parallelism is on, which cuts
    sequences."""
    from veomni.distributed.parallel_state import get_parallel_state, is_parallel_state_initialized

    if not is_parallel_state_initialized():
        return None
    if get_parallel_state().cp_enabled:
        raise ValueError("vexact: VeOmni's context parallelism (cp_size) is on, expected 1; ulysses_size may be more")
    return get_parallel_state().ulysses_group


class _OneRank:
    """A parallel state of VeOmni's with nothing enabled."""

    def __getattr__(self, name: str) -> bool:
        if name.endswith("_enabled"):
            return False
        raise AttributeError(name)


@contextlib.contextmanager
def one_rank(model: nn.Module) -> Iterator[None]:
    """Meanwhile VeOmni's generated classes, which ask for its parallel state, compute what one rank alone does."""
    names = {cls.__module__ for module in model.modules() for cls in type(module).__mro__}
    scopes = [vars(sys.modules[name]) for name in names if name.startswith(GENERATED)]
    before = [(scope, scope["get_parallel_state"]) for scope in scopes if "get_parallel_state" in scope]
    try:
        for scope, _ in before:
            scope["get_parallel_state"] = _OneRank
        yield
    finally:
        for scope, function in before:
            scope["get_parallel_state"] = function


def refuse_sequence_parallel(what: str) -> None:
    if sequence_parallel() is not None:
        raise ValueError(f"vexact: VeOmni's Ulysses (ulysses_size) is on: {what}")


def refuse_replay() -> None:
    """Its weights are computed by other operations than the router's, and equal routers need none."""
    from veomni.utils.moe_router_replay import get_active_replay

    if get_active_replay() is not None:
        raise ValueError("vexact: router replay is active, expected none: aligned routers choose alike by themselves")

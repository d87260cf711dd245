"""What the decoder and the causal language model around it do once patched: lay out the batch, logits, loss."""

import functools
import inspect
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule

import vexact_ops as vx

from . import batch, images, prompt_learning, whole

CACHES = ("cache", "past_key_values")  # a model's cache, as transformers calls it from 5.24 on, and as it did before
LAYERS_CACHE = "layer_past"  # as some layers hand it to their attention; attend sees whether it has come
# What transformers hands on besides, and a decoder may pass over: of what is returned, of the loss, or said twice; and
# the segments that a tokenizer may number, which no decoder that is covered reads.
PASSED = frozenset({
    "token_type_ids",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "cache_position", "is_causal",
    "seq_idx", "num_items_in_batch", "shift_labels", "ignore_index",
})  # fmt: skip


def one_cache(cache, past_key_values):
    """The cache of a call, by whichever of its names it came."""
    if cache is not None and past_key_values is not None and cache is not past_key_values:
        raise ValueError("cache: got another one as past_key_values, expected one of them")
    found = past_key_values if cache is None else cache
    if found is not None and not hasattr(found, "get_seq_length"):
        raise TypeError(f"cache: got a {type(found).__name__}, expected a DynamicCache")
    return found


def refuse_unknown(model: nn.Module, patch, kwargs: dict) -> None:
    """What no patched forward reads could change what the stock one computes, a cache by another name above all."""
    lax = patch.lax
    names = [n for n, v in kwargs.items() if v is not None and n not in PASSED and (not lax or _is_cache(v))]
    if names:
        raise TypeError(
            f"{type(model).__name__}: {', '.join(names)}: got an argument that no patched forward knows, and that "
            "could change what is computed"
        )
    if kwargs.get("is_causal") is False:
        raise ValueError("is_causal: got False, expected True: a patched decoder's attention is causal")


def _is_cache(value) -> bool:
    return hasattr(value, "get_seq_length") or (hasattr(value, "update") and hasattr(value, "layers"))


def without_autocast(forward: Callable) -> Callable:
    """Aligned ops compute in the dtypes of their tensors. Where autocast was on, attention refuses fp32: the model's
    weights are what was to be cast then, and nothing casts them."""

    @functools.wraps(forward)
    def wrapped(self, *args, **kwargs):
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if given is None or not torch.is_autocast_enabled(given.device.type):
            return forward(self, *args, **kwargs)
        with torch.autocast(given.device.type, enabled=False):
            return forward(self, *args, vexact_autocast=True, **kwargs)

    return wrapped


@without_autocast
def base_forward(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    use_cache=None,
    cu_seq_lens_q=None,
    cu_seq_lens_k=None,
    max_length_q=None,
    max_length_k=None,
    vexact_paged=None,
    vexact_checked=False,
    vexact_autocast=False,
    cache=None,
    **kwargs,
):
    """The decoder's own forward; the mask becomes a Layout that attention reads."""
    patch = self._vexact
    if not vexact_checked:
        patch.check()
    patch.check_rates()
    of_images = {}
    if patch.vision is not None:
        of_images = {n: kwargs.pop(n) for n in (*images.ARGUMENTS, *images.VIDEOS, *images.MASKS) if n in kwargs}
    refuse_unknown(self, patch, kwargs)
    cache = one_cache(cache, past_key_values)
    given = input_ids if input_ids is not None else inputs_embeds
    if given is None:
        raise ValueError("input_ids: got None, expected input_ids or inputs_embeds")
    size, device = given.shape[:2], given.device
    name, form = ("input_ids", "(B, S)") if input_ids is not None else ("inputs_embeds", "(B, S, H)")
    if given.dim() != form.count(",") + 1 or not size.numel():
        raise ValueError(f"{name}: got shape {tuple(given.shape)}, expected {form} with at least one token")
    attentions = kwargs.get("output_attentions")
    if attentions is None and vexact_paged is None and patch.seen is None:  # else nobody would have them
        attentions = getattr(self.config, "output_attentions", False)
    if attentions:
        raise ValueError(
            "output_attentions: got True, of the call or of the config, but attention weights are never formed"
        )
    axes = None
    if patch.vision is None:
        position_ids = batch.one_axis(position_ids)
    else:
        position_ids, axes = batch.text_axis(position_ids)
    if position_ids is not None and (
        position_ids.dim() != 2 or position_ids.shape[0] not in (1, size[0]) or position_ids.shape[1] != size[1]
    ):
        got, beside = tuple(position_ids.shape), tuple(size)
        raise ValueError(f"position_ids: got shape {got}, expected (B or 1, {size[1]}) for tokens of shape {beside}")
    given_positions = position_ids is not None and axes is None
    seen = None
    if patch.seen is not None:
        patch.seen.append(seen := [])
    options = {"kv_segment": patch.options["kv_segment"], "seen": seen, "autocast": vexact_autocast}
    past = int(cache.get_seq_length()) if cache is not None else 0
    shared = patch.ulysses if patch.seen is None else None
    if patch.states and use_cache is None and cache is None and torch.is_grad_enabled():
        use_cache = False  # whatever the config says: what goes on from a state has no gradients
    alone = None  # the name of an argument that goes without a cache
    if shared is not None:
        alone = "sequence_parallel"
        if patch.rows is not None:
            patch.rows.share = size[1]
        if vexact_paged is not None or attention_mask is not None or size[0] != 1:
            raise ValueError("sequence_parallel: expected a share of one packed row, and no attention_mask")
        layout, position_ids = batch.shared(
            shared, cu_seq_lens_q, position_ids, size[1], max_length_q, device, **options
        )
    elif vexact_paged is not None:
        alone = "vexact_paged"
        if attention_mask is not None or position_ids is None or size[0] != 1:
            raise ValueError("vexact_paged: expected one row of tokens with position_ids and without attention_mask")
        turns = itertools.count()  # and not their numbers: a layer may be called twice, or be a copy of another
        layout = batch.Layout(None, 0, None, size[1], None, None, vexact_paged, turns=turns, **options)
    elif cu_seq_lens_q is not None:
        alone = "cu_seq_lens_q"
        if attention_mask is not None or size[0] != 1:
            raise ValueError("cu_seq_lens_q: expected one packed row and no attention_mask")
        batch.check_cu("cu_seq_lens_q", cu_seq_lens_q, size[1], look=False)
        if cu_seq_lens_k is not None and not torch.equal(cu_seq_lens_k, cu_seq_lens_q):
            raise ValueError("cu_seq_lens_k: got other lengths than cu_seq_lens_q, expected the same")
        layout = batch.packed(cu_seq_lens_q, size[1], max_length_q, **options)
        if position_ids is None:
            position_ids = batch.positions_of(cu_seq_lens_q, size[1])
    elif attention_mask is not None:
        if not isinstance(attention_mask, Tensor) or attention_mask.shape != (size[0], past + size[1]):
            got = tuple(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            ready = not isinstance(attention_mask, Tensor) or attention_mask.dim() != 2
            raise ValueError(
                f"attention_mask: got {got}, expected padding of shape ({size[0]}, {past + size[1]})"
                + (": no mask that is ready, which generate() makes for a cache of a fixed size too" if ready else "")
            )
        layout, position_ids = batch.padded(attention_mask.to(device), size[1], position_ids, **options)
    else:
        cu = None
        if position_ids is not None and cache is None:
            cu = batch.restarts(position_ids, *size)
        if cu is None:
            layout = batch.plain(*size, past, device, **options)
        else:
            alone = "position_ids that restart"
            layout = batch.packed(cu, size[1], None, **options)
    if alone:
        if cache is not None or use_cache:
            raise ValueError(f"use_cache: got a cache with {alone}, expected use_cache=False")
        use_cache = False
    if patch.vision is not None:
        encoded, waiting = images.images_of(patch.vision, self, input_ids, of_images, past > 0)
        shares = encoded is None and past == 0 and patch.sharded() and not isinstance(given, FakeTensor)
        nothing = images.of_nothing(patch.vision, self, device) if shares else ()
        if waiting and axes is None:
            if given_positions or cache is not None or vexact_paged is not None:
                what = "text's alone" if given_positions else "none next to a cache"
                raise ValueError(f"position_ids: got {what} with images, expected (3 | 4, B, {size[1]}), or no cache")
            axes = images.axes_of_batch(patch.vision, input_ids, spans_of(layout, size), waiting, type(self).__name__)
    if patch.packed:
        kwargs["cu_seq_lens_q"] = (layout.cu_q if vexact_paged is None else vexact_paged.cu_seqlens_q).detach()
        batch.give(kwargs["cu_seq_lens_q"], layout)
    if patch.own_masks and alone in ("sequence_parallel", "vexact_paged"):
        raise ValueError(f"{alone}: got a batch that attention does not know which is not covered and stays stock")
    # Of four dimensions: transformers takes it for a mask that is ready, and builds none.
    mask = torch.empty(1, 1, 1, 1, dtype=torch.bool if patch.by_mask else torch.float32, device=device)
    mask = attention_mask if patch.own_masks else mask
    if patch.by_mask or patch.seen is not None:
        batch.give(mask, layout)
    if patch.vision is not None:
        embeds = self.get_input_embeddings()(input_ids) if inputs_embeds is None else inputs_embeds
        embeds = images.touched(embeds, nothing)
        places = position_ids.expand(3, *size) if axes is None and position_ids is not None else axes
        options = {"use_cache": use_cache, patch.cache: cache, **kwargs, "return_dict": True}
        options |= {"attention_mask": mask, "vexact_layout": layout}
        out = images.compute(patch.vision, self, input_ids, embeds, encoded, places, options)
        return out.to_tuple() if kwargs.get("return_dict") is False else out
    trains = vexact_paged is None and torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if trains and patch.fused is None:
        patch.fuse(device)
    return type(self).forward(
        self,
        input_ids=input_ids,
        attention_mask=mask,
        position_ids=position_ids,
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        vexact_layout=layout,
        **{patch.cache: cache},
        **kwargs,
    )


def spans_of(layout: batch.Layout, size: tuple[int, int]) -> list[tuple[int, int]]:
    """Where each sequence lies in the flattened batch, without a cache."""
    ends = layout.cu_q.tolist()
    if layout.q_index is None:
        return list(itertools.pairwise(ends))
    rows = layout.q_index.tolist()
    return [(rows[begin], rows[end - 1] + 1) for begin, end in itertools.pairwise(ends) if end > begin]


_READ = frozenset(inspect.signature(base_forward).parameters)


def scaled(patch, hidden: Tensor) -> Tensor:
    """What the output layer reads: hidden states divided by what the logits are to be divided by. Of a power of two
    that is the same; of any other number it is rounded to their dtype, where logits stay fp32. MiniCPM3 does so too."""
    return hidden if patch.scale == 1 else hidden / patch.scale


def noted_call(patch, input_ids: Tensor | None, out):
    """While the model is tried: what its forward was called with and what it returns, before hooks on the whole model
    make others of that (plan.py refuses those)."""
    if patch.seen is not None:
        patch.call = input_ids, out.logits, out.logits._version
    return out


def noted(forward: Callable) -> Callable:
    """The output layer's forward; what it returns is kept until through_head has seen what its hooks made of it."""

    @functools.wraps(forward)
    def wrapped(self, input, then=None):
        if then is None:
            return forward(self, input)
        self._vexact.made = made = forward(self, input, then=then)
        return made

    return wrapped


def through_head(patch, rows: Tensor, then: Callable, hooked: bool = False):
    """What `then` makes of rows and the output layer's weight, in that layer's own call, whose hooks gather the weight.
    As it was made: FSDP2's output_dtype would round it. Other hooks are meant for logits, and may change those alone.

    hooked   these are logits
    raises   RuntimeError where a hook has put something else in the place of log-probabilities, draws or the loss
    """
    out = patch.head(rows, then=then)
    made, patch.made = patch.made, None
    if _same(out, made):
        return out
    if isinstance(patch.head, FSDPModule) and rounds(patch.head) and len(patch.head._forward_hooks) == 1:
        return made
    if hooked:
        return out
    raise RuntimeError(
        f"patch.hf: a hook on the output layer ({type(patch.head).__name__}) changes what it returns, which is here no "
        "logits but what is formed of them in its call: take the hook off, or ask for logits"
    )


def _same(out, made) -> bool:
    outs, mades = (x if isinstance(x, tuple) else (x,) for x in (out, made))
    return len(outs) == len(mades) and all(a is b for a, b in zip(outs, mades))


def rounds(unit: FSDPModule) -> bool:
    """Whether FSDP2 casts what this unit returns to 16 bits, as accelerate has it do by default."""
    return unit._get_fsdp_state()._mp_policy.output_dtype not in (None, torch.float32)


def logits_of(patch, hidden: Tensor) -> Tensor:
    flat = scaled(patch, hidden).reshape(-1, hidden.shape[-1])
    then = functools.partial(vx.linear_logits, softcap=patch.softcap)
    logits = through_head(patch, flat, then, hooked=True)
    return logits.view(*hidden.shape[:-1], -1)


def sampled(patch, hidden: Tensor, seeds: Tensor | int, positions: Tensor | int, **options) -> tuple[Tensor, ...]:
    draw = functools.partial(vx.linear_sample, seeds=seeds, positions=positions, softcap=patch.softcap, **options)
    return through_head(patch, scaled(patch, hidden), draw)


@functools.cache
def wrapped_causal_forward() -> Callable:
    from transformers.utils import can_return_tuple

    return can_return_tuple(causal_forward)


@without_autocast
def causal_forward(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    labels=None,
    use_cache=None,
    logits_to_keep=0,
    skip_logits=False,
    vexact_score=None,
    vexact_autocast=False,
    cache=None,
    pixel_values=None,
    image_grid_thw=None,
    mm_token_type_ids=None,
    **kwargs,
):
    """Hidden states, fp32 logits of the rows asked for, and the loss where labels are given. The loss never forms the
    T x V logits; with skip_logits (and labels) nothing does. With vexact_score (batch.Score) its tuple is all that is
    returned."""
    from transformers.modeling_outputs import CausalLMOutputWithPast

    patch = self._vexact
    patch.check()
    of_images = {
        "pixel_values": pixel_values, "image_grid_thw": image_grid_thw, "mm_token_type_ids": mm_token_type_ids
    }  # fmt: skip
    kwargs |= {name: value for name, value in of_images.items() if value is not None}
    if vexact_score is not None:
        prompt_learning.check(patch, "log-probabilities")
        beside = {"labels": labels is not None, "skip_logits": skip_logits}
        beside["logits_to_keep"] = not isinstance(logits_to_keep, int) or logits_to_keep != 0
        if any(beside.values()):
            names = ", ".join(name for name, given in beside.items() if given)
            raise ValueError(f"vexact_score: got {names} beside it, expected it alone: its rows say what is wanted")
        kwargs["output_attentions"] = kwargs.get("output_attentions") or False  # whatever the config says
        begins = one_cache(cache, past_key_values) is None and not getattr(vexact_score, "counted", True)
        if position_ids is not None and begins:
            given = input_ids if input_ids is not None else inputs_embeds[..., 0]
            _check_positions(patch, position_ids, given, attention_mask, kwargs.get("cu_seq_lens_q"))
    if labels is not None and patch.ulysses is not None:
        raise ValueError("labels: got some under sequence_parallel, expected vexact_score of each rank's own rows")
    if kwargs.pop("output_router_logits", None):
        raise ValueError("output_router_logits: got True, but the load balancing loss it asks for is not covered")
    if patch.rows is not None:
        patch.rows.tokens = getattr(vexact_score, "tokens", None)
    own_loss = labels is not None and self.loss_function is not aligned_loss
    for_loss = _taken(self.loss_function, kwargs) if own_loss else {}
    kwargs = {name: value for name, value in kwargs.items() if name not in for_loss}
    out = patch.base(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        **{patch.cache: one_cache(cache, past_key_values)},
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        return_dict=True,
        vexact_checked=True,
        vexact_autocast=vexact_autocast,
        **kwargs,
    )
    hidden, logits, loss = out.last_hidden_state, None, None
    if vexact_score is not None:
        return _scores(patch, hidden, vexact_score)
    kept = hidden[:, _kept(logits_to_keep)]
    if labels is None or not skip_logits:
        logits = logits_of(patch, kept)
    if own_loss:
        kwargs |= for_loss
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
    elif labels is not None:  # of the rows that are kept, as without the patch, or of all
        targets = labels if kwargs.get("shift_labels") is None else kwargs["shift_labels"]
        of_kept = targets.numel() == kept.shape[0] * kept.shape[1]
        if attention_mask is not None:
            tokens = attention_mask[:, -hidden.shape[1] :].to(targets.device) != 0
            tokens = tokens[:, _kept(logits_to_keep)] if of_kept else tokens
            _check_labels(tokens, labels, kwargs.get("shift_labels"), kwargs.get("ignore_index", -100))
        loss = _loss_of(patch, kept if of_kept else hidden, labels, **kwargs)
    out = CausalLMOutputWithPast(
        loss=loss,
        logits=logits,
        hidden_states=out.hidden_states,
        attentions=out.attentions,
        **{patch.cache: getattr(out, patch.cache)},
    )
    return noted_call(patch, input_ids, out)


def _taken(loss: Callable, kwargs: dict) -> dict:
    """What a loss function of the caller's own names among its parameters, beyond what all forwards know."""
    unknown = {name: value for name, value in kwargs.items() if name not in PASSED and name not in _READ}
    return {n: v for n, v in unknown.items() if n in inspect.signature(loss).parameters} if unknown else {}


def score(patch, hidden: Tensor, target: Tensor, temperature: float | Tensor, return_entropy: bool):
    """linear_logprobs of (R, H) final hidden states, with all that the model does to its logits."""
    rows = scaled(patch, hidden)
    options = {"softcap": patch.softcap, "return_entropy": return_entropy}
    if not isinstance(temperature, Tensor):
        given = functools.partial(vx.linear_logprobs, temperature=temperature, **options)
        return through_head(patch, rows, whole.Then(given, target))

    def of_rows(x: Tensor, weight: Tensor, target: Tensor, temperature: Tensor):
        return vx.linear_logprobs(x, weight, target, temperature=temperature, **options)

    return through_head(patch, rows, whole.Then(of_rows, target, temperature))


def _check_positions(
    patch, position_ids: Tensor, given: Tensor, mask: Tensor | None, cu_seqlens: Tensor | None
) -> None:
    """Log-probabilities are of sequences that count from 0, as an engine counts them. Of a packed row on a GPU, whose
    numbers no forward waits for, and of ranks that share one, the caller knows. Shapes are the decoder's to judge."""
    if patch.vision is not None or patch.ulysses is not None or torch.compiler.is_compiling():
        return
    positions = batch.one_axis(position_ids)
    if positions.dim() != 2 or positions.shape[1] != given.shape[-1] or isinstance(positions, FakeTensor):
        return
    if cu_seqlens is not None:
        if cu_seqlens.device.type == positions.device.type == "cpu":
            batch.check_counts("vexact_score", positions, cu_seqlens, given.shape[-1])()
    elif mask is None or mask.shape == given.shape:
        batch.check_begins("vexact_score", positions, given, mask)


def _scores(patch, hidden: Tensor, asked: batch.Score) -> tuple[Tensor, ...]:
    if not isinstance(asked, batch.Score):
        raise TypeError(f"vexact_score: got {type(asked).__name__}, expected a vexact_ops.patch.Score")
    rows = hidden.flatten(0, 1)
    if asked.rows is not None:
        if patch.rows is not None and patch.ulysses is not None:
            raise ValueError("vexact_score: rows: got some with whole_gradients, expected None: all rows of each rank")
        rows = rows.index_select(0, asked.rows)
    values = score(patch, rows, asked.target, asked.temperature, asked.return_entropy)
    # A module's outputs are no views: FSDP2 warns of those, for a change in place of one would drop its hook.
    values = tuple(value.clone() for value in (values if asked.return_entropy else (values,)))
    if patch.rounds():
        if not asked.kept:
            raise ValueError(
                "vexact_score: FSDP2's output_dtype rounds what a forward returns: leave it out of the "
                "MixedPrecisionPolicy, or give Score(..., kept=True) and read its values in place of what is returned"
            )
        asked.values = values
    asked.made = tuple(map(id, values))
    return batch.Values(*values) if patch.unjudged_hook() else values


def _kept(logits_to_keep: int | Tensor) -> slice | Tensor:
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep


def _check_labels(tokens: Tensor, labels: Tensor, shift_labels: Tensor | None, ignore_index: int) -> None:
    """That nothing is to be learned of what comes out at padding, numbers without meaning. (B, S) bool tokens; a loss
    of other shapes is refused by its op."""
    target = next_tokens(labels, shift_labels, ignore_index).to(tokens.device)
    if target.numel() != tokens.numel():
        return
    wrong = (~tokens & (target.view(tokens.shape) != ignore_index)).nonzero()
    if len(wrong):
        row, place = wrong[0].tolist()
        raise ValueError(
            f"labels: got {len(wrong)} of tokens that would be predicted at padding of attention_mask (the first in "
            f"row {row} at token {place}), expected {ignore_index}: also of a first token behind padding on the left"
        )


def next_tokens(labels: Tensor | None, shift_labels: Tensor | None, ignore_index: int) -> Tensor:
    if shift_labels is None:
        shift_labels = nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    return shift_labels.reshape(-1)


def per_item(total: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
    if isinstance(num_items_in_batch, Tensor):
        num_items_in_batch = num_items_in_batch.to(total.device)
    return total / num_items_in_batch


def _loss_of(
    patch, hidden: Tensor, labels: Tensor, num_items_in_batch=None, ignore_index=-100, shift_labels=None, **kwargs
) -> Tensor:
    target = next_tokens(labels, shift_labels, ignore_index).to(hidden.device)
    options = {"ignore_index": ignore_index, "softcap": patch.softcap}
    options["reduction"] = "mean" if num_items_in_batch is None else "sum"
    rows = scaled(patch, hidden).flatten(0, 1)
    loss = through_head(patch, rows, lambda x, weight: vx.linear_cross_entropy(x, weight, target, **options))
    return loss if num_items_in_batch is None else per_item(loss, num_items_in_batch)


def aligned_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """transformers' ForCausalLMLoss from aligned log-probabilities, for who calls `model.loss_function` on logits: the
    mean over the targets that are not ignored, or their sum over num_items_in_batch."""
    target = next_tokens(labels, shift_labels, ignore_index).to(logits.device)
    index = (target != ignore_index).nonzero()[:, 0]
    rows = logits.float().view(-1, vocab_size).index_select(0, index)
    values = -vx.log_softmax(rows).gather(1, target[index][:, None])[:, 0]
    if num_items_in_batch is None:
        return vx.mean(values)
    return per_item(vx.mean(values) * len(index) if len(index) else values.sum(), num_items_in_batch)

"""What a model that scores sequences does once patched: the scores of each sequence's last token that is no padding."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from . import batch, forwards


@functools.cache
def wrapped_classifier_forward() -> Callable:
    from transformers.utils import can_return_tuple

    return can_return_tuple(classifier_forward)


def last_tokens(input_ids: Tensor, pad: int | None) -> Tensor:
    """(B, S) to (B,): where each row's last token is that is no padding; 0 of a row of padding alone."""
    places = torch.arange(input_ids.shape[-1], device=input_ids.device)
    return (places if pad is None else places * (input_ids != pad)).expand(input_ids.shape).argmax(-1)


def _check_last(places: Tensor, mask: Tensor, pad: int | None) -> None:
    """That the tokens to be scored are tokens by the mask too: of a row of padding alone nothing is known."""
    wrong = mask.any(1) & ~mask.gather(1, places[:, None])[:, 0]
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise ValueError(
            f"attention_mask: got padding at token {int(places[row])} of row {row}, the last one that is not "
            f"pad_token_id ({pad}) of the config and so the one that is scored: set that to the token that rows are "
            "padded with"
        )


def last_of_packed(input_ids: Tensor, cu_seqlens: Tensor, pad: int | None) -> Tensor:
    """(1, T) to (N,): the same of each sequence that is packed in the row, none of them empty."""
    tokens = input_ids.shape[1]
    places = torch.arange(tokens, device=input_ids.device)
    begins, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    if pad is None:
        return ends - 1
    seen = torch.where(input_ids[0] == pad, -1, places).cummax(0)[0]  # the last one up to here that is none
    return torch.maximum(seen[ends - 1], begins)


@forwards.without_autocast
def classifier_forward(
    self,
    input_ids=None,
    attention_mask=None,
    position_ids=None,
    past_key_values=None,
    inputs_embeds=None,
    labels=None,
    use_cache=None,
    cu_seq_lens_q=None,
    vexact_autocast=False,
    cache=None,
    **kwargs,
):
    """Scores of each sequence, fp32, at its last token that is no padding: of each row, or of each that is packed in
    one row. The loss is the class's own, of those."""
    from transformers.modeling_outputs import SequenceClassifierOutputWithPast

    patch = self._vexact
    patch.check()
    pad = self.config.get_text_config().pad_token_id
    out = patch.base(
        input_ids=input_ids,
        attention_mask=attention_mask,
        position_ids=position_ids,
        **{patch.cache: forwards.one_cache(cache, past_key_values)},
        inputs_embeds=inputs_embeds,
        use_cache=use_cache,
        cu_seq_lens_q=cu_seq_lens_q,
        return_dict=True,
        vexact_checked=True,
        vexact_autocast=vexact_autocast,
        **kwargs,
    )
    hidden = out.last_hidden_state
    size, rows = hidden.shape[:2], hidden.flatten(0, 1)
    if cu_seq_lens_q is None and attention_mask is None and position_ids is not None and size[0] == 1:
        cu_seq_lens_q = batch.restarts(batch.one_axis(position_ids), *size)
    if input_ids is None:
        if attention_mask is not None or size[0] != 1:
            raise ValueError("inputs_embeds: got a batch, expected one row, or input_ids, which tell padding")
        input_ids, pad = torch.zeros(size, dtype=torch.int64, device=hidden.device), None
    if pad is None and attention_mask is None and size[0] > 1 and patch.seen is None:
        raise ValueError(
            "input_ids: got several rows, but the config has no pad_token_id to tell padding by: set one, or give an "
            "attention_mask of ones"
        )
    if pad is None and attention_mask is not None and not bool(attention_mask.all()):
        raise ValueError("attention_mask: got padding, but the config has no pad_token_id to tell it by: set one")
    if cu_seq_lens_q is not None:
        index = last_of_packed(input_ids, cu_seq_lens_q, pad)
    else:
        places = last_tokens(input_ids, pad)
        if attention_mask is not None:
            _check_last(places, attention_mask[:, -size[1] :].to(places.device) != 0, pad)
        index = places + size[1] * torch.arange(size[0], device=hidden.device)
    logits = forwards.logits_of(patch, rows.index_select(0, index))
    loss = None
    if labels is not None:
        loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
    out = SequenceClassifierOutputWithPast(
        loss=loss,
        logits=logits,
        hidden_states=out.hidden_states,
        attentions=out.attentions,
        past_key_values=getattr(out, patch.cache),
    )
    return forwards.noted_call(patch, input_ids, out)

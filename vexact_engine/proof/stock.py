"""The stock Hugging Face stack, for contrast: its own `generate`, then its own forward over what it generated.

Nothing of ours runs here: padded batches, KV cache and sampling as `generate` has them, PyTorch's attention, then the
same model over the same tokens in other batches, as a trainer would score them. Both log-probabilities are the
fp32 log-softmax of the logits that the model returns.
"""

import contextlib
import time
from collections.abc import Sequence

import torch

from vexact_ops.patch import lora

from ..progress import Progress, quiet
from ..weights.random import own_generators
from .compare import Sample, Side


def run_stock(
    model,
    prompt_ids: Sequence[Sequence[int]],
    *,
    dtype: str,
    max_new_tokens: int = 64,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    eos_token_ids: Sequence[int] = (),
    seed: int = 0,
    batch_size: int = 16,
    rescore: bool = True,
    progress: Progress = quiet,
) -> Side:
    """Roll out with `model.generate` in batches of `batch_size`, left-padded; with `rescore` then re-score
    right-padded, in the reverse order and in batches of another size, without a cache.

    model     an unpatched Hugging Face causal LM; it is converted to `dtype` for the time, and back
    returns   a Side named "stock" with one sample per prompt
    """
    before = [(parameter, parameter.dtype) for parameter in model.parameters()]
    _cast(model, getattr(torch, dtype))
    samples, seconds = [], {}
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p or None}
    try:
        with torch.no_grad(), own_generators(model.device, seed), _attention(model, "sdpa"):
            begin = time.perf_counter()
            for start in range(0, len(prompt_ids), batch_size):
                progress(f"stock {dtype}: rollout", start, len(prompt_ids))
                batch = prompt_ids[start : start + batch_size]
                samples += _generate(model, batch, max_new_tokens, sampling, list(eos_token_ids))
            seconds["rollout"] = time.perf_counter() - begin
            if rescore:
                begin = time.perf_counter()
                _rescore(
                    model,
                    samples,
                    max(1, batch_size // 2 - 1),
                    temperature,
                    lambda n: progress(f"stock {dtype}: re-score", n, len(samples)),
                )
                seconds["rescore"] = time.perf_counter() - begin
    finally:
        for parameter, own in before:
            parameter.data = parameter.data.to(own)
    return Side("stock", dtype, samples, {key: round(value, 3) for key, value in seconds.items()})


@torch.no_grad()
def _cast(model, dtype: torch.dtype) -> None:
    """Parameters alone, and not those that stay in fp32, as from_pretrained has some and PEFT its adapters:
    `model.to(dtype)` would round routers and the rotary frequencies too, for good."""
    kept = lora.in_fp32(model, dtype)
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(torch.float32 if name in kept else dtype)


@contextlib.contextmanager
def _attention(model, name: str):
    before, training = model.config._attn_implementation, model.training
    model.set_attn_implementation(name)
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        model.train(training)


def _generate(model, prompts, max_new_tokens, sampling, eos) -> list[Sample]:
    temperature = sampling["temperature"]
    width = max(map(len, prompts))
    pad = eos[0] if eos else 0
    ids = torch.tensor([[pad] * (width - len(p)) + list(p) for p in prompts], dtype=torch.int64, device=model.device)
    mask = torch.tensor(
        [[0] * (width - len(p)) + [1] * len(p) for p in prompts], dtype=torch.int64, device=model.device
    )
    out = model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=max_new_tokens,
        **({"do_sample": True, **sampling} if temperature else {"do_sample": False}),
        repetition_penalty=1.0,
        eos_token_id=eos or None,
        pad_token_id=pad,
        output_logits=True,
        return_dict_in_generate=True,
        disable_compile=True,
    )
    new = out.sequences[:, width:]
    steps = [
        torch.log_softmax(logits.float() / (temperature or 1.0), -1).gather(1, new[:, step, None])[:, 0]
        for step, logits in enumerate(out.logits)
    ]
    scores = torch.stack(steps, 1).cpu()
    samples = []
    for row, prompt in enumerate(prompts):
        tokens = new[row].tolist()
        end = next((i + 1 for i, token in enumerate(tokens) if token in eos), len(tokens))
        reason = "stop" if tokens[end - 1] in eos else "length"
        samples.append(
            Sample("stock", "", list(prompt), tokens[:end], scores[row, :end].contiguous(), finish_reason=reason)
        )
    return samples


def _rescore(model, samples, batch_size, temperature, progress) -> None:
    order = list(reversed(samples))
    for start in range(0, len(order), batch_size):
        progress(start)
        batch = order[start : start + batch_size]
        rows = [sample.prompt_ids + sample.token_ids for sample in batch]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int64, device=model.device)
        mask = torch.tensor(
            [[1] * len(row) + [0] * (width - len(row)) for row in rows], dtype=torch.int64, device=model.device
        )
        logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        for row, sample in enumerate(batch):
            first = len(sample.prompt_ids) - 1
            wanted = logits[row, first : first + len(sample.token_ids)].float() / (temperature or 1.0)
            target = torch.tensor(sample.token_ids, dtype=torch.int64, device=model.device)
            sample.trainer = torch.log_softmax(wanted, -1).gather(1, target[:, None])[:, 0].cpu()

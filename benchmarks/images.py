"""What images cost: a model's encoder beside stock Hugging Face's, and decodes behind prompts that hold images.

python -m benchmarks images
python -m benchmarks images --device cpu --images 2 --side 64 --layers 2 --new 4

A model of Qwen3-VL-8B's sizes with random weights. Encoder: so many images at once, forward, and with the backward, in
milliseconds; the rows of an image alone are compared with those among the others first. Decodes: 1 and 16 prompts of an
image and some text, beside prompts of as many tokens of text; every log-probability is compared with the trainer's.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams

from . import harness
from .peers import first_line, say_once

DEFAULTS = {"cpu": {"images": 2, "side": 64, "new": 8}, "cuda": {"images": 64, "side": 448, "new": 128}}
STOCK = ("sdpa", "flash_attention_2", "flash_attention_3")  # what transformers calls its attentions
BATCHES, WORDS = (1, 16), 60  # prompts, and tokens of text of each
PATCH, MERGE = 16, 2
TEXT = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [24, 20, 20]},
}
TOWER = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
    "out_hidden_size": TEXT["hidden_size"],
}


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("images")
    group.add_argument("--images", type=int, metavar="N", help="of one call of the encoder (2 on a CPU, 64 on a GPU)")
    group.add_argument("--side", type=int, metavar="N", help="pixels of each side (64 on a CPU, 448 on a GPU)")


def run(args: argparse.Namespace) -> Iterator[dict]:
    """A record for each encoder and direction, and for each batch of decodes, in milliseconds.

    raises   ValueError where a side is no multiple of 32 pixels
    """
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    if args.side < 1 or args.side % (PATCH * MERGE) or args.images < 1:
        found = f"{args.images} of {args.side} pixels"
        raise ValueError(f"--images, --side: got {found}, expected 1 or more, of a multiple of {PATCH * MERGE}")
    yield from _encoders(args)
    yield from _decodes(args)


def _model(args: argparse.Namespace, attention: str, layers: int | None) -> torch.nn.Module:
    from transformers import AutoModelForImageTextToText
    from transformers.models.qwen3_vl import Qwen3VLConfig

    text, tower = dict(TEXT), dict(TOWER)
    if layers is not None:
        text["num_hidden_layers"] = layers
    if args.layers is not None:
        tower |= {"depth": args.layers, "deepstack_visual_indexes": [args.layers - 1]}
    config = Qwen3VLConfig(text_config=text, vision_config=tower, tie_word_embeddings=False)
    config._attn_implementation = attention
    torch.manual_seed(0)
    with torch.device(args.device):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()


def _pixels(args: argparse.Namespace, count: int) -> tuple[Tensor, Tensor]:
    """Patches of so many images, and their grids."""
    edge = args.side // PATCH
    x = harness.random(count * edge * edge, 3 * 2 * PATCH * PATCH, dtype=torch.bfloat16, device=args.device, seed=1)
    return x, torch.tensor([[1, edge, edge]] * count, dtype=torch.int64, device=args.device)


def _encoders(args: argparse.Namespace) -> Iterator[dict]:
    x, grids = _pixels(args, args.images)
    found: dict[str, tuple[float, float]] = {}
    for name in ("vexact", *STOCK):
        try:
            model = _model(args, "sdpa" if name == "vexact" else name, layers=1)
        except (ImportError, ValueError) as error:
            say_once(f"peer {name} is left out: {first_line(error)}")
            continue
        tower = model.model.visual
        if name != "vexact":
            found[name] = _both(args, lambda tower=tower: _rows_of(tower(x, grid_thw=grids)), tower)
            continue
        with vx.patch.hf(model) as handle:
            _alone(handle, x, grids)
            found[name] = _both(args, lambda: _rows(handle, x, grids), tower)
    for i, what in enumerate(("forward", "forward + backward")):
        for name, times in found.items():
            yield {
                "room": "images",
                "case": f"encoder of Qwen3-VL-8B, {args.images} x {args.side} x {args.side}, {what}",
                "backend": name,
                "unit": "ms",
                "layers": args.layers,
                "ours": round(times[i], 3),
                "ratio": round(found["vexact"][i] / times[i], 4),
                "device": args.device,
                **harness.environment(args.device),
            }


def _rows(handle, x: Tensor, grids: Tensor) -> tuple[Tensor, ...]:
    out = handle.encode(x, grids)
    return out.rows, *out.deepstack


def _rows_of(out) -> tuple[Tensor, ...]:
    return out.pooler_output, *out.deepstack_features


@torch.no_grad()
def _alone(handle, x: Tensor, grids: Tensor) -> None:
    """AssertionError unless the last image's rows are those that it has alone."""
    patches = len(x) // len(grids)
    whole, one = _rows(handle, x, grids), _rows(handle, x[-patches:], grids[-1:])
    for a, b in zip(whole, one, strict=True):
        if not vx.same_bits(a[-len(b) :], b):
            raise AssertionError("images: an image's rows depend on those beside it")


def _both(args: argparse.Namespace, forward: Callable[[], tuple[Tensor, ...]], tower) -> tuple[float, float]:
    """Milliseconds of the forward alone, and with the backward."""

    def train() -> None:
        rows = forward()
        torch.autograd.backward(rows, [torch.ones_like(one) for one in rows])
        tower.zero_grad(set_to_none=True)

    with torch.no_grad():
        alone = _milliseconds(forward, args)
    return alone, _milliseconds(train, args)


def _milliseconds(call: Callable[[], object], args: argparse.Namespace) -> float:
    return 1e3 * statistics.median(harness.time_one(call, args.device, 1) for _ in range(args.repeats))


def _decodes(args: argparse.Namespace) -> Iterator[dict]:
    model = _model(args, "sdpa", args.layers)
    config = EngineConfig(show_progress=False)
    text, pictured = _prompts(args, model.config, max(BATCHES))
    params = [SamplingParams(max_new_tokens=args.new, seed=seed, ignore_eos=True) for seed in range(max(BATCHES))]
    with Engine.from_pretrained(model, config=config) as engine:
        found = [[_timed(engine, prompts[:batch], params[:batch]) for prompts in (text, pictured)] for batch in BATCHES]
    with vx.patch.hf(model) as handle:  # of the same weights, once the cache's memory is free
        for batch, ((plain, _), (ours, done)) in zip(BATCHES, found):
            yield {
                "room": "images",
                "case": f"decodes of Qwen3-VL-8B, {batch} prompts of an image of {args.side} x {args.side}",
                "backend": "vexact",
                "unit": "ms",
                "layers": args.layers,
                "ours": round(ours, 4),
                "text": round(plain, 4),
                "ratio": round(ours / plain, 4),
                "numbers": sum(len(c.logprobs) for c in done),
                "differ": sum(_differing(handle, c) for c in done),
                "device": args.device,
                **harness.environment(args.device),
            }


def _prompts(args: argparse.Namespace, config, count: int) -> tuple[list, list]:
    """So many of text, and as many of an image each; all of the same number of tokens."""
    patches, grids = _pixels(args, count)
    patches, grids = patches.float().cpu().chunk(count), grids.cpu()
    stands = [config.image_token_id] * (int(grids[0].prod()) // MERGE**2)
    g = torch.Generator().manual_seed(args.seed)
    text, pictured = [], []
    for i in range(count):
        words = torch.randint(1, 150_000, (WORDS + len(stands) + 2,), generator=g).tolist()
        text.append(words)
        ids = [config.vision_start_token_id, *stands, config.vision_end_token_id, *words[:WORDS]]
        pictured.append({"prompt_token_ids": ids, "pixel_values": patches[i], "image_grid_thw": grids[i : i + 1]})
    return text, pictured


def _timed(engine: Engine, prompts: list, params: list[SamplingParams]) -> tuple[float, list]:
    """(milliseconds from a step to the next, once all decode; completions), of the second time."""
    for _ in range(2):
        engine.reset_prefix_cache()
        done = engine.generate(prompts, params, raise_on_error=True)
    begin = max(c.metrics.token_times[0] for c in done)
    times = [[t for t in c.metrics.token_times if t >= begin] for c in done]
    gaps = [after - before for own in times for before, after in itertools.pairwise(own)]
    return 1e3 * statistics.median(gaps), done


def _differing(handle, completion) -> int:
    """Log-probabilities that are not the trainer's."""
    device = next(handle.model.parameters()).device
    given = {}
    if completion.pixel_values is not None:
        given = {name: getattr(completion, name).to(device) for name in ("pixel_values", "image_grid_thw")}
        given["position_ids"] = completion.position_ids[:, None].to(device)
    ids = torch.tensor([completion.prompt_ids + completion.token_ids], dtype=torch.int64, device=device)
    with torch.no_grad():
        expected = handle.logprobs(ids, **given)[0, len(completion.prompt_ids) - 1 : -1].cpu()
    found = torch.tensor(completion.logprobs, dtype=expected.dtype)
    return int((found.view(torch.int32) != expected.view(torch.int32)).sum())

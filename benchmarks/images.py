"""What images cost: a model's encoder beside stock Hugging Face's, and decodes behind prompts that hold images.

python -m benchmarks images
python -m benchmarks images --vision qwen3-vl-2b,qwen3-vl-8b,qwen3-vl-30b-a3b
python -m benchmarks images --device cpu --images 2 --side 64 --layers 2 --new 4

Models of Qwen3-VL's sizes with random weights. Encoder: so many images at once, forward, and with the backward, in
milliseconds; the rows of an image alone are compared with those among the others first. Decodes: 1 and 16 prompts of an
image and some text, beside prompts of as many tokens of text. Every log-probability is compared with the trainer's,
those of images behind other text too; every token and log-probability with those of the same prompt alone, from the
warm cache, and in an engine whose cache is too small for all, so that some give back their pages and begin again.
Times of a mixture are taken with routers of zeros, so that all rows go to the same experts: random weights send rows
behind images to far fewer experts than rows behind text, and a step takes as long as the experts it reads.
"""

import argparse
import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams

from . import harness
from .peers import first_line, say_once

DEFAULTS = {"cpu": {"images": 2, "side": 64, "new": 64}, "cuda": {"images": 64, "side": 448, "new": 128}}
STOCK = ("sdpa", "flash_attention_2", "flash_attention_3")  # what transformers calls its attentions
BATCHES, WORDS = (1, 16), 60  # prompts, and tokens of text of each
PATCH, MERGE = 16, 2
COMMON = {
    "vocab_size": 151936,
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
}
SMALL_TOWER = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "deepstack_visual_indexes": [5, 11, 17]}


@dataclass(frozen=True)
class Sizes:
    """A model: what its texts and images are computed with."""

    title: str
    text: dict
    tower: dict
    tied: bool = False

    def config(self, layers: int | None, tower_layers: int | None):
        from transformers.models.qwen3_vl import Qwen3VLConfig
        from transformers.models.qwen3_vl_moe import Qwen3VLMoeConfig

        text = {**COMMON, **self.text} | ({} if layers is None else {"num_hidden_layers": layers})
        tower = {**TOWER, **self.tower, "out_hidden_size": text["hidden_size"]}
        if tower_layers is not None:
            tower |= {"depth": tower_layers, "deepstack_visual_indexes": [tower_layers - 1]}
        kind = Qwen3VLMoeConfig if "num_experts" in text else Qwen3VLConfig
        return kind(text_config=text, vision_config=tower, tie_word_embeddings=self.tied)


def _text(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, **more) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        **more,
    }


_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
SIZES = {
    "qwen3-vl-2b": Sizes("Qwen3-VL-2B", _text(2048, 6144, 28, 16, 8), SMALL_TOWER, tied=True),
    "qwen3-vl-8b": Sizes("Qwen3-VL-8B", _text(4096, 12288, 36, 32, 8), {}),
    "qwen3-vl-30b-a3b": Sizes("Qwen3-VL-30B-A3B", _text(2048, 6144, 48, 32, 4, **_EXPERTS), {}),
}


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("images")
    group.add_argument("--images", type=int, metavar="N", help="of one call of the encoder (2 on a CPU, 64 on a GPU)")
    group.add_argument("--side", type=int, metavar="N", help="pixels of each side (64 on a CPU, 448 on a GPU)")
    group.add_argument(
        "--vision",
        type=_names,
        default=["qwen3-vl-8b"],
        metavar="NAME,NAME",
        help=f"of: {', '.join(SIZES)} (qwen3-vl-8b)",
    )


def _names(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in SIZES:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected some of {', '.join(SIZES)}")
    return names


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
    for name in args.vision:
        yield from _encoders(args, SIZES[name])
        yield from _decodes(args, SIZES[name])


def _model(args: argparse.Namespace, sizes: Sizes, attention: str, layers: int | None) -> torch.nn.Module:
    from transformers import AutoModelForImageTextToText

    config = sizes.config(layers, args.layers)
    config._attn_implementation = attention
    torch.manual_seed(0)
    with torch.device(args.device):
        return AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()


def _pixels(args: argparse.Namespace, count: int) -> tuple[Tensor, Tensor]:
    """Patches of so many images, and their grids."""
    edge = args.side // PATCH
    x = harness.random(count * edge * edge, 3 * 2 * PATCH * PATCH, dtype=torch.bfloat16, device=args.device, seed=1)
    return x, torch.tensor([[1, edge, edge]] * count, dtype=torch.int64, device=args.device)


def _encoders(args: argparse.Namespace, sizes: Sizes) -> Iterator[dict]:
    x, grids = _pixels(args, args.images)
    found: dict[str, tuple[float, float]] = {}
    for name in ("vexact", *STOCK):
        try:
            model = _model(args, sizes, "sdpa" if name == "vexact" else name, layers=1)
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
                "case": f"encoder of {sizes.title}, {args.images} x {args.side} x {args.side}, {what}",
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


def _decodes(args: argparse.Namespace, sizes: Sizes) -> Iterator[dict]:
    model = _model(args, sizes, "sdpa", args.layers)
    config = EngineConfig(show_progress=False)
    text, pictured = _prompts(args, model.config, max(BATCHES))
    params = [SamplingParams(max_new_tokens=args.new, seed=seed, ignore_eos=True) for seed in range(max(BATCHES))]
    routers = [p for name, p in model.named_parameters() if name.endswith(".mlp.gate.weight")]
    with Engine.from_pretrained(model, config=config) as engine:
        found = [[_timed(engine, prompts[:batch], params[:batch]) for prompts in (text, pictured)] for batch in BATCHES]
        warm = engine.generate(pictured, params, raise_on_error=True)
        engine.reset_prefix_cache()
        alone = [engine.generate([pictured[i]], params[i], raise_on_error=True)[0] for i in (1, max(BATCHES) - 1)]
        behind = engine.generate([_behind(prompt) for prompt in pictured[:2]], params[:2], raise_on_error=True)
    whole = found[-1][1][1]
    again = [*zip(warm, whole), *zip(alone, (whole[1], whole[-1]))]
    kept = {"num_pages": _few_pages(whole, config.page_size), "reserve": 0.0, "enable_prefix_cache": False}
    small = replace(config, **kept, enforce_eager=True)
    with Engine.from_pretrained(model, config=small) as engine:
        again += zip(engine.generate(pictured, params, raise_on_error=True), whole)
        preempted = engine.stats.preemptions
    if not preempted:
        raise ValueError(
            f"images: --new: got {args.new}, with which nobody gives back pages in a small cache: expected more"
        )
    times = [[time for time, _ in both] for both in found]
    if routers:
        with _zeroed(routers), Engine.from_pretrained(model, config=config) as engine:
            times = [[_timed(engine, some[:n], params[:n])[0] for some in (text, pictured)] for n in BATCHES]
    with vx.patch.hf(model) as handle:  # of the same weights, once the cache's memory is free
        for batch, (plain, ours), (_, (_, done)) in zip(BATCHES, times, found):
            pairs = [pair for a, b in again for pair in _numbers(a, b)] if batch == max(BATCHES) else []
            checked = [*done, *behind] if pairs else done
            yield {
                "room": "images",
                "case": f"decodes of {sizes.title}, {batch} prompts of an image of {args.side} x {args.side}",
                "backend": "vexact",
                "unit": "ms",
                "layers": args.layers,
                "ours": round(ours, 4),
                "text": round(plain, 4),
                "ratio": round(ours / plain, 4),
                **({"routers": "zeros"} if routers else {}),
                "numbers": sum(len(c.logprobs) for c in checked),
                "differ": sum(_differing(handle, c) for c in checked),
                "again_numbers": len(pairs),
                "again_differ": sum(a != b for a, b in pairs),
                "preemptions": preempted,
                "device": args.device,
                **harness.environment(args.device),
            }


@contextlib.contextmanager
def _zeroed(tensors: list[Tensor]) -> Iterator[None]:
    kept = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        try:
            for tensor in tensors:
                tensor.zero_()
            yield
        finally:
            for tensor, values in zip(tensors, kept):
                tensor.copy_(values)


def _numbers(a, b) -> Iterator[tuple]:
    """Pairs of all that two completions say."""
    return itertools.chain(*(zip(x, y, strict=True) for x, y in ((a.token_ids, b.token_ids), (a.logprobs, b.logprobs))))


def _behind(prompt: dict) -> dict:
    """The same image, at another place: behind the words that came after it."""
    ids = prompt["prompt_token_ids"]
    return {**prompt, "prompt_token_ids": ids[-WORDS:] + ids[:-WORDS]}


def _few_pages(done: list, size: int) -> int:
    """Room for half of what these hold at their ends."""
    return max(sum(-(-(len(c.prompt_ids) + len(c.token_ids)) // size) for c in done) // 2, 8)


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

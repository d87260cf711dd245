"""Verify ahead of time everything that a model's forward, decode and training may ask for on a GPU."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .._core.admit import Decision, without_races
from ..attention.op import KEY_BLOCK, check_segment
from ..attention.op import ROOM as ATTENTION
from ..fused_moe.op import ROOM as FUSED_MOE
from ..linear.op import ROOM as LINEAR
from ..linear_cross_entropy.op import ROOM as HEAD
from ..linear_sample.op import ROOM as SAMPLE
from ..linear_silu_mul.op import ROOM as GATED
from . import mixture
from .report import table

GATED_PAIR = "gate_proj", "up_proj"
DELTA = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"), ("in_proj_qkvz", "in_proj_ba")
JOINED = ("q_proj", "k_proj", "v_proj"), GATED_PAIR, *DELTA  # into one product, by the engine


@dataclass(frozen=True)
class Matrix:
    """A weight as linear sees it. wide: its results are the fp32 sums; head: of the last tokens of a step alone;
    gated: of gates and ups, as linear_silu_mul sees it too."""

    n: int
    k: int
    bias: bool = False
    wide: bool = False
    head: bool = False
    gated: bool = False


@dataclass(frozen=True)
class Mixture:
    """Stacked experts: `inner` features each, `top_k` of them for a token."""

    experts: int
    hidden: int
    inner: int
    top_k: int


@dataclass(frozen=True)
class Heads:
    """Attention of these heads; the windows of its layers, None among them where one has none."""

    heads: int
    heads_k: int
    d: int
    dv: int
    windows: tuple[int | None, ...] = (None,)


@dataclass(frozen=True)
class Needs:
    """The distinct shapes of a model."""

    matrices: tuple[Matrix, ...] = ()
    mixtures: tuple[Mixture, ...] = ()
    attention: tuple[Heads, ...] = ()
    hidden: int | None = None


class Admitted(list[Decision]):
    """The decisions, one for each kind of call; as a string a table of them, and of what was refused."""

    seconds = 0.0  # in all

    @property
    def refused(self) -> list[tuple[str, str]]:
        return [(d.key, str(v)) for d in self for v in d.verdicts if not v.admitted]

    def __str__(self) -> str:
        rows = [(d.key, d.chosen.name, d.why, f"{d.seconds:.2f} s") for d in self]
        text = table(("kind of call", "kernel", "because", "verified in"), rows)
        verified = sum(len(d.verdicts) for d in self)
        text += f"\n{len(self)} kinds of calls, {verified} kernels verified, {len(self.refused)} refused, "
        return text + f"{self.seconds:.1f} s" + "".join(f"\nrefused for {key}: {what}" for key, what in self.refused)

    __repr__ = __str__


def admit(
    model: Any,
    *,
    rows: int | Iterable[int] = 512,
    training_rows: int | Iterable[int] = (),
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cuda",
    page_size: int | None = 16,
    kv_segment: int | None = None,
    progress: bool | None = None,
    timed: bool = True,
    until: Callable[[], bool] | None = None,
) -> Admitted:
    """Verify ahead of time the fast kernels that a model needs on a GPU, so that no step has to stop for it; kept on
    disk for the processes to come.

    model          a Hugging Face decoder (patched or not, on any device), or its config. Linear layers alone and with
                   q, k, v and gate, up joined, as the engine has them; the head; mixtures of experts; attention over
                   packed sequences and over pages
    rows           numbers of rows in a step: all up to so many, or these
    training_rows  numbers of tokens in a trainer's batch, for which gradients are verified too: these, or one
    dtype          the model's own by default
    page_size      of the engine's cache; None: there is none
    kv_segment     as the engine and the trainer set it
    progress       a bar on a terminal (None), lines where there is none (True), or nothing (False)
    timed          False, for a thread beside other work: what has to be timed to be chosen is left out; kernels that
                   were the fastest on such a GPU need no timing
    until          asked between two kinds of calls: True ends it
    returns        a list of the decisions, each with the kernel, why, and the verdict on every candidate; str() is a
                   table. What has one kernel only is not among them
    raises         BackendUnavailable without a GPU, TypeError on the model or dtype, ValueError on rows or kv_segment
    """
    ATTENTION.resolve(torch.device(device), "cuda")
    check_segment("admit", kv_segment, KEY_BLOCK["cuda"])
    needs = model if isinstance(model, Needs) else needs_of(model)
    if dtype is None:
        dtype = _dtype_of(model)
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"admit: dtype: got {dtype}, expected torch.bfloat16 or torch.float16: others have one kernel")
    rows, training_rows = _counts("rows", rows, True), _counts("training_rows", training_rows, False)
    begin, found, known = time.perf_counter(), Admitted(), set()
    jobs = list(_jobs(needs, rows, training_rows, dtype, torch.device(device), page_size, kv_segment))
    with _shown(progress) as show, contextlib.nullcontext() if timed else without_races():
        for done, (what, job) in enumerate(jobs):
            if until is not None and until():
                break
            show(what, done, len(jobs))
            for decision in job():
                if decision.verdicts and decision.key not in known:  # what has one kernel is not worth a line
                    known.add(decision.key)
                    found.append(decision)
        show("", len(jobs), len(jobs))
    found.seconds = time.perf_counter() - begin
    return found


def needs_of(model: Any, joined: bool = False) -> Needs:
    """The distinct shapes of a Hugging Face model, or of what its config describes.

    joined  without layers that the engine has in one product with others
    """
    if not isinstance(model, nn.Module):
        if not hasattr(model, "to_dict") or not hasattr(model, "model_type"):
            raise TypeError(f"admit: model: got {type(model).__name__}, expected a torch.nn.Module or its config")
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(model, trust_remote_code=False)
    config = model.config.get_text_config(decoder=True) if hasattr(model, "config") else None
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    matrices: dict[Matrix, None] = {}
    mixtures: dict[Mixture, None] = {}
    top_ks = [module.top_k for module in model.modules() if mixture.is_router(module)]
    for module in model.modules():
        linears = {name: m for name, m in module.named_children() if isinstance(m, nn.Linear)}
        groups = [names for names in JOINED if all(name in linears for name in names)]
        for name, one in linears.items():
            if joined and any(name in names for names in groups):
                continue
            last = one is head
            matrices[Matrix(one.out_features, one.in_features, one.bias is not None, wide=last, head=last)] = None
        for names in groups:
            group = [linears[name] for name in names]
            n = sum(one.out_features for one in group)
            bias, pair = group[0].bias is not None, names == GATED_PAIR
            matrices[Matrix(n, group[0].in_features, bias, gated=pair and not bias)] = None
        if mixture.is_router(module):
            matrices |= {Matrix(*module.weight.shape, wide=wide): None for wide in (True, False)}
        elif mixture.is_experts(module):
            experts, hidden, inner = module.down_proj.shape
            mixtures |= {Mixture(experts, hidden, inner, top_k): None for top_k in top_ks[:1]}
    hidden = None if head is None else head.weight.shape[1]
    return Needs(tuple(matrices), tuple(mixtures), tuple(_heads(model, config)), hidden)


def _heads(model: nn.Module, config) -> Iterator[Heads]:
    if config is None or not getattr(config, "num_attention_heads", None):
        return
    heads = config.num_attention_heads
    windows = {getattr(module, "sliding_window", None) for module in model.modules() if _attends(module)} or {None}
    windows = tuple(sorted(windows, key=lambda w: w or 0))
    if getattr(config, "kv_lora_rank", None):  # latent: expanded, every head has keys and values of its own
        yield Heads(heads, heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim, windows)
        return
    d = getattr(config, "head_dim", None) or config.hidden_size // heads
    yield Heads(heads, getattr(config, "num_key_value_heads", None) or heads, d, d, windows)


def _attends(module: nn.Module) -> bool:
    return any(name in module._modules for name in ("q_proj", "qkv_proj", "q_b_proj"))


def _dtype_of(model) -> torch.dtype:
    dtype = getattr(model, "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) and dtype != torch.float32 else torch.bfloat16


def _counts(name: str, counts: int | Iterable[int], up_to: bool) -> list[int]:
    if isinstance(counts, int):
        counts = range(1, counts + 1) if up_to and counts > 0 else [counts]
    counts = sorted(set(counts))
    if any(not isinstance(count, int) or count < 1 for count in counts):
        raise ValueError(f"admit: {name}: got {counts[0]}, expected whole numbers of 1 or more")
    return counts


def _jobs(
    needs: Needs, rows: list[int], training_rows: list[int], dtype, device, page_size, kv_segment
) -> Iterator[tuple[str, Callable[[], list[Decision]]]]:
    """What there is to verify, each with a name; what is alike is one."""
    rooms = LINEAR, GATED, HEAD, SAMPLE, FUSED_MOE, ATTENTION
    linear, gated, head, sampler, moe, attention = (room.module("cuda") for room in rooms)
    classes = sorted({linear.class_of(count) for count in rows})
    for heads in needs.attention:
        options = {"windows": heads.windows, "segment": kv_segment, "page": page_size, "training": bool(training_rows)}
        shape = heads.heads, heads.heads_k, heads.d, heads.dv
        yield f"attention {shape}", lambda shape=shape, o=options: attention.admit(*shape, dtype, device, **o)
    if needs.hidden is not None and dtype == torch.bfloat16:
        yield f"head {needs.hidden}", lambda: [head.admit(needs.hidden, device)]
        for count in sorted({sampler.class_of(count): count for count in rows}.values()):
            yield f"draw {needs.hidden}, {count} rows", lambda c=count: [sampler.admit(needs.hidden, c, device)]
    for matrix in needs.matrices:
        shape, out = (matrix.n, matrix.k), torch.float32 if matrix.wide else None
        options = {"device": device, "out_dtype": out, "bias": matrix.bias}
        for count in classes:
            yield (
                f"linear {matrix.n}x{matrix.k}, {count} rows",
                lambda s=shape, c=count, o=options: [linear.admit(*s, c, dtype, **o)],
            )
        for count in sorted({gated.class_of(count) for count in rows} - {0}) if matrix.gated else ():
            yield (
                f"gated {matrix.n}x{matrix.k}, {count} rows",
                lambda s=shape, c=count: [gated.admit(*s, c, dtype, device)],
            )
        if matrix.head:  # training's head is not a linear
            continue
        for count in training_rows:
            for layout in ("fwd", "dx", "dweight"):
                options = {"device": device, "layout": layout, "bias": matrix.bias and layout == "fwd"}
                options["out_dtype"] = out if layout == "fwd" else None
                yield (
                    f"linear {layout} {matrix.n}x{matrix.k}, {count} rows",
                    lambda s=shape, c=count, o=options: [linear.admit(*s, c, dtype, **o)],
                )
    for one in needs.mixtures:
        shape = one.experts, one.hidden, one.inner, one.top_k
        buckets = {moe.grouped.bucket_of(count * one.top_k): count for count in rows}  # one of each will do
        for training, counts in ((False, buckets.values()), (True, training_rows)):
            for count in counts:
                yield (
                    f"mixture {shape}, {count} tokens",
                    lambda s=shape, c=count, t=training: moe.admit(*s, c, dtype, device, training=t),
                )


@contextlib.contextmanager
def _shown(wanted: bool | None) -> Iterator[Callable[[str, int, int], None]]:
    terminal = sys.stderr.isatty()
    if wanted is False or (wanted is None and not terminal):
        yield lambda what, done, total: None
        return
    try:
        if not terminal:
            raise ImportError
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    except ImportError:
        yield lambda what, done, total: what and sys.stderr.write(f"[{done + 1}/{total}] {what}\n")
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)

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
from ..rmsnorm.op import ROOM as NORM
from ..silu_mul.op import ACTIVATIONS
from . import lora
from .describe import ROUTED, read
from .description import Attention, GatedDelta, Latent, Linear, Mlp, NotDescribed
from .description import Mixture as Routed
from .pieces import head_shape
from .report import table
from .state import Patch
from .trace import Value, hidden_states, values_of

SINKS, WINDOW = 6, 9  # their places among attention_varlen's arguments
RESIDUAL, GEMMA = 2, 4  # their places among rmsnorm's


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
    """Stacked experts: `inner` features each, `top_k` of them for a token. biased: of gpt-oss's form."""

    experts: int
    hidden: int
    inner: int
    top_k: int
    biased: bool = False


@dataclass(frozen=True)
class Heads:
    """Attention of these heads; the windows of its layers, None among them where one has none."""

    heads: int
    heads_k: int
    d: int
    dv: int
    windows: tuple[int | None, ...] = (None,)
    sinks: bool = False


@dataclass(frozen=True)
class Needs:
    """The distinct shapes of a model."""

    matrices: tuple[Matrix, ...] = ()
    mixtures: tuple[Mixture, ...] = ()
    attention: tuple[Heads, ...] = ()
    hidden: int | None = None
    norms: tuple[tuple[int, bool, bool], ...] = ()  # of each rmsnorm: width, whether Gemma's style, with a residual


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

    model          a Hugging Face decoder (patched or not, on any device), or its config. Of what its patched forward
                   computes: linear layers, alone and as an engine joins those of one input; the head; mixtures of
                   experts; attention over packed sequences and over pages; gradients of norms
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
    """The distinct shapes of what a patched model computes, read off its trace: of a Hugging Face model, or of what its
    config describes. Its weights are not looked at.

    model    one that `empty_of` has made is taken as it is
    joined   without products that an engine has as columns of another one

    Modules that patch.hf would refuse have no part in it, and nothing is audited: that is done where the model is used.
    """
    made = isinstance(model, nn.Module) and all(p.is_meta for p in model.parameters())
    options = {"kv_segment": None, "latent": False, "longrope": "short"}  # which change no shape
    patch = Patch(model if made else empty_of(model), options, strict=False, trains=False)
    patch.build(audited=False)
    patch.by_mask = True  # as in an audit, which says which models need it
    try:
        return _needs(patch, joined)
    finally:
        patch.revert()


def empty_of(model: Any) -> nn.Module:
    """Such a model on the meta device, in a dtype that every device serves. TypeError for what transformers has not."""
    if isinstance(model, nn.Module):
        model = lora.base_of(model)
    config = getattr(model, "config", None) if isinstance(model, nn.Module) else model
    if not hasattr(config, "to_dict") or not hasattr(config, "model_type"):
        raise TypeError(f"admit: model: got {type(model).__name__}, expected a transformers model or its config")
    from transformers import AutoModelForCausalLM

    make = type(model)._from_config if isinstance(model, nn.Module) else AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return make(config, dtype=torch.bfloat16)


def _needs(patch: Patch, joined: bool) -> Needs:
    calls = values_of(hidden_states(patch.model, patch.base))
    try:
        layers = read(calls[-1], None, None).layers
        groups = [group for layer in layers for block in layer.blocks for group in _joined(block.part)]
    except NotDescribed:  # an engine runs such a model by its own Python
        groups = []
    within = {linear.weight for group, _ in groups for linear in group} if joined else ()
    matrices = {_matrix(call): None for call in calls if call.op == "linear" and call.args[1].name not in within}
    for group, gated in groups:
        n, bias = sum(linear.features for linear in group), group[0].bias is not None
        matrices[Matrix(n, group[0].inputs, bias, gated=gated and not bias)] = None
    matrices.pop(None, None)
    mixtures, heads = {}, {}
    for call in calls:
        if call.op in ROUTED:
            (_, hidden), _, (experts, _, inner), *others = call.inputs
            biased = call.op != "fused_moe"
            mixtures[Mixture(experts, hidden, inner, others[2 if biased else 0][1], biased)] = None
        elif call.op == "attention_varlen":
            (_, count, d), (_, kept, _), (_, _, dv) = call.inputs[:3]
            kind = (count, kept, d, dv), call.args[SINKS] is not None
            heads.setdefault(kind, set()).add(call.args[WINDOW])
    attention = (
        Heads(*shape, tuple(sorted(windows, key=lambda w: w or 0)), sinks) for (shape, sinks), windows in heads.items()
    )
    norms = dict.fromkeys(
        (call.inputs[0][-1], bool(call.args[GEMMA]), call.args[RESIDUAL] is not None)
        for call in calls
        if call.op == "rmsnorm"
    )
    head = None if patch.head is None else head_shape(patch.head)
    if head is not None:
        matrices[Matrix(*head, wide=True, head=True)] = None
    return Needs(tuple(matrices), tuple(mixtures), tuple(attention), head and head[1], tuple(norms))


def _matrix(call: Value) -> Matrix | None:
    """None where its operands are fp32: there is little to choose from."""
    (*_, k), (n, _) = call.inputs[:2]
    x, _, bias, *_ = call.args
    return None if x.dtype == torch.float32 else Matrix(n, k, bias is not None, wide=call.dtype == torch.float32)


def _joined(part: Attention | Latent | GatedDelta | Mlp | Routed) -> Iterator[tuple[list[Linear], bool]]:
    """Weights of their own that an engine has side by side in one product, and whether silu_mul of it follows."""
    if isinstance(part, Attention):
        groups = [((part.q, part.k, part.v), False)]
    elif isinstance(part, Latent):
        groups = [((part.q_a or part.q, part.kv_a), False)]
    elif isinstance(part, GatedDelta):
        groups = [((*part.qkv, part.z, part.b, part.a), False)]
    else:
        mlp = part if isinstance(part, Mlp) else part.shared
        groups = [] if mlp is None else [((mlp.gate, mlp.up), mlp.activation in ACTIVATIONS)]
    for group, gated in groups:
        group = [linear for linear in group if linear is not None]
        of_one_kind = len({linear.bias is None for linear in group}) == 1
        if len(group) > 1 and of_one_kind and all(linear.rows is None for linear in group):
            yield group, gated
        elif len(group) > 1 and gated and of_one_kind and group[0].weight == group[1].weight:
            yield group, gated  # gates and ups are one weight already


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
        options["sinks"] = heads.sinks
        shape = heads.heads, heads.heads_k, heads.d, heads.dv
        yield f"attention {shape}", lambda shape=shape, o=options: attention.admit(*shape, dtype, device, **o)
    for width, *style in needs.norms if training_rows else ():
        norm = NORM.module("triton")
        yield f"norm {width}", lambda n=width, style=style, norm=norm: [norm.admit(n, dtype, device, *style)]
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
                    lambda s=shape, c=count, o={"training": training, "biased": one.biased}: moe.admit(
                        *s, c, dtype, device, **o
                    ),
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

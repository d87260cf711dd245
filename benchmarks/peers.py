"""Whom we are measured beside: what each is called in records, charts and tables, what it says of bits, and how its own
package is found and called. Nobody's package is needed: what is not there is left out, and that is said."""

import functools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor

PATH = "VEXACT_PEERS"  # folders of modules that no package index has


@dataclass(frozen=True)
class Peer:
    """label    in charts and tables
    color    in charts
    package  the distribution whose version is recorded; "" where it is none
    says     what its documentation says of bits; stand-ins of ours say that they are
    """

    label: str
    color: str
    package: str = ""
    says: str = ""
    link: str = ""


_INVARIANT = "equal over batches, in one process"
PEERS = {
    "torch": Peer("PyTorch", "#8c8c8c", "torch", "repeatable on request; a slice may differ from its batch"),
    "torch-fused": Peer("PyTorch, fused op", "#bdbdbd", "torch", "as PyTorch"),
    "hf-loop": Peer("Hugging Face's loop over experts", "#5f5f5f", "", "as PyTorch"),
    "batch_invariant_ops": Peer(
        "batch_invariant_ops",
        "#d55e00",
        "",
        f"{_INVARIANT}: forward of mm, addmm, log_softmax and mean",
        "https://github.com/thinking-machines-lab/batch_invariant_ops",
    ),
    "fixed-tile": Peer(
        "one fixed Triton tile (our stand-in)",
        "#e8a86b",
        "",
        f"{_INVARIANT}; written by us after batch_invariant_ops' and vLLM's persistent products, not theirs",
    ),
    "flash-attn-4": Peer(
        "flash-attn-4",
        "#0072b2",
        "flash-attn-4",
        "a deterministic backward on request; over batches no statement (timed with its splits off)",
        "https://github.com/Dao-AILab/flash-attention",
    ),
    "flash-linear-attention": Peer(
        "flash-linear-attention",
        "#7b4ea3",
        "flash-linear-attention",
        "no statement",
        "https://github.com/fla-org/flash-linear-attention",
    ),
    "quack": Peer("quack", "#009e73", "quack-kernels", "no statement", "https://github.com/Dao-AILab/quack"),
    "liger": Peer("Liger", "#cc79a7", "liger-kernel", "no statement", "https://github.com/linkedin/Liger-Kernel"),
    "flashinfer": Peer(
        "FlashInfer",
        "#e6ab02",
        "flashinfer-python",
        "options that fix the splits of attention",
        "https://github.com/flashinfer-ai/flashinfer",
    ),
    "vllm": Peer("vLLM", "#56b4e9", "vllm", "no statement", "https://github.com/vllm-project/vllm"),
    "vllm batch-invariant": Peer(
        "vLLM, batch-invariant mode",
        "#0b559f",
        "vllm",
        "equal over batches; no statement about a trainer",
        "https://github.com/vllm-project/vllm",
    ),
    "transformers": Peer("Hugging Face generate", "#5f5f5f", "transformers", "no statement"),
}
OURS = Peer("vexact", "#222222", "vexact", "the log-probabilities of rollout and trainer are the same floats")


def about(backend: str) -> Peer:
    """Ours, one of PEERS, or an unknown one under its own name."""
    if backend.startswith("vexact"):
        return OURS
    return PEERS.get(backend, Peer(backend, "#a6761d"))


@functools.cache
def version_of(backend: str) -> str | None:
    """Of its package here; None where it has none."""
    name = about(backend).package
    try:
        return metadata.version(name) if name else None
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def say_once(text: str) -> None:
    print(text, file=sys.stderr)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"


def installed(**loaders: Callable[[], Callable]) -> dict[str, Callable]:
    """Providers of other libraries: name -> a function that imports the library and returns what to time. What is not
    installed, or does not import here, is left out and said so once."""
    found = {}
    for name, load in loaders.items():
        try:
            found[name] = load()
        except Exception as error:  # a peer's import may fail in any way; ours must not be held up by it
            say_once(f"peer {name} is left out: {first_line(error)}")
    return found


def add_paths(text: str | None) -> None:
    """Folders, separated as in PATH, whose modules peers may be imported from, here and in processes of ours; what is
    installed goes before them."""
    given = [folder for folder in (text or os.environ.get(PATH, "")).split(os.pathsep) if folder]
    for folder in given:
        if not Path(folder).is_dir():
            raise ValueError(f"--peer-path: got {folder!r}, expected a folder of modules")
        if folder not in sys.path:
            sys.path.append(folder)
    if given:
        os.environ[PATH] = os.pathsep.join(given)


def batch_invariant(name: str) -> Callable:
    """A function of batch_invariant_ops. No package index has it: a checkout of it is found with --peer-path."""
    import batch_invariant_ops

    return getattr(batch_invariant_ops, name)


def flashinfer_paged(prefill: bool = False) -> Callable[..., Tensor]:
    """FlashInfer's attention over pages: one query a sequence, or with prefill a chunk of them at each one's end. Its
    plan is made once for each set of buffers, before anything is timed, as an engine makes it before the layers of a
    step."""
    import flashinfer

    plans = {}

    def plan(q, k_cache, table, lens, cu_seqlens):
        _, page, heads, size = k_cache.shape
        pages = (lens.long() + page - 1) // page
        ends = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).int()
        indices = torch.cat([row[:count] for row, count in zip(table, pages.tolist())])
        places = ends, indices, (lens - (pages.int() - 1) * page).int()
        sizes = q.shape[1], heads, size, page
        dtypes = {"q_data_type": q.dtype, "kv_data_type": k_cache.dtype}
        workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=q.device)  # it has to be zero at first
        if prefill:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            wrapper.plan(cu_seqlens, *places, *sizes, causal=True, **dtypes)
        else:
            grouped = q.shape[1] > heads
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=grouped)
            wrapper.plan(*places, *sizes, **dtypes)
        return wrapper

    def run(q, k_cache, v_cache, table, lens, cu_seqlens):
        key = (table.data_ptr(), lens.data_ptr(), q.shape)
        if key not in plans:  # which holds both, so that nothing else comes to lie there
            plans[key] = plan(q, k_cache, table, lens, cu_seqlens), table, lens
        # Where none is given, one is made and set to zero
        return plans[key][0].run(q, (k_cache, v_cache), out=torch.empty_like(q))

    return run


def flashinfer_sample(
    temperature: float, top_p: float = 1.0, top_k: int = 0
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """FlashInfer's draw from logits: ids alone, no log-probabilities. Seeds and positions are given as tensors: what it
    would take from a generator instead cannot be captured in a graph."""
    from flashinfer import sampling

    def run(logits, seeds, positions):
        at = {"seed": seeds, "offset": positions}
        if top_k:
            return sampling.top_k_top_p_sampling_from_logits(logits / temperature, top_k, top_p, **at)
        probabilities = sampling.softmax(logits, temperature)
        if top_p < 1:
            return sampling.top_p_sampling_from_probs(probabilities, top_p, **at)
        return sampling.sampling_from_probs(probabilities, **at)

    return run

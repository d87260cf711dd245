"""Hugging Face decoders on aligned ops, one model at a time: nothing outside the given instance changes."""

import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .._core.numerics import numerics
from ..attention.op import KEY_BLOCK, check_segment
from ..attention.op import ROOM as ATTENTION
from . import forwards, lora, plan, replicated, rotary
from .batch import Score, axis_and_check, check_begins, check_beside, check_counts, check_cu, sent, text_axis
from .description import Decoder, Pages, State
from .grids import grids_of
from .images import Encoded, check_pixels, encode
from .stage import Stage
from .state import ACTIVE, LOCK, Patch, Report
from .ulysses import Ulysses

if TYPE_CHECKING:
    import torch.distributed as dist

TESTED = (5, 24)  # the newest release of transformers that the tests have seen
_LOG = logging.getLogger(__name__)


class Handle:
    """One patch of one model. A context manager; `undo()` takes it back, and does so at most once.

    Patching a patched model again gives another handle on the same patch: the model is stock again when the last of
    them is undone, in whatever order.
    """

    def __init__(self, patch: Patch):
        self._patch, self._active = patch, True

    def __enter__(self) -> "Handle":
        return self

    def __exit__(self, *exception) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "active" if self._active else "undone"
        return f"<vexact patch of {type(self._patch.model).__name__}, {state}, {len(self._patch.changes)} modules>"

    @property
    def model(self) -> nn.Module:
        """What is patched: of PEFT's wrapper the model inside."""
        return self._patch.model

    @property
    def options(self) -> dict[str, int | bool | str | None]:
        """kv_segment, latent and longrope, as given to `hf`."""
        return dict(self._patch.options)

    def revision(self, *, tensors: bool = False) -> int:
        """Another number than before where modules, or numbers of theirs or of the config, have been changed since: for
        whoever keeps what was made of `describe`, or has captured a forward. What has changed is covered first.

        tensors  also where parameters or buffers have been registered under new names or taken away, or have another
                 shape or dtype: a forward does not look for that, which takes longer than all else that it looks for
        raises   UnsupportedModule as `hf`, until it is put back; RuntimeError after undo()
        """
        self._check()
        if tensors:
            self._patch.check_tensors()
        return self._patch.builds

    def report(self) -> Report:
        """A row for every module: what computes it now, or why it may stay as it is. str() makes a table of it."""
        return self._patch.report

    def describe(self) -> Decoder:
        """What patching found, as a tree of dataclasses: of each layer its norms, projections, attention or latent
        attention, feed-forward block or mixture; the embedding, the tables of angles and the output layer. Read off
        one forward on fake tensors, so weights may be on meta, and nothing goes by the names of classes or modules.
        Kept until modules are put in or taken out, or adapters switched.

        raises  NotDescribed naming what the description has no words for; RuntimeError after undo()
        """
        self._check()
        with LOCK:
            return self._patch.describe()

    def memories(self) -> tuple[Pages | State, ...]:
        """What each layer remembers of a sequence: of the description, or, where there is none, what attention is
        called with. RuntimeError after undo()."""
        self._check()
        with LOCK:
            return self._patch.memories()

    def stage(self, layers: range) -> Stage:
        """Some layers of the patched decoder on their own, by the model's own Python: for pipelines, whose stages may
        hold the weights of their layers alone. Valid until modules are put in or taken out.

        raises  NotDescribed as describe(); ValueError on the range; RuntimeError after undo()
        """
        return Stage(self._patch.base, self.describe(), layers)

    def numerics(self, device: torch.device | str | None = None, *, rounded: bool = False) -> dict:
        """Everything that fixes this model's bits but its weights: vexact_ops.numerics(device, ...) with the options of
        the patch, and under "model" the numbers that the model computes with: epsilons, windows, scalings, top_k,
        rotary frequencies, the dtypes that it computes in. A hand-over compares it with the engine's, field by field.

        Read off the forward as describe() reads it, without adapters (LoRA) and in the dtypes that FSDP2's mixed
        precision casts weights to, so call it once the model is wrapped; kept until modules or dtypes change. Names of
        weights, and which are tied, make no difference.

        device   as vexact_ops.numerics has it; by default where the model is
        rounded  of a trainer that hands its weights over in the dtypes that its forward has them in: an engine may then
                 hold in fp32 what a router casts to fp32 anyway: a list of both dtypes. Without, an engine whose
                 routers are of another dtype is refused, for it would compute with masters that were not rounded
        raises   RuntimeError after undo()
        """
        self._check()
        patch = self._patch
        if device is None:
            where = next(patch.model.parameters()).device.type
            device = None if where == "meta" else where
        options = {"kv_segment": patch.options["kv_segment"], "longrope": patch.options["longrope"]}
        options["latent_attention"] = patch.options["latent"] or None
        with LOCK:
            return {**numerics(device, **options), "model": patch.numerics(rounded)}

    def undo(self) -> None:
        """Give the model its own forwards back (with the last handle). Raises RuntimeError where something else has
        replaced a patched forward meanwhile."""
        with LOCK:
            if not self._active:
                return
            if self._patch.handles == 1:
                self._patch.revert()
            self._patch.handles -= 1
            self._active = False

    def logits(self, hidden: Tensor) -> Tensor:
        """(..., H) final hidden states to (..., V) fp32 logits, with the model's scaling and softcap; never rounded."""
        self._check_head("logits")
        return forwards.logits_of(self._patch, hidden)

    def score(self, hidden: Tensor, target: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """log p(target[r]) after final hidden states hidden[r]: (R, H), (R,) int64 to (R,) fp32, at a temperature or
        one for each. The bits of `logprobs`."""
        self._check_head("score")
        return forwards.score(self._patch, hidden, target, temperature, False)

    def sample(
        self,
        hidden: Tensor,
        seeds: Tensor | int,
        positions: Tensor | int,
        *,
        temperature: Tensor | float = 1.0,
        top_k: Tensor | int = 0,
        top_p: Tensor | float = 1.0,
        min_p: Tensor | float = 0.0,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """vexact_ops.sample(self.logits(hidden), seeds, positions, ...), byte for byte; (R, H) hidden. Where top_k,
        top_p and min_p are left as they are, a GPU stores no logits (vexact_ops.linear_sample)."""
        self._check_head("sample")
        options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        return forwards.sampled(self._patch, hidden, seeds, positions, **options)

    @overload
    def logprobs(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | Sequence[float] | None = None,
        where: Tensor | None = None,
        return_entropy: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def logprobs(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | Sequence[float] | None = None,
        where: Tensor | None = None,
        return_entropy: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...
    def logprobs(
        self,
        input_ids: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        temperature: float | Tensor = 1.0,
        pixel_values: Tensor | None = None,
        image_grid_thw: Tensor | None = None,
        pixel_values_videos: Tensor | None = None,
        video_grid_thw: Tensor | None = None,
        second_per_grid_ts: Tensor | Sequence[float] | None = None,
        where: Tensor | None = None,
        return_entropy: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The log-probability of each next token, with gradients and without ever holding T x V logits.

        input_ids       (B, S), or one packed row (1, T) or (T,)
        cu_seqlens      (N + 1,) where the packed row's sequences begin, and its end, on any device: from the CPU on,
                        no GPU is waited for before it has been given the forward
        attention_mask  (B, S) of a batch padded left or right
        position_ids    (B, S), or several axes of them, equal but for images; without the two above, a sequence ends
                        where they do not go on by one. Of text they count from 0 in each sequence, as an engine's do
        temperature     logits are divided by it: a number, or one for each of input_ids in fp32, for what follows it
        pixel_values    (N, channels * patch) of all images of the batch, one after another as their tokens come, as the
                        model's processor makes them; with (images, 3) image_grid_thw. Where position_ids are not given
                        on three axes (3 | 4, B, S), they are counted as the model counts them
        pixel_values_videos  and video_grid_thw: of videos likewise; second_per_grid_ts (videos,) where the model's
                        positions count seconds: from frame to frame
        where           bool, like input_ids: at which t values are wanted, an answer's say; None: at all. The output
                        layer is computed there alone. With cu_seqlens best on the CPU too
        return_entropy  also the entropy of each distribution
        returns         fp32 like input_ids: at t, log p(input_ids[t + 1] | input_ids[..t]); 0 at the last token of a
                        sequence, at padding, and where none is wanted
        bits            a value depends on its own sequence, the weights and the temperature alone
        raises          ValueError on shapes, RuntimeError after undo(), or of a model in DistributedDataParallel, whose
                        gradients would be one rank's
        """
        self._check_head("logprobs")
        patch = self._patch
        if not isinstance(input_ids, Tensor) or input_ids.dtype not in (torch.int32, torch.int64):
            got = f"dtype {input_ids.dtype}" if isinstance(input_ids, Tensor) else f"a {type(input_ids).__name__}"
            raise TypeError(f"logprobs: input_ids: got {got}, expected token ids, int32 or int64")
        if input_ids.dim() not in (1, 2) or not input_ids.numel():
            got = tuple(input_ids.shape)
            raise ValueError(f"logprobs: input_ids: got shape {got}, expected (B, S) or (T,) with at least one token")
        if cu_seqlens is not None and attention_mask is not None:
            raise ValueError("logprobs: attention_mask: got one next to cu_seqlens, expected one of them")
        if patch.ulysses is not None:
            raise ValueError("logprobs: the model is patched with sequence_parallel: call it with vexact_score")
        replicated.check(patch, "logprobs")
        ids = input_ids if input_ids.dim() == 2 else input_ids[None]
        position_ids = check_beside("logprobs", ids, attention_mask, position_ids)
        images = {
            "pixel_values": pixel_values, "image_grid_thw": image_grid_thw, "pixel_values_videos": pixel_values_videos,
            "video_grid_thw": video_grid_thw, "second_per_grid_ts": second_per_grid_ts,
        }  # fmt: skip
        images = {name: value for name, value in images.items() if value is not None}
        later: list[Callable[[], None]] = []  # checks of numbers that may be on a GPU: the forward is given to it first
        if patch.vision is not None:
            of_text = text_axis(position_ids)[0]
        else:
            position_ids, check_axes = axis_and_check(position_ids)
            of_text = position_ids
            later.append(check_axes) if cu_seqlens is not None else check_axes()
            if images:
                raise ValueError(f"logprobs: pixel_values: {type(patch.model).__name__} takes no images")
        if where is not None and (not isinstance(where, Tensor) or where.dtype != torch.bool):
            got = f"dtype {where.dtype}" if isinstance(where, Tensor) else f"a {type(where).__name__}"
            raise TypeError(f"logprobs: where: got {got}, expected a mask, bool")
        if where is not None and where.shape != input_ids.shape:
            got, expected = tuple(where.shape), tuple(input_ids.shape)
            raise ValueError(f"logprobs: where: got shape {got}, expected {expected}")
        longest = None
        if cu_seqlens is None:
            follows = torch.ones_like(ids, dtype=torch.bool)
            follows[:, -1] = False
            if attention_mask is not None:
                follows[:, :-1] = (attention_mask[:, 1:] != 0) & (attention_mask[:, :-1] != 0)
            elif of_text is not None:
                follows[:, :-1] = of_text.expand_as(ids).diff(dim=1) == 1
            if where is not None:
                follows &= where.view_as(ids).to(follows.device)
            index = follows.flatten().nonzero()[:, 0]
        else:  # on the host: a GPU is not waited for where they lie there
            bounds = cu_seqlens.cpu() if isinstance(cu_seqlens, Tensor) else cu_seqlens
            check_cu("logprobs: cu_seqlens", bounds, ids.numel())
            lengths, follows = bounds.diff(), torch.ones(ids.numel(), dtype=torch.bool)
            follows[bounds[1:][lengths > 0].long() - 1] = False
            if where is not None:
                follows &= where.flatten().cpu()
            longest = int(lengths.max())
            index = sent(follows.nonzero()[:, 0], ids.device)
            cu_seqlens = sent(cu_seqlens, ids.device)
        if of_text is not None and patch.vision is None and of_text.shape[1] == ids.shape[1]:
            if cu_seqlens is None:
                check_begins("logprobs", of_text, ids, attention_mask)
            else:
                ends = bounds if of_text.device.type == "cpu" else cu_seqlens.to(of_text.device)
                later.append(check_counts("logprobs", of_text, ends, ids.numel()))
        if isinstance(temperature, Tensor):
            if temperature.shape != input_ids.shape:
                got, expected = tuple(temperature.shape), tuple(input_ids.shape)
                raise ValueError(f"logprobs: temperature: got shape {got}, expected a number or {expected}")
            temperature = temperature.flatten()[index]
        asked = Score(ids.flatten()[index + 1], index, temperature, return_entropy, kept=True).checked()
        # Through the model itself, as any forward: what wraps it (FSDP, hooks) gathers the output layer's weight there.
        values = patch.model(
            input_ids=ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cu_seq_lens_q=cu_seqlens,
            max_length_q=longest,
            use_cache=False,
            vexact_score=asked,
            **images,
        )
        for check in later:
            check()
        others = asked.values is None and tuple(map(id, values)) != asked.made
        if others and patch.model.__dict__.get("_compiled_call_impl") is None:  # which returns tensors of its own
            raise RuntimeError(
                "logprobs: a hook on the whole model changes what it returns, which is here no logits but their "
                "log-probabilities: take the hook off"
            )
        values = values if asked.values is None else asked.values
        whole = tuple(v.new_zeros(ids.numel()).index_copy(0, index, v).view(input_ids.shape) for v in values)
        return whole if return_entropy else whole[0]

    def encode(self, pixel_values: Tensor, image_grid_thw: Tensor | Sequence[Sequence[int]]) -> Encoded:
        """What the model's image encoder makes of images: a row for each token of theirs, and those that are added
        after the first layers. A forward takes it (vexact_images=) in place of pixel_values and image_grid_thw.

        pixel_values    (N, channels * patch) of the images, one after another
        image_grid_thw  (images, 3): frames, rows and columns of patches
        bits            an image's rows depend on that image and the weights alone
        raises          ValueError on shapes, and where the model has no encoder; RuntimeError after undo()
        """
        self._check()
        patch = self._patch
        if patch.vision is None:
            raise ValueError(f"encode: {type(patch.model).__name__} has no image encoder")
        check_pixels("encode", pixel_values, patch.vision.width)
        if pixel_values.device.type == "cpu":  # where a processor makes them
            pixel_values = pixel_values.to(next(self.tower.parameters()).device)
        return encode(patch.vision, patch.base, pixel_values, grids_of("encode", image_grid_thw, patch.vision.merge))

    @property
    def tower(self) -> nn.Module | None:
        """The model's image encoder, mergers among it; None: it has none. RuntimeError after undo()."""
        self._check()
        vision = self._patch.vision
        return None if vision is None else self._patch.base._modules[vision.tower]

    @property
    def classifies(self) -> bool:
        """Whether the model's logits are scores of sequences."""
        return self._patch.classifies

    def _check_head(self, op: str) -> None:
        self._check()
        patch, why = self._patch, None
        if patch.classifies and op in ("logprobs", "score"):
            why = "scores sequences, and has no log-probabilities: call the model"
        elif patch.headless:
            why = "keeps its output layer, or the forward around it, stock: the report says why"
        elif patch.head is None:
            why = "has no output layer, expected a causal language model: load it with AutoModelForCausalLM"
        if why:
            raise ValueError(f"{op}: {type(patch.model).__name__} {why}")

    def _check(self) -> None:
        if not self._active:
            raise RuntimeError("this patch has been undone")
        self._patch.check()


def model_of(tensor: Tensor) -> dict | None:
    """handle.numerics()["model"] of the patched model of this process that the tensor is a parameter of, as such or as
    state_dict() gives it; None where there is none."""
    if not isinstance(tensor, Tensor) or tensor.is_meta or isinstance(tensor, FakeTensor):
        return None
    with LOCK:
        for patch in tuple(ACTIVE):
            if any(_is_of(tensor, parameter) for parameter in patch.model.parameters()):
                return patch.numerics()
    return None


def _is_of(tensor: Tensor, parameter: Tensor) -> bool:
    if tensor is parameter:
        return True
    if any(type(t) not in (Tensor, nn.Parameter) for t in (tensor, parameter)) or not tensor.numel():
        return False
    return tensor.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def untested(version: str) -> str:
    """What there is to say of a release of transformers that is newer than any that was tested, or ""."""
    release = re.match(r"(\d+)\.(\d+)", version)
    if not release or tuple(map(int, release.groups())) <= TESTED:
        return ""
    newest = ".".join(map(str, TESTED))
    return f"transformers {version} is newer than {newest}, the newest tested: what is seen to differ is refused"


@functools.cache
def _say_once(what: str) -> None:
    _LOG.warning("patch.hf: %s", what)


def hf(
    model: nn.Module,
    *,
    strict: bool = True,
    kv_segment: int | None = None,
    latent: bool = False,
    longrope: str | None = None,
    training: bool = True,
    sequence_parallel: "dist.ProcessGroup | None" = None,
    whole_gradients: bool = False,
) -> Handle:
    """Run a Hugging Face decoder on aligned ops: training, generation and a paged engine get the same bits.

    model       a loaded causal language model of transformers, one that takes images too (WITH_IMAGES), or its decoder
                alone, in PEFT's wrapper or not; nothing else is touched, not its class, its config or any registry, so
                other models of the same class stay stock
    strict      refuse a model that holds anything whose bits could depend on the batch; False leaves such modules
                stock (attention with its own masks), says so in the report, and promises nothing
    kv_segment  cut attention's keys at multiples of this many (see attention_varlen): declare it on both sides
    latent      keep latent attention (DeepSeek, Moonlight) compressed: one key head of kv_lora_rank + rope, and values
                that are its first kv_lora_rank, in training as in a paged cache. Other bits than the expanded form, a
                smaller cache, more work in attention (latent.py says how much): declare it on both sides
    longrope    "short" or "long": which factors rotary embeddings of the type longrope have, whatever a batch's longest
                sequence: declare it on both sides. Of the type dynamic "short": up to max_position_embeddings
    training    False, of an engine: rates of dropout are passed over, and raise where it is trained after all
    sequence_parallel  ranks that hold a packed row's tokens in equal shares, in this order (Ulysses). Each calls the
                forward with its own input_ids and position_ids, and cu_seq_lens_q, if any, of the whole row; rows
                that fill it up are a sequence of their own. Log-probabilities, entropies and gradients of
                activations are those of one rank; gradients of weights are those of a rank's rows, to be added up.
                For vexact_score alone: labels and handle.logprobs would want the next rank's first token
    whole_gradients  of these ranks: gradients of weights are those of one rank too. All rows of a module go to one of
                them, modules by turns, which computes its gradient over them; others have -0.0 there, so that sums over
                the ranks are it. Costs a forward more, and the exchange
    returns     a Handle: context manager, report(), undo(), logprobs(), logits()

    What changes, for this instance: linear layers, root-mean-square norms, gated feed-forward blocks, the routers and
    experts of mixtures, rotary tables and the rotation of heads, attention, the output layer (fp32 logits) and the
    loss. Residual sums, scalings and embedding lookups stay: they are exact. Weights are read at every call, so
    load_state_dict, optimizer steps, `.to(...)` and train()/eval() work as ever. The forward takes, besides the usual
    arguments, padded batches (2-D attention_mask, left or right; positions then count a row's own tokens unless
    position_ids are given), packed rows (cu_seq_lens_q, or position_ids that restart), a DynamicCache
    (`cache`, or as transformers before 5.24 has it, `past_key_values`),
    `vexact_paged=PagedBatch(...)` from an engine and `vexact_score=Score(...)` from a trainer. Padding rows come out as
    numbers without meaning: labels of what they would predict are refused.

    Models of images: the image encoder (patches, its table of positions, rotation by row and column, attention within
    each frame or window, mergers) is covered as the decoder is, trained or frozen. An image's rows depend on that image
    alone, and positions on three axes are counted as the model counts them, for padded batches and packed rows, with
    rows of text among those of images. Weights of the table's interpolation are those of transformers 5.24, also where
    an older one has others in the last bit. Videos are refused, and so are images next to text's (B, S) position_ids.

    No list says which families are covered: each piece is tried against the op that would replace it, and the patched
    model runs once on fake tensors to see that nothing else reduces. Those that were seen to be covered, tiny and
    random, are vexact_ops.patch.COVERED; VeOmni's generated
    classes of these families are covered like their originals (veomni.py). Latent keys and values are expanded before
    attention, in a paged cache too. A load balancing loss is refused.

    Models that score sequences (AutoModelForSequenceClassification: a decoder and a linear layer named score): logits
    are fp32 scores of each sequence's last token that is no padding, of a batch or of sequences that are packed in one
    row; an engine's `classify` gives the same. Their loss is the class's own.

    Modules that are put in or taken out after the patch are noticed by the next forward, which covers them too or
    raises UnsupportedModule naming them; so are a bias that a module did not have, a weight that is no plain tensor any
    more (a quantised one), and numbers of modules (top_k, an epsilon, a window) and of the config, and its lists
    (layer_types), that are set later, but by a forward that torch.compile has compiled. Hooks that are put on later
    run, as do forwards that are set on a module later, and nobody judges what they do; but a hook or a forward on a
    module whose work its block does is refused, and so is a hook that changes what the output layer, or the whole
    model, returns where that is no logits, or that asks there for logits. A hook on the whole model that is there
    before the patch may change nothing; a module that is made one of another class is covered anew, but a class that
    another forward is put into is not noticed. So PEFT may come before or after: LoRA on linear layers is covered
    (several adapters, disabled, merged, adapter_names; rank-stabilised; modules_to_save where PEFT came first). Its sum
    is base(x) + scaling * B(A(x)), adapter by adapter in their active order, A and B in their own dtype, rounded once
    to the base layer's. Merged weights are rounded ones: other bits than the unmerged sum. Refused by name: DoRA and
    other forms of LoRA, dropout above 0, LoRA of embeddings, experts or the output layer, other methods of PEFT.

    Not while another thread runs the same model; different models may be patched and used in different threads. Patch
    before torch.compile; FSDP2 may come before or after, and weights may be on meta still. Gradient checkpointing,
    FSDP2 (mixed precision too) and torch.compile keep the bits; Inductor with its option emulate_precision_casts alone,
    for it leaves out the roundings between elementwise kernels that it joins: a module's compile() is refused without
    it; that of torch.compile(model), which is put around the model, nobody here can see. The gradient of the embedding,
    a stock lookup, is Inductor's own then, with other bits than eager's where a token comes more than once. Under
    autocast aligned ops compute in the dtypes of their tensors: it is off inside, and weights that are fp32 then are
    refused (cast the model, or let FSDP2's mixed precision do so). The output layer and the embedding may be FSDP2
    units of their own. Its output_dtype rounds logits and a loss that are returned, as any model's, but no
    log-probabilities (Score says where they are then). A patched model refuses deepcopy and pickle (undo first).

    grad        first derivatives in reverse mode; more is refused (see the ops)
    raises      UnsupportedModule (a ValueError) naming every module that is not covered, and why: the model is then
                as it was; TypeError where it is no transformers model, or on kv_segment; ValueError where it is no
                decoder, where a part of it has been patched on its own, where it is patched already with other options,
                or on kv_segment or longrope. The forward: TypeError naming an argument that it does not know, whatever
                it would be to the stock one; RuntimeError where a cache that it was called with does not reach a layer
    example
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, **sizes))
    >>> with vx.patch.hf(model) as handle:
    ...     logprobs = handle.logprobs(torch.tensor([[3, 14, 15, 9]]))
    >>> logprobs.shape
    torch.Size([1, 4])
    """
    from transformers import PreTrainedModel, __version__

    if what := untested(__version__):
        _say_once(what)
    wrapper, model = model, lora.base_of(model)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"patch.hf: model: got {type(model).__name__}, expected a transformers PreTrainedModel{_inside(model)}"
        )
    check_kv_segment(kv_segment, next(model.parameters()).device)
    if not isinstance(latent, bool):
        raise TypeError(f"patch.hf: latent: got {type(latent).__name__}, expected a bool")
    rotary.check_longrope("patch.hf", longrope)
    if longrope is not None and not any(map(rotary.goes_by_length, model.modules())):
        raise ValueError(
            f"patch.hf: longrope: got {longrope!r}, expected None: the {type(model).__name__} has no such rotation"
        )
    options = {"kv_segment": kv_segment, "latent": latent, "longrope": longrope}
    with LOCK:
        patch = model.__dict__.get("_vexact")
        ulysses = None if sequence_parallel is None else Ulysses.of(sequence_parallel)
        if patch is None:
            patch = Patch(model, options, strict, training, whole_gradients)
            patch.wrapper = wrapper
            patch.build()
            if ulysses is not None and patch.classifies:
                patch.revert()
                raise ValueError(
                    f"patch.hf: sequence_parallel: got ranks for a {type(model).__name__}, which scores a sequence's "
                    "last token: expected a causal language model, or None"
                )
            if ulysses is not None and patch.vision is not None:
                patch.revert()
                raise ValueError(
                    f"patch.hf: sequence_parallel: got ranks for a {type(model).__name__}, whose rows may have images: "
                    "expected a text model, or None"
                )
            patch.ulysses = ulysses
        elif patch.model is not model:
            raise ValueError(
                f"patch.hf: model: got a part of a {type(patch.model).__name__} that is patched as a whole: patch that"
            )
        elif patch.ulysses != ulysses:
            raise ValueError("patch.hf: sequence_parallel: got another group than the model is patched with")
        elif patch.whole_gradients != whole_gradients:
            raise ValueError("patch.hf: whole_gradients: got another choice than the model is patched with")
        elif patch.options != options:
            raise ValueError(f"patch.hf: options: got {options}, but the model is patched with {patch.options}")
        else:
            patch.check()
            if training and not patch.trains:
                patch.train()
            if strict:
                plan.refuse_problems(patch)
        patch.handles += 1
        return Handle(patch)


def _inside(model: object) -> str:
    """Where a model is in what wraps it, in words."""
    from transformers import PreTrainedModel

    if not isinstance(model, nn.Module):
        return ""
    if isinstance(model._modules.get("_orig_mod"), nn.Module):
        return (
            ": a compiled model is patched first and compiled then: patch its _orig_mod, and call torch.compile again"
        )
    path = next((path for path, module in model.named_modules() if isinstance(module, PreTrainedModel)), "")
    return f": patch the one inside, its {path}" if path else ""


def check_kv_segment(kv_segment: int | None, device: torch.device | str) -> None:
    """What patch.hf would refuse, before there is a model: attention's blocks of keys on the device decide.

    raises      TypeError or ValueError on kv_segment; BackendUnavailable
    """
    if kv_segment is None:
        return
    device = torch.device(device)
    if device.type == "meta" and torch.cuda.is_available():  # of weights to come: whatever a GPU here will take
        device = torch.device("cuda")
    backend = ATTENTION.resolve(device if device.type == "cuda" else torch.device("cpu"), None)
    check_segment("patch.hf", kv_segment, KEY_BLOCK[backend])

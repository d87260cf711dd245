"""What a patched decoder computes, as data: what patching found, for whoever runs the same operations in another way.

    Decoder
      embedding   Embedding             rows of a table, times a number
      rotary      Rotary...             the tables of angles that layers use
      layers      Layer...              blocks, of which the first remembers what came before
        Block                           x + factor * after(part(before(x))): a residual sum around
          part    Attention             projections, norms of heads, rotation, attention, output projection
                  Latent                the same from compressed keys and values, expanded or absorbed
                  GatedDelta            a short convolution and the gated delta rule, gated norm, output projection
                  Mlp                   gate, up, activation, down
                  Mixture               Router, Experts, and shared experts (an Mlp) whose output is added
      norm        Norm                  of the last sum
      head        Head                  the output layer

Each part says what it remembers of a sequence (`part.memory`): Pages, which grow with it, a State, which does not, or
None. What an engine keeps is made from that alone.

Weights are names, as the model's named_parameters() and named_buffers() have them (of tied ones the first): so a
description can be printed, compared and sent, holds of a model on the meta device, and stays true when weights are
replaced. Where a projection is a part of a larger one, `rows` says which rows of the weight it is.
"""

import dataclasses
import math
from dataclasses import dataclass

import torch

from ..gated_delta.op import CHUNK


class NotDescribed(ValueError):
    """A patched model computes something that a description has no words for; the message says where and what."""


@dataclass(frozen=True)
class Adapter:
    """LoRA's: scale * (x @ down.T) @ up.T, rounded at each product, at the scale and at the sum with what is there."""

    down: str
    up: str
    scale: float


@dataclass(frozen=True)
class Linear:
    """x @ weight.T + bias, of these rows of the weight and bias (all: None); weights are (features, of) as used.

    adapters  added one after another, of the same rows; their sums are in the wider of the two dtypes, rounded once
    """

    weight: str
    bias: str | None
    features: int
    inputs: int
    rows: tuple[int, int] | None = None
    adapters: tuple[Adapter, ...] = ()

    def part(self, first: int, end: int) -> "Linear":
        """Of a whole one, these rows."""
        return dataclasses.replace(self, features=end - first, rows=(first, end))


@dataclass(frozen=True)
class Norm:
    """A norm over `size` elements: of a token's whole row, or of each head where that is a head's.

    style  of rmsnorm, "gated" (rmsnorm_gated), or "layer": layer_norm, which alone has a bias, or no weight
    """

    weight: str | None
    eps: float
    style: str
    size: int
    bias: str | None = None


@dataclass(frozen=True)
class Factor:
    """A number that values are multiplied by: as such, or a buffer of one element, cast to dtype first."""

    value: float | None = None
    buffer: str | None = None
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Rotary:
    """Tables of cosines and sines (rope_cos_sin) of positions and fp32 frequencies, in this dtype.

    axes  on which axis each frequency reads a token's position; None: there is one
    """

    inv_freq: str
    scaling: float
    dtype: torch.dtype
    axes: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Rope:
    """The rotation of the first `dim` elements of a head (of the rotary part of a latent one).

    tables       index into Decoder.rotary
    interleaved  pairs are neighbours
    apart        pairs that are neighbours are put half a head apart first, and stay so
    """

    tables: int
    dim: int
    interleaved: bool = False
    apart: bool = False


@dataclass(frozen=True)
class Kept:
    """A tensor of a state, or a row of one; dtype None: the model's. ring: the last rows, that of position p in row
    p % length, a power of two."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    ring: bool = False

    def bytes(self, dtype: torch.dtype) -> int:
        return math.prod(self.shape) * (self.dtype or dtype).itemsize


@dataclass(frozen=True)
class State:
    """What does not grow with a sequence: it has a slot. Written at the end of each chunk of so many tokens.

    tensors    what is kept over a chunk's end
    open_rows  rows of the tokens of the chunk that is open
    """

    tensors: tuple[Kept, ...]
    chunk: int
    open_rows: tuple[Kept, ...]

    window = None

    def slot(self) -> tuple[Kept, ...]:
        """All that a slot holds: the tensors, then for each of the open rows a tensor of a chunk of them."""
        rows = (dataclasses.replace(row, shape=(self.chunk, *row.shape)) for row in self.open_rows)
        return (*self.tensors, *rows)

    def forgetting(self, rows: int) -> "State":
        """The same with longer rings: so many rows that were appended too many are forgotten."""

        def longer(kept: Kept) -> Kept:
            ring, *rest = kept.shape
            return dataclasses.replace(kept, shape=(1 << (ring + rows - 1).bit_length(), *rest)) if kept.ring else kept

        return dataclasses.replace(self, tensors=tuple(map(longer, self.tensors)))

    def bytes_per_slot(self, dtype: torch.dtype) -> int:
        """Of a model of this dtype."""
        return sum(kept.bytes(dtype) for kept in self.slot())

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        return 0


@dataclass(frozen=True)
class Pages:
    """Keys and values of each token, in pages.

    shared  values are the first part of the keys
    dtype   None: the model's
    window  no query sees a key that lies so many places before it or more; None: any may be seen
    """

    heads: int
    k_dim: int
    v_dim: int
    shared: bool = False
    dtype: torch.dtype | None = None
    window: int | None = None

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Of a model of this dtype."""
        return self.heads * (self.k_dim + (0 if self.shared else self.v_dim)) * (self.dtype or dtype).itemsize


@dataclass(frozen=True)
class Attention:
    """q, k and v of the block's input; norms of q and k before the rotation or after it; what attention is asked for;
    a norm and a projection of what comes out. Values may be multiplied by a number before they are stored.

    gated  q's rows are of each head its query and then a gate: what comes out is multiplied by the gate's sigmoid
           (sigmoid_mul)
    """

    q: Linear
    k: Linear
    v: Linear
    o: Linear
    heads: int
    kv_heads: int
    dim: int
    v_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: str | None
    rope: Rope | None
    q_norm: Norm | None
    k_norm: Norm | None
    norms_after_rope: bool
    v_factor: Factor | None
    out_norm: Norm | None
    gated: bool = False

    @property
    def memory(self) -> Pages:
        return Pages(self.kv_heads, self.dim, self.v_dim, window=self.window)


@dataclass(frozen=True)
class Latent:
    """Attention of compressed keys and values: kv_a makes `rank` compressed numbers and `rope.dim` that are rotated and
    that all heads share; kv_b makes each head's `nope` of a key and `v_dim` of a value of the normalised compressed
    ones. q is of the block's input, or of q_a's normalised output.

    absorbed  queries are multiplied by kv_b's part of the keys, and what comes out by its part of the values, so that
              the cache holds the compressed numbers; otherwise it holds every head's keys and values
    """

    q: Linear
    q_a: Linear | None
    q_a_norm: Norm | None
    kv_a: Linear
    kv_norm: Norm
    kv_b: Linear
    o: Linear
    heads: int
    rank: int
    nope: int
    v_dim: int
    scale: float
    window: int | None
    softcap: float | None
    sinks: str | None
    rope: Rope
    absorbed: bool

    @property
    def memory(self) -> Pages:
        if self.absorbed:
            return Pages(1, self.rank + self.rope.dim, self.rank, True, window=self.window)
        return Pages(self.heads, self.nope + self.rope.dim, self.v_dim, window=self.window)


def delta_state(key_heads: int, value_heads: int, k_dim: int, v_dim: int, taps: int) -> State:
    """What a gated delta net keeps (gated_delta_paged, causal_conv_paged)."""
    channels, ring = 2 * key_heads * k_dim + value_heads * v_dim, 1 << (taps - 1).bit_length()
    fp32 = torch.float32
    return State(
        (Kept("state", (value_heads, k_dim, v_dim), fp32), Kept("taps", (ring, channels), ring=True)),
        CHUNK,
        (Kept("k", (key_heads, k_dim)), Kept("u", (value_heads, v_dim), fp32), Kept("g", (value_heads,), fp32)),
    )


@dataclass(frozen=True)
class GatedDelta:
    """qkv, mixed by a convolution of each channel (causal_conv with silu); g and beta of a and b (delta_gates);
    gated_delta_varlen with the l2 norm; a norm that z gates (rmsnorm_gated), and o.

    qkv      one projection, or those of q, k and v
    doubled  beta is twice what delta_gates gives
    z, a     None: their columns and those of qkv and b go key head by key head, (q, k, v, z) and (b, a)
    conv     a name, (channels, 1, taps)
    """

    qkv: tuple[Linear, ...]
    z: Linear | None
    b: Linear
    a: Linear | None
    o: Linear
    conv: str
    conv_bias: str | None
    taps: int
    a_log: str
    dt_bias: str
    norm: Norm
    key_heads: int
    value_heads: int
    k_dim: int
    v_dim: int
    doubled: bool = False

    @property
    def memory(self) -> State:
        return delta_state(self.key_heads, self.value_heads, self.k_dim, self.v_dim, self.taps)


@dataclass(frozen=True)
class Mlp:
    """down(norm(activation(gate(x)) * up(x))), or down(norm(activation(up(x)))) without a gate. Activations: "silu" and
    "gelu_tanh" as silu_mul computes them, "relu": max(x, 0), "relu2": its square, rounded before the product, as
    gelu's is of "gelu"; without a gate "silu", and "gelu_tanh" of gelu too."""

    gate: Linear | None
    up: Linear
    down: Linear
    activation: str
    norm: Norm | None = None

    memory = None


@dataclass(frozen=True)
class Router:
    """linear, then moe_route with these options.

    wide     logits are the fp32 accumulators; otherwise rounded to the dtype of x
    cast     x and the weight are cast to fp32 first
    bias     a name, cast to fp32
    rounded  the weights are rounded to this dtype on their way to the experts
    """

    linear: Linear
    top_k: int
    score: str
    normalize: bool
    groups: int | None
    top_k_groups: int | None
    bias: str | None
    scale: float
    wide: bool
    cast: bool
    rounded: torch.dtype | None


@dataclass(frozen=True)
class Experts:
    """fused_moe. turned: the matrices stand in the model the other way round, (E, H, 2I) and (E, I, H)."""

    gate_up: str
    down: str
    activation: str
    gate_up_bias: str | None = None
    down_bias: str | None = None
    turned: bool = False


@dataclass(frozen=True)
class Mixture:
    """gate: the shared experts' output is multiplied by the sigmoid of this, one number a token (sigmoid_mul)."""

    router: Router
    experts: Experts
    shared: Mlp | None
    gate: Linear | None = None

    memory = None


@dataclass(frozen=True)
class Block:
    """x + factor * after(part(before(x)))."""

    part: Attention | Latent | GatedDelta | Mlp | Mixture
    before: Norm | None
    after: Norm | None
    factor: Factor | None


@dataclass(frozen=True)
class Layer:
    """blocks: the first remembers, the others look at one token at a time."""

    blocks: tuple[Block, ...]

    @property
    def memory(self) -> Pages | State:
        return self.blocks[0].part.memory


@dataclass(frozen=True)
class Embedding:
    weight: str
    factor: Factor | None


@dataclass(frozen=True)
class Head:
    """fp32 logits: linear_logits(hidden / scale, weight, softcap). A bias is a column of the weight behind all others,
    and of hidden / scale a 1."""

    weight: str
    scale: float
    softcap: float | None
    bias: str | None = None


@dataclass(frozen=True)
class Images:
    """Of a model with an image encoder, which runs by its own Python (handle.encode): an image's rows go where `token`
    stands, one for each merge x merge of its patches of `width` numbers. The decoder then has positions on three axes
    (Rotary.axes), and after each of its first `deepstack` layers further rows are added to those tokens.

    video        the token of videos' rows; None: they are not covered
    frames_apart each frame of a video has tokens of its own, like an image's, with text between them
    per_second   otherwise, how far positions of frames lie apart that are a second apart
    begin, end   tokens that models mark an image or a frame with, where their config names any
    """

    token: int
    merge: int
    width: int
    deepstack: int
    video: int | None = None
    frames_apart: bool = False
    per_second: float = 1.0
    begin: int | None = None
    end: int | None = None


@dataclass(frozen=True)
class Decoder:
    """images, tower: of a model with an image encoder, and what its parameters and buffers are called."""

    embedding: Embedding
    rotary: tuple[Rotary, ...]
    layers: tuple[Layer, ...]
    norm: Norm
    head: Head | None
    kv_segment: int | None = None
    images: Images | None = None
    tower: tuple[str, ...] = ()

    def names(self, layers: range | None = None) -> set[str]:
        """Parameters and buffers that a stage of these layers reads: with the first layer the embedding, with the last
        one the final norm and the head, and the frequencies of the rotation always."""
        layers = range(len(self.layers)) if layers is None else layers
        parts: list = [self.rotary, *(self.layers[i] for i in layers)]
        parts += [self.embedding] if 0 in layers else []
        parts += [self.norm, self.head] if len(self.layers) - 1 in layers else []
        return set(names_of(parts))

    def tower_names(self, layers: range) -> set[str]:
        """Parameters and buffers of the image encoder, for a stage of these layers: of one that embeds tokens, or adds
        rows of images behind a layer; none for others."""
        if self.images is None or layers.start >= max(1, self.images.deepstack):
            return set()
        return set(self.tower)


# Fields that name a parameter or buffer.
NAMES = (
    "weight", "bias", "buffer", "inv_freq", "sinks", "gate_up", "down", "up", "gate_up_bias", "down_bias",
    "conv", "conv_bias", "a_log", "dt_bias",
)  # fmt: skip


def names_of(part):
    """Of parameters and buffers in a part of a description, or in several."""
    if dataclasses.is_dataclass(part):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if isinstance(value, str) and field.name in NAMES:
                yield value
            else:
                yield from names_of(value)
    elif isinstance(part, (tuple, list)):
        for item in part:
            yield from names_of(item)

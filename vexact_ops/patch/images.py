"""What a call's images become: the tower's rows among the embeddings of tokens, and positions on three axes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .description import Images
from .grids import Clip, Grid, Waiting, axes_of, grids_of, patches, real, tokens

ARGUMENTS = ("pixel_values", "image_grid_thw", "mm_token_type_ids", "vexact_images", "mm_encoder_outputs")
MASKS = ("image_mask", "video_mask", "multimodal_metadata")  # that VeOmni's collators make of the same ids and grids
VIDEOS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts")


class Encoded(NamedTuple):
    """What a tower has made of images: a row for each of their tokens, and the rows that are added to what the first
    layers return. where: (B, S) bool, the tokens that they are for; None: all image tokens of the batch."""

    rows: Tensor
    deepstack: tuple[Tensor, ...] = ()
    where: Tensor | None = None


@dataclass(frozen=True)
class Vision:
    """What is known of a model with a tower.

    token      id that stands where an image's rows go
    merge      patches in a row and in a column of a block, which is a token
    deepstack  how many layers are followed by rows that are added
    width      numbers of a patch
    video, frames_apart, per_second, begin, end   see description.Images
    """

    tower: str
    decoder: str
    token: int
    merge: int
    deepstack: int
    width: int
    output: type
    video: int | None = None
    frames_apart: bool = False
    per_second: float = 1.0
    begin: int | None = None
    end: int | None = None

    def described(self) -> Images:
        videos = self.video, self.frames_apart, self.per_second, self.begin, self.end
        return Images(self.token, self.merge, self.width, self.deepstack, *videos)


def clips_of(images: Images | Vision, op: str, grids: Sequence[Grid], seconds: Tensor | Sequence | None) -> list[Clip]:
    """What tokens of videos stand for, one after another. seconds: from frame to frame, of each."""
    if images.frames_apart:
        if seconds is not None:
            raise ValueError(f"{op}: second_per_grid_ts: got some, expected none: frames of its videos stand apart")
        return [Clip((1, h, w)) for t, h, w in grids for _ in range(t)]
    seconds = [1.0] * len(grids) if seconds is None else [float(second) for second in seconds]
    if len(seconds) != len(grids):
        raise ValueError(f"{op}: second_per_grid_ts: got {len(seconds)}, expected one for each of {len(grids)} videos")
    if not all(map(math.isfinite, seconds)):
        raise ValueError(f"{op}: second_per_grid_ts: got {seconds}, expected finite seconds")
    return [
        Clip(grid, float(torch.tensor(s, dtype=torch.float32) * images.per_second)) for grid, s in zip(grids, seconds)
    ]


def compute(
    vision: Vision, model: nn.Module, ids: Tensor | None, embeds: Tensor, images: Encoded | None, places: Tensor | None,
    given: dict,
):  # fmt: skip
    """The decoder over the embeddings of tokens and images."""
    more = {}
    if images is not None:
        where = ids == vision.token if images.where is None else images.where
        embeds = embeds.masked_scatter(where[..., None], images.rows.to(embeds.dtype))
        if images.deepstack:
            more = {"visual_pos_masks": where, "deepstack_visual_embeds": list(images.deepstack)}
    out = model._modules[vision.decoder](input_ids=None, inputs_embeds=embeds, position_ids=places, **more, **given)
    return vision.output(**{name: value for name, value in out.items() if name in vision.output.__dataclass_fields__})


def check_pixels(op: str, pixel_values: Tensor, width: int, name: str = "pixel_values") -> None:
    if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
        got = (
            f"dtype {pixel_values.dtype}".replace("torch.", "")
            if isinstance(pixel_values, Tensor)
            else f"a {type(pixel_values).__name__}"
        )
        raise TypeError(f"{op}: {name}: got {got}, expected a floating-point tensor")
    if pixel_values.dim() != 2 or pixel_values.shape[1] != width:
        raise ValueError(
            f"{op}: {name}: got shape {tuple(pixel_values.shape)}, expected (patches, {width}), as the model's "
            "processor makes them"
        )


def encode(vision: Vision, model: nn.Module, pixel_values: Tensor, grids: tuple[Grid, ...]) -> Encoded:
    """The tower's rows of some images, one after another."""
    tower = model._modules[vision.tower]
    out = tower(pixel_values.to(tower.dtype), grid_thw=grids, return_dict=True)
    return Encoded(out.pooler_output, tuple(getattr(out, "deepstack_features", None) or ()))


class _Touched(torch.autograd.Function):
    """The first as it is; the others get gradients of 0."""

    @staticmethod
    def forward(ctx, x, *others):
        ctx.shapes = [other.shape for other in others]
        return x.view_as(x)

    @staticmethod
    def backward(ctx, dy):
        return dy, *(dy.new_zeros(shape) for shape in ctx.shapes)


def of_nothing(vision: Vision, model: nn.Module, device: torch.device) -> tuple[Tensor, ...]:
    """What the tower makes of an image of nothing: where ranks share its weights all of them have to call it, at the
    same place, and a batch of one may have no image."""
    side = 2 * vision.merge
    nothing = torch.zeros(side * side, vision.width, dtype=torch.float32, device=device)
    made = encode(vision, model, nothing, ((1, side, side),))
    return made.rows, *made.deepstack


def touched(x: Tensor, rows: tuple[Tensor, ...]) -> Tensor:
    """The same numbers; a backward pass goes through the rows too."""
    return _Touched.apply(x, *rows) if rows else x


def images_of(
    vision: Vision, model: nn.Module, ids: Tensor | None, given: dict, continued: bool
) -> tuple[Encoded | None, dict[int, Waiting]]:
    """What comes of a call's images and videos, and of each what its tokens stand for; ValueError where they and the
    tokens do not belong together.

    continued  there is a cache: generation hands on the grids of images that are in it
    """
    for kind, token in (("image", vision.token), ("video", vision.video)):
        mask = given.get(f"{kind}_mask")
        if mask is None or ids is None or isinstance(ids, FakeTensor):
            continue
        if not torch.equal(mask.to(ids.device, torch.bool), ids == (-1 if token is None else token)):
            raise ValueError(f"{kind}_mask: got another one than input_ids have {kind} tokens (id {token})")
    if given.get("mm_encoder_outputs") is not None:
        raise ValueError("mm_encoder_outputs: got some, expected none: images are encoded here")
    if (ready := given.get("vexact_images")) is not None:
        if ready.where is None:
            _check_count(vision.token, "image", ids, len(ready.rows))
        return ready, {}
    image = _taken(vision, model, ids, given, "image", "pixel_values", continued)
    video = _taken(vision, model, ids, given, "video", "pixel_values_videos", continued)
    if image is None and video is None:
        return None, {}
    waiting, both = {}, [pair for pair in (image, video) if pair is not None]
    if image is not None:
        waiting[vision.token] = Waiting("image", [Clip(grid) for grid in image[1]])
    if video is not None:
        clips = clips_of(vision, type(model).__name__, video[1], given.get("second_per_grid_ts"))
        waiting[vision.video] = Waiting("video", clips)
    # At once: ranks that share the tower's weights call it equally often, whatever each of them has.
    # Trainers that wrap no model (VeOmni's on one rank) bring tokens to the GPU and leave patches on the host.
    patched = torch.cat([pixels.to(ids.device) for pixels, _ in both])
    made = encode(vision, model, patched, sum((grids for _, grids in both), ()))
    if video is None:
        return made, waiting
    where = ids == vision.video
    if image is None:
        return made._replace(where=where), waiting
    any_of = where | (ids == vision.token)
    of_video, count = where[any_of], sum(tokens(grid, vision.merge) for grid in image[1])
    order = torch.where(of_video, count - 1 + of_video.cumsum(0), (~of_video).cumsum(0) - 1)
    rows, *stacks = (part.index_select(0, order) for part in (made.rows, *made.deepstack))
    return Encoded(rows, tuple(stacks), any_of), waiting


def _taken(
    vision: Vision, model: nn.Module, ids: Tensor | None, given: dict, kind: str, pixels_name: str, continued: bool
) -> tuple[Tensor, tuple[Grid, ...]] | None:
    """Patches and grids of images, or of videos; None: there are none."""
    pixels, grid_thw, token = given.get(pixels_name), given.get(f"{kind}_grid_thw"), vision.token
    if kind == "video" and (pixels is not None or grid_thw is not None):
        if vision.video is None:
            raise ValueError(f"{pixels_name}: got one, expected none: videos of this model are not covered, images are")
        token = vision.video
    if pixels is None:
        if grid_thw is not None and not continued:
            raise ValueError(f"{pixels_name}: got None with {kind}_grid_thw, expected the patches of those {kind}s")
        return None
    if ids is None:
        raise ValueError(f"input_ids: got None with {kind}s, expected the tokens, which say where they go")
    if grid_thw is None:
        raise ValueError(f"{kind}_grid_thw: got None with {pixels_name}, expected ({kind}s, 3)")
    grids = grids_of(type(model).__name__, grid_thw, vision.merge, kind)
    check_pixels(type(model).__name__, pixels, vision.width, pixels_name)
    expected = sum(map(patches, grids))
    if len(pixels) != expected:
        raise ValueError(
            f"{pixels_name}: got shape {tuple(pixels.shape)}, expected the {expected} patches of {kind}_grid_thw"
        )
    _check_count(token, kind, ids, sum(tokens(grid, vision.merge) for grid in grids))
    return pixels, grids


def _check_count(token: int, kind: str, ids: Tensor | None, rows: int) -> None:
    if ids is None:
        raise ValueError(f"input_ids: got None with {kind}s, expected the tokens, which say where they go")
    there = (ids == token).sum()
    if not isinstance(there, FakeTensor) and int(there) != rows:
        raise ValueError(
            f"{'pixel_values' if kind == 'image' else 'pixel_values_videos'}: got {kind}s of {rows} tokens for "
            f"{int(there)} {kind} tokens (id {token}) among input_ids, expected as many"
        )


@real
def _axes(vision: Vision, ids: list[list[int]], waiting: dict[int, Waiting], op: str) -> list[Tensor]:
    found = [axes_of(sequence, waiting, vision.merge, op) for sequence in ids]
    for kind, left in waiting.values():
        if left:
            raise ValueError(f"{op}: {kind}_grid_thw: got {len(left)} grids more than input_ids have {kind}s")
    return found


def axes_of_batch(
    vision: Vision, ids: Tensor, spans: list[tuple[int, int]], waiting: dict[int, Waiting], op: str
) -> Tensor:
    """(3, B, S) positions of a batch whose sequences are these spans of its flattened tokens; 0 at padding."""
    flat = ids.flatten().tolist()
    found = _axes(vision, [flat[begin:end] for begin, end in spans], waiting, op)
    places = torch.zeros(3, ids.numel(), dtype=torch.int64)
    for (begin, end), axes in zip(spans, found):
        places[:, begin:end] = axes
    return places.view(3, *ids.shape).to(ids.device)

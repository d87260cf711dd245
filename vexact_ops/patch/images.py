"""What a call's images become: the tower's rows among the embeddings of tokens, and positions on three axes."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from .description import Images
from .grids import Grid, axes_of, grids_of, real

ARGUMENTS = ("pixel_values", "image_grid_thw", "mm_token_type_ids", "vexact_images")
VIDEOS = ("pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "mm_encoder_outputs")


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
    """

    tower: str
    decoder: str
    token: int
    merge: int
    deepstack: int
    width: int
    output: type

    def described(self) -> Images:
        return Images(self.token, self.merge, self.width, self.deepstack)


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


def check_pixels(op: str, pixel_values: Tensor, width: int) -> None:
    if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
        got = (
            f"dtype {pixel_values.dtype}".replace("torch.", "")
            if isinstance(pixel_values, Tensor)
            else f"a {type(pixel_values).__name__}"
        )
        raise TypeError(f"{op}: pixel_values: got {got}, expected a floating-point tensor")
    if pixel_values.dim() != 2 or pixel_values.shape[1] != width:
        raise ValueError(
            f"{op}: pixel_values: got shape {tuple(pixel_values.shape)}, expected (patches, {width}), as the model's "
            "processor makes them"
        )


def encode(vision: Vision, model: nn.Module, pixel_values: Tensor, grids: tuple[Grid, ...]) -> Encoded:
    """The tower's rows of some images, one after another."""
    tower = model._modules[vision.tower]
    out = tower(pixel_values.to(tower.dtype), grid_thw=grids, return_dict=True)
    return Encoded(out.pooler_output, tuple(getattr(out, "deepstack_features", None) or ()))


def images_of(
    vision: Vision, model: nn.Module, ids: Tensor | None, given: dict, continued: bool
) -> tuple[Encoded | None, tuple[Grid, ...]]:
    """What comes of a call's images, and their grids; ValueError where they and the tokens do not belong together.

    continued  there is a cache: generation hands on the grids of images that are in it
    """
    for name in VIDEOS:
        if given.get(name) is not None:
            raise ValueError(f"{name}: got one, expected none: videos are not covered, images are")
    pixels, grid_thw, encoded = (given.get(name) for name in ("pixel_values", "image_grid_thw", "vexact_images"))
    if pixels is None and encoded is None:
        if grid_thw is not None and not continued:
            raise ValueError("pixel_values: got None with image_grid_thw, expected the patches of those images")
        return None, ()
    if ids is None:
        raise ValueError("input_ids: got None with images, expected the tokens, which say where they go")
    grids = ()
    if encoded is None:
        if grid_thw is None:
            raise ValueError("image_grid_thw: got None with pixel_values, expected (images, 3)")
        grids = grids_of(type(model).__name__, grid_thw, vision.merge)
        check_pixels(type(model).__name__, pixels, vision.width)
        encoded = encode(vision, model, pixels, grids)
    if encoded.where is not None:  # who says so has counted
        return encoded, grids
    there = (ids == vision.token).sum()
    rows = encoded.rows.shape[0]
    if not isinstance(there, FakeTensor) and int(there) != rows:
        raise ValueError(
            f"pixel_values: got images of {rows} tokens for {int(there)} image tokens (id {vision.token}) among "
            "input_ids, expected as many"
        )
    return encoded, grids


@real
def _axes(vision: Vision, ids: list[list[int]], grids: tuple[Grid, ...], op: str) -> list[Tensor]:
    found, left = [], list(grids)
    for sequence in ids:
        places, left = axes_of(sequence, vision.token, left, vision.merge, op)
        found.append(places)
    if left:
        raise ValueError(f"{op}: image_grid_thw: got {len(left)} grids more than input_ids have images")
    return found


def axes_of_batch(
    vision: Vision, ids: Tensor, spans: list[tuple[int, int]], grids: tuple[Grid, ...], op: str
) -> Tensor:
    """(3, B, S) positions of a batch whose sequences are these spans of its flattened tokens; 0 at padding."""
    flat = ids.flatten().tolist()
    found = _axes(vision, [flat[begin:end] for begin, end in spans], grids, op)
    places = torch.zeros(3, ids.numel(), dtype=torch.int64)
    for (begin, end), axes in zip(spans, found):
        places[:, begin:end] = axes
    return places.view(3, *ids.shape).to(ids.device)

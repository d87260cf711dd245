"""Tiny random models of images, and rows of tokens that have some."""

import torch
from transformers import AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

IMAGE, WIDTH = 60, 3 * 2 * 4 * 4  # the token of images, numbers of a patch
TEXT = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
}
TOWER = {"depth": 3, "num_heads": 2, "intermediate_size": 40, "patch_size": 4, "out_hidden_size": 32}
TABLED = {**TOWER, "hidden_size": 144, "num_position_embeddings": 25}  # heads of 72
STACKED = {**TABLED, "deepstack_visual_indexes": [0, 2]}
FAMILIES = {
    "qwen3_vl": (TEXT, STACKED),
    "qwen3_vl_moe": ({**TEXT, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24}, STACKED),
    "qwen2_5_vl": (
        {**TEXT, "num_attention_heads": 2, "head_dim": None},
        {**TOWER, "hidden_size": 160, "window_size": 16, "fullatt_block_indexes": [1]},  # heads of 80
    ),
    "qwen3_5": (
        {
            **TEXT,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 24,
            "rope_parameters": {**TEXT["rope_parameters"], "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
        },
        TABLED,
    ),
}


def config_of(name: str, vocabulary: int = 64):
    """The last four tokens are those of images, videos, and the marks around them."""
    text, tower = FAMILIES[name]
    text = {key: value for key, value in text.items() if value is not None} | {"vocab_size": vocabulary}
    names = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"
    ids = {name: vocabulary - 4 + i for i, name in enumerate(names)}
    config = CONFIG_MAPPING[name](text_config=text, vision_config=tower, tie_word_embeddings=False, **ids)
    config._attn_implementation = "eager"
    return config


def tiny(name: str, dtype: torch.dtype = torch.bfloat16, vocabulary: int = 64):
    """With weights that tell every part: biases and tables are not 0."""
    model = AutoModelForImageTextToText.from_config(config_of(name, vocabulary)).eval()
    g = torch.Generator().manual_seed(1)
    for path, p in model.named_parameters():
        if p.dim() > 1:
            p.data.copy_(torch.randn(p.shape, generator=g) / p[0].numel() ** 0.5)
        elif "norm" not in path and "ln_q" not in path and "A_log" not in path:
            p.data.copy_(torch.randn(p.shape, generator=g) / 4)
        p.data = p.data.to(dtype)
    return model


def row(*parts: int | tuple[int, int, int], seed: int = 0) -> tuple[list[int], list[tuple[int, int, int]]]:
    """Token ids of so many tokens of text, or of an image of a grid between its marks."""
    g, ids, grids = torch.Generator().manual_seed(seed), [], []
    for part in parts:
        if isinstance(part, int):
            ids += torch.randint(1, 60, (part,), generator=g).tolist()
        else:
            ids += [62, *[IMAGE] * (part[0] * part[1] * part[2] // 4), 63]
            grids.append(part)
    return ids, grids


def pixels(grids, seed: int = 0) -> torch.Tensor:
    count = sum(t * h * w for t, h, w in grids)
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


# A row of text, of one image, of two, and of an image at once.
ROWS = [
    row(3, (1, 4, 6), 4, seed=1),
    row(7, seed=2),
    row((1, 2, 2), 2, (1, 6, 4), 1, seed=3),
    row((1, 4, 4), 2, seed=4),
]
PIXELS = [pixels(grids, seed) if grids else None for seed, (_, grids) in enumerate(ROWS)]


def video(name: str, grid: tuple[int, int, int], seed: int = 0) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Tokens of a video between its marks (frame by frame with text between, as the family has them), and what a
    forward takes of it."""
    frames, frame = grid[0], [IMAGE + 1] * (grid[1] * grid[2] // 4)
    given = {"pixel_values_videos": pixels([grid], 90 + seed), "video_grid_thw": torch.tensor([grid])}
    if name == "qwen2_5_vl":
        return [62, *frame * frames, 63], {**given, "second_per_grid_ts": torch.tensor([1.5 / (1 + seed)])}
    return [token for i in range(frames) for token in (10 + i, 62, *frame, 63)], given

"""Pictures and films of shapes to be counted, a model that takes them, and how verl reads both.

Where torchvision and qwen-vl-utils are, as .ci/trainers has them, everything is verl's and transformers' own, but that
a run may take its data from vexact_engine.verl.data. Where they are not, every run does, and the model's folder brings
a processor whose part for videos is of torch alone, as a folder may (trust_remote_code).
"""

import importlib.util
import io
import json
import random
import sys
from pathlib import Path

import torch

from .models import QWEN_TEMPLATE, tokenizer

VOCABULARY = 288
TOKENS = ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]  # the last of the vocabulary
WITH_TORCHVISION = all(importlib.util.find_spec(name) for name in ("torchvision", "qwen_vl_utils"))
# For a GPU: layers of true dimensions and the whole tower, with few layers of text and a smaller vocabulary.
TRUE = ("qwen3-vl-2b", "qwen3-vl-8b", "qwen3-vl-30b-a3b")  # benchmarks/images.py has their sizes
TRUE_LAYERS, TRUE_VOCABULARY, TRUE_UNIT = 3, 32768, 64  # as many have rows of the tower added
CLASSES = {"qwen2_5_vl": "Qwen2_5_VLProcessor"}  # of others Qwen3VLProcessor
PROCESSOR = '''"""A family's processor, whose part for videos cuts frames into patches without resizing them."""

import torch
from transformers import CLASS as Whole
from transformers.feature_extraction_utils import BatchFeature
from transformers.video_utils import VideoMetadata


class Videos:
    patch_size, merge_size, temporal_patch_size = PATCH, 2, 2

    def __call__(self, videos, video_metadata, do_sample_frames, return_tensors=None, **kwargs):
        assert not do_sample_frames and len(videos) == len(video_metadata)
        made = [self.cut(torch.as_tensor(frames).float() / 255) for frames in videos]
        about = [VideoMetadata(**given) for given in video_metadata]
        found = {"pixel_values_videos": torch.cat([patches for patches, _ in made])}
        found["video_grid_thw"] = torch.tensor([grid for _, grid in made])
        return BatchFeature({**found, "video_metadata": about})

    def cut(self, x):
        x = torch.cat((x, x[-1:].expand(len(x) % 2, -1, -1, -1)))
        t, h, w = len(x) // 2, x.shape[2] // PATCH, x.shape[3] // PATCH
        cut = x.reshape(t, 2, 3, h // 2, 2, PATCH, w // 2, 2, PATCH).permute(0, 3, 6, 4, 7, 2, 1, 5, 8)
        return cut.reshape(t * h * w, -1), (t, h, w)


class CLASS(Whole):
    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)
        self.video_processor = Videos()
'''
TEMPLATE = QWEN_TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    "<|vision_start|><|{{ part['type'] }}_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}",
)


def _tiny(name: str):
    sys.path.append(str(Path(__file__).parents[1] / "patch"))
    import image_models

    return image_models.tiny(name, torch.bfloat16, VOCABULARY)


def _true(name: str, device: str):
    from transformers import AutoModelForImageTextToText

    from benchmarks.images import SIZES

    config = SIZES[name].config(TRUE_LAYERS, None)
    config.text_config.vocab_size, config.text_config.max_position_embeddings = TRUE_VOCABULARY, 2048
    config.tie_word_embeddings = False
    names = "image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"
    config.update({name: TRUE_VOCABULARY - len(names) + i for i, name in enumerate(names)})
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
        for path, p in model.named_parameters():
            width = max(p.shape[1:]) if p.dim() == 3 else p[0].numel()  # of experts in one tensor: either way around
            if p.dim() > 1:
                p.data.copy_(torch.randn(p.shape) / width**0.5)
            elif "norm" not in path:
                p.data.copy_(torch.randn(p.shape) / 4)
    return model


def shown(config) -> tuple[list[int], dict[str, torch.Tensor]]:
    """Tokens of a picture between its marks, and what a forward takes of it."""
    tower, grid = config.vision_config, (1, 8, 12)
    width = tower.in_channels * tower.temporal_patch_size * tower.patch_size**2
    ids = [config.image_token_id] * (8 * 12 // tower.spatial_merge_size**2)
    ids = [config.vision_start_token_id, *ids, config.vision_end_token_id]
    return ids, {"pixel_values": torch.randn(8 * 12, width), "image_grid_thw": torch.tensor([grid])}


def make_model(name: str, folder: Path, device: str = "cpu") -> Path:
    """A random model of images with its tokenizer and processor, as on a hub: tiny, or of TRUE. -> folder"""
    model = _true(name, device) if name in TRUE else _tiny(name)
    vocabulary = model.config.text_config.vocab_size
    words = tokenizer("qwen3", vocabulary - len(TOKENS))
    words.add_special_tokens({"additional_special_tokens": TOKENS})
    words.chat_template = TEMPLATE
    ids = {"pad_token_id": words.pad_token_id, "bos_token_id": None, "eos_token_id": words.eos_token_id}
    for config in (model.config, model.config.text_config, model.generation_config):
        config.update(ids)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    patch = model.config.vision_config.patch_size
    sizes = {"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2}
    sizes |= {"size": {"shortest_edge": 4 * patch**2, "longest_edge": (4096 if name in TRUE else 256) * patch**2}}
    whole = CLASSES.get(name, "Qwen3VLProcessor")
    images = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": whole, **sizes}
    if not WITH_TORCHVISION:
        text = PROCESSOR.replace("CLASS", whole).replace("PATCH", str(patch))
        (folder / "without_torchvision.py").write_text(text)
        images["auto_map"] = {"AutoProcessor": f"without_torchvision.{whole}"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    kind = "Qwen2VLVideoProcessor" if name == "qwen2_5_vl" else "Qwen3VLVideoProcessor"
    videos = {"video_processor_type": kind, "processor_class": whole, **sizes}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


def picture(count: int, seed: int, unit: int = 8) -> bytes:
    """So many squares and circles in a row, each of so many pixels, as a PNG file."""
    import PIL.Image
    import PIL.ImageDraw

    choose, part = random.Random(seed), unit // 8
    side = unit * choose.randint(2, 3)
    image = PIL.Image.new("RGB", (unit * max(count, 2), side), tuple(choose.randrange(256) for _ in range(3)))
    draw = PIL.ImageDraw.Draw(image)
    for i in range(count):
        top, colour = choose.randrange(side - 7 * part), tuple(choose.randrange(256) for _ in range(3))
        shape = draw.rectangle if choose.random() < 0.5 else draw.ellipse
        shape((unit * i + part, top, unit * i + 6 * part, top + 5 * part), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def film(folder: Path, count: int, seed: int, unit: int = 8) -> dict:
    """Of so many frames as files, whose shapes are another number each. -> as verl's data has it"""
    files = [folder / f"{seed}-{i}.png" for i in range(count)]
    for i, file in enumerate(files):
        file.write_bytes(picture(1 + (i + seed) % 2, seed, unit))
    return {"video": [str(file) for file in files], "sample_fps": 1.5 + seed % 3}


KINDS = (1, 0), (2, 0), (0, 0), (1, 1), (0, 2)  # how many pictures and films a prompt has


def make_prompts(folder: Path, count: int, kinds=KINDS, agents=("single_turn_agent",), unit: int = 8) -> Path:
    """Of pictures, of films, and of text alone, as verl reads them; agents: whose they are in turn; unit: pixels of a
    shape. -> the parquet file"""
    import pandas

    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for i in range(count):
        pictures, films = kinds[i % len(kinds)]
        counts = [1 + (i * 7 + j * 3) % 5 for j in range(pictures)]
        asked = "How many shapes? " if pictures + films else f"{i} shapes: how many? "
        videos = [film(folder, 2 + 2 * (i % 2) + j, 100 * i + j, unit) for j in range(films)]
        rows.append(
            {
                "data_source": "shapes",
                "agent_name": agents[i % len(agents)],
                "prompt": [{"role": "user", "content": asked + "<video>" * films + "<image>" * pictures}],
                "images": [{"bytes": picture(shapes, 10 * i + j, unit)} for j, shapes in enumerate(counts)],
                "videos": videos,
                "ability": "counting",
                "reward_model": {"style": "rule", "ground_truth": str(sum(counts) if counts else i)},
                "extra_info": {"index": i},
            }
        )
    pandas.DataFrame(rows).to_parquet(folder / "pictures.parquet")
    return folder / "pictures.parquet"


def with_tools() -> tuple[str, ...]:
    """What a run is told whose answers have turns: the tools of pictures_tools.py, and their images between."""
    turns, tools = "actor_rollout_ref.rollout.multi_turn", Path(__file__).with_name("pictures_tools.py")
    told = {"enable": True, "function_tool_path": tools, "format": "by_letters", "max_assistant_turns": 4}
    return ("data.max_response_length=88", *(f"{turns}.{name}={value}" for name, value in told.items()))


def options(prompts: Path, media: bool) -> tuple[str, ...]:
    """What a run of them is told; media: to take vexact_engine.verl.data's class where it need not."""
    told = [f"data.train_files={prompts}", f"data.val_files={prompts}", "data.image_key=images"]
    own = Path(__file__).with_name("pictures_data.py")
    told += ["data.max_prompt_length=192", f"reward.custom_reward_function.path={own}"]
    if not WITH_TORCHVISION:
        told += ["actor_rollout_ref.model.trust_remote_code=True", "data.trust_remote_code=True"]
    if media or not WITH_TORCHVISION:
        told += ["data.custom_cls.path=pkg://vexact_engine.verl.data", "data.custom_cls.name=Media"]
    return tuple(told)

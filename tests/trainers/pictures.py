"""Pictures of shapes to be counted, a model that takes them, and how verl reads both where torchvision is not there.

transformers' processors of these models want a video processor, which wants torchvision, and qwen-vl-utils imports it;
its wheels do not load beside a torch for CPUs alone. So the model's folder brings a processor of images alone, as a
folder may (trust_remote_code), and the data a class of their own (data.custom_cls), as verl lets users do. Everything
else is what runs for everyone. Where torchvision is there, both are left out.
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
WITH_TORCHVISION = importlib.util.find_spec("torchvision") is not None
PROCESSOR = '''"""Qwen3-VL's processor without its part for videos, which transformers has with torchvision alone."""

from transformers import Qwen3VLProcessor as Whole


class Qwen3VLProcessor(Whole):
    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)
'''
TEMPLATE = QWEN_TEMPLATE.replace(
    "{{ m['content'] }}",
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}",
)


def make_model(name: str, folder: Path) -> Path:
    """A tiny model of images with its tokenizer and processor, as on a hub. -> folder"""
    sys.path.append(str(Path(__file__).parents[1] / "patch"))
    import image_models

    model = image_models.tiny(name, torch.bfloat16, VOCABULARY)
    words = tokenizer("qwen3", VOCABULARY - len(TOKENS))
    words.add_special_tokens({"additional_special_tokens": TOKENS})
    words.chat_template = TEMPLATE
    ids = {"pad_token_id": words.pad_token_id, "bos_token_id": None, "eos_token_id": words.eos_token_id}
    for config in (model.config, model.config.text_config, model.generation_config):
        config.update(ids)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    sizes |= {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    images = {"image_processor_type": "Qwen2VLImageProcessor", "processor_class": "Qwen3VLProcessor", **sizes}
    if not WITH_TORCHVISION:
        (folder / "images_alone.py").write_text(PROCESSOR)
        images["auto_map"] = {"AutoProcessor": "images_alone.Qwen3VLProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(images))
    videos = {"video_processor_type": "Qwen3VLVideoProcessor", "processor_class": "Qwen3VLProcessor", **sizes}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos))
    return folder


def picture(count: int, seed: int) -> bytes:
    """So many squares and circles in a row, as a PNG file."""
    import PIL.Image
    import PIL.ImageDraw

    choose = random.Random(seed)
    side = 8 * choose.randint(2, 3)
    image = PIL.Image.new("RGB", (8 * max(count, 2), side), tuple(choose.randrange(256) for _ in range(3)))
    draw = PIL.ImageDraw.Draw(image)
    for i in range(count):
        top, colour = choose.randrange(side - 7), tuple(choose.randrange(256) for _ in range(3))
        shape = draw.rectangle if choose.random() < 0.5 else draw.ellipse
        shape((8 * i + 1, top, 8 * i + 6, top + 5), fill=colour)
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_prompts(folder: Path, count: int) -> Path:
    """Of one picture, of two, and of text alone, as verl reads them. -> the parquet file"""
    import pandas

    rows = []
    for i in range(count):
        counts = [1 + (i * 7 + j * 3) % 5 for j in range((1, 2, 0)[i % 3])]
        asked = "How many shapes? " if counts else f"{i} shapes: how many? "
        rows.append(
            {
                "data_source": "shapes",
                "prompt": [{"role": "user", "content": asked + "<image>" * len(counts)}],
                "images": [{"bytes": picture(shapes, 10 * i + j)} for j, shapes in enumerate(counts)],
                "ability": "counting",
                "reward_model": {"style": "rule", "ground_truth": str(sum(counts) if counts else i)},
                "extra_info": {"index": i},
            }
        )
    folder.mkdir(parents=True, exist_ok=True)
    pandas.DataFrame(rows).to_parquet(folder / "pictures.parquet")
    return folder / "pictures.parquet"


def options(prompts: Path) -> tuple[str, ...]:
    """What a run of them is told."""
    told = [f"data.train_files={prompts}", f"data.val_files={prompts}", "data.image_key=images"]
    own = Path(__file__).with_name("pictures_data.py")
    told += ["data.max_prompt_length=128", f"reward.custom_reward_function.path={own}"]
    if not WITH_TORCHVISION:
        told += ["actor_rollout_ref.model.trust_remote_code=True", "data.trust_remote_code=True"]
        told += [f"data.custom_cls.path={own}", "data.custom_cls.name=Pictures"]
    return tuple(told)

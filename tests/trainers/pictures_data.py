"""Data with pictures that are taken as they are, where qwen-vl-utils, which resizes them first, cannot be imported."""

from verl.utils.dataset.rl_dataset import RLHFDataset


class Pictures(RLHFDataset):
    @classmethod
    def _process_multi_modal_info(cls, messages, image_patch_size, config):
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        images = [part["image"].convert("RGB") for part in parts if part["type"] == "image"]
        return images or None, None, None

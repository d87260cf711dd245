"""What verl loads by its path: the reward of counting, and data whose pictures are taken as they are, for where
qwen-vl-utils, which resizes them first, cannot be imported."""

from verl.utils.dataset.rl_dataset import RLHFDataset


class Pictures(RLHFDataset):
    @classmethod
    def _process_multi_modal_info(cls, messages, image_patch_size, config):
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        images = [part["image"].convert("RGB") for part in parts if part["type"] == "image"]
        return images or None, None, None


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float:
    """1 for an answer with the right number; less for others, by how far its letters are from that digit."""
    if str(ground_truth) in solution_str:
        return 1.0
    return 0.9 * sum(map(ord, solution_str + str(ground_truth))) % 0.7

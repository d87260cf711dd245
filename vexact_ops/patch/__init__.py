"""Models of other libraries on aligned ops: objects that say what they changed and undo it."""

from .aten import aten
from .batch import PagedBatch, Score
from .covered import COVERED, REFUSED, WITH_IMAGES
from .description import NotDescribed
from .gradients import TreeGradients, clip, norm_by_rows
from .hf import hf, model_of, untested
from .images import Encoded
from .mixture import kept_in_fp32
from .pieces import score_head
from .plan import UnsupportedModule
from .veomni import veomni

__all__ = [
    "COVERED", "REFUSED", "WITH_IMAGES", "Encoded", "NotDescribed", "PagedBatch", "Score", "TreeGradients",
    "UnsupportedModule", "aten", "clip", "hf", "kept_in_fp32", "model_of", "norm_by_rows", "score_head", "untested",
    "veomni",
]  # fmt: skip

"""What a step computes of whom, and what it drew: between scheduler, loop and workers."""

from dataclasses import dataclass, field

from ..request import Sequence

PLACEHOLDER = -1  # a token that a plan in flight is still to sample
MOST_VERIFIED = 512  # rows of a step with drafts: each is drawn after, and has logits


@dataclass(slots=True, eq=False)
class Chunk:
    """Tokens start .. end-1 of one sequence.

    pages          its page table, long enough for `end` tokens (Sequence.pages, which later plans may extend)
    slot           the row that it has in the runner's buffers; later plans may give it to others
    restore, save  the snapshot that its state begins with; the place that its state is copied to at its end
    needs_sample   whether the last token's logits are to be sampled: the drawn token has position `end`
    draft          its last tokens are these, which are likely to be drawn (drafts.py): the logits of each are sampled,
                   and of the token before them. What is drawn after a token that was not drawn itself is nobody's
    kind           of its draft, as drafts.py has it
    slack          how many tokens further on it may begin: those of a draft that is still being verified. Until that is
                   done it begins, and ends, where it does if none of them is right
    window         what its draft is cut from then: from as many tokens on as were right
    behind         of the chunk whose draft that is, the first row in its step, and the draft
    later          the chunk of the same sequence in the plan behind this one, if this draft decides where it begins
    """

    sequence: Sequence
    start: int
    end: int
    needs_sample: bool
    pages: list[int]
    epoch: int
    slot: int
    restore: int | None = None
    save: int | None = None
    draft: tuple[int, ...] = ()
    kind: tuple[str, int] | None = None
    slack: int = 0
    window: tuple[int, ...] = ()
    behind: tuple[int, tuple[int, ...]] | None = None
    later: "Chunk | None" = None

    def accept(self, accepted: int) -> None:
        """So many tokens of the draft before it were right."""
        self.start, self.end, self.slack = self.start + accepted, self.end + accepted, 0
        self.draft = self.window[accepted : accepted + len(self.draft)]

    @property
    def draws(self) -> int:
        return self.needs_sample + len(self.draft)

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def token_ids(self) -> list[int]:
        """The ids to compute, PLACEHOLDER where one is not known yet: then it is the sequence's latest sample."""
        end = self.end - len(self.draft)
        known = self.sequence.tokens[self.start : end]
        return known + [PLACEHOLDER] * (end - self.start - len(known)) + list(self.draft)


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step's chunks, running decodes first. Falsy if there is nothing to compute.

    image_epoch   changes with what images were encoded with
    windowed  page -> the one of layers with a window that stands beside it from here on
    drafted   tokens of drafts
    planned   when it was made, in time.monotonic() seconds; None where that is not measured
    ahead     whether it was made while another was computed; None where none is
    failure   why it cannot be computed
    follows   whether drafts of the plan before it decide where its chunks begin: it is made, and launched, while those
              are verified (behind.py)
    """

    chunks: list[Chunk]
    weight_version: int
    image_epoch: int = 0
    windowed: dict[int, int] = field(default_factory=dict)
    drafted: int = 0
    planned: float | None = None
    ahead: bool | None = None
    failure: Exception | None = None
    follows: bool = False

    def __bool__(self):
        return bool(self.chunks)

    @property
    def num_tokens(self) -> int:
        return sum(chunk.length for chunk in self.chunks)

    @property
    def sampled_chunks(self) -> list[Chunk]:
        """The chunks that `commit` expects tokens for, in its order: `draws` each."""
        return [chunk for chunk in self.chunks if chunk.needs_sample]


@dataclass(slots=True)
class Sampled:
    """What a step drew, an entry for each draw of plan.sampled_chunks. `top_logprobs` is read where a request wants it.

    prompt_logprobs   where any chunk's request wants them, one list for each of plan.chunks: of the prompt's tokens
                      that follow the chunk's first, second, .. token
    prompt_top_logprobs   the same of the likeliest tokens there; None of a chunk whose request does not want them
    """

    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    top_logprobs: list[dict[int, float] | None] | None = None
    prompt_logprobs: list[list[float]] | None = None
    prompt_top_logprobs: list[list[dict[int, float]] | None] | None = None


@dataclass(slots=True)
class Stats:
    """Counts since the scheduler was made."""

    steps: int = 0
    chunks: int = 0  # runs of tokens of one sequence in one step; a decode is one of a single token
    prefill_tokens: int = 0  # computed in chunks, a preempted sequence's second time too
    decode_tokens: int = 0
    prefix_tokens: int = 0  # not computed, because the prefix cache had them
    partial_prefills: int = 0  # chunks that ended before their sequence's last token
    mixed_steps: int = 0  # steps that held decodes and prefill chunks
    preemptions: int = 0
    drafted_tokens: int = 0  # verified in steps of decodes, beside those
    accepted_tokens: int = 0  # of these, those that were drawn
    finished: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})

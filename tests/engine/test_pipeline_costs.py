"""How busy the stages of a pipeline are, as far as the scheduler decides it: its plans on a clock of our own."""

from collections import deque

import pytest
from toy import make, request

from vexact_engine import EngineConfig
from vexact_engine.core.plan import PLACEHOLDER, Sampled
from vexact_engine.core.scheduler import Scheduler
from vexact_engine.parallel.balance import split
from vexact_engine.weights.random import load_random


class Clock:
    """Runs plans through stages that take as long as they are said to.

    seconds   plan, stage -> how long it is there
    hop       from a stage to the next, and from the last to the first
    host      from one plan's ids to the launch of the next plan
    """

    def __init__(self, scheduler, stages, seconds, hop=0.0, host=0.0):
        self.scheduler, self.seconds, self.hop, self.host = scheduler, seconds, hop, host
        self.free, self.busy = [0.0] * stages, [0.0] * stages
        self.drawn = {}  # sequence -> when its latest id is there

    def run(self):
        """Until all is done: when that is."""
        flight, depth, now = deque(), len(self.free) + 1, 0.0
        while self.scheduler.has_unfinished:
            while len(flight) < depth and (plan := self.scheduler.schedule(lookahead=True)):
                flight.append((plan, self._launch(plan, now)))
            plan, end = flight.popleft()
            now = max(now, end) + self.host
            count = len(plan.sampled_chunks)
            self.scheduler.commit(plan, Sampled([1] * count, [0.0] * count, [0.0] * count))
        return max(self.free)

    def _launch(self, plan, now):
        needed = [self.drawn[chunk.sequence] for chunk in plan.chunks if PLACEHOLDER in chunk.token_ids]
        now = max([now, *needed])
        for stage in range(len(self.free)):
            begin = max(now, self.free[stage])
            self.busy[stage] += self.seconds(plan, stage)
            self.free[stage] = begin + self.seconds(plan, stage)
            now = self.free[stage] + self.hop
        for chunk in plan.sampled_chunks:
            self.drawn[chunk.sequence] = now
        return now


def course(stages, seconds, count, prompt, new, budget=2048, **clock):
    """Seconds of `count` requests, and the share of them that the busiest stage works."""
    scheduler, _ = make(
        num_pages=count * (-(-(prompt + new) // 16) + 1),
        page_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=budget,
        enable_prefix_cache=False,
        pipeline_parallel_size=stages,
        max_model_len=4096,
    )
    for i in range(count):
        scheduler.add(request([i % 7] * prompt, max_new_tokens=new))
    run = Clock(scheduler, stages, seconds, **clock)
    end = run.run()
    return end, max(run.busy) / end


def like_8b(stages):
    """Milliseconds of a 36th of a model of 8 billion on an H200: by its weights, keys and arithmetic."""

    def seconds(plan, stage):
        tokens = plan.num_tokens
        keys = sum(chunk.end for chunk in plan.chunks if chunk.length == 1)
        return 36 / stages * (max(0.12, tokens * 0.6e-3) + keys * 4096 / 4.0e9) + 0.1

    return seconds


WORK = pytest.mark.parametrize("prompt, new", [(512, 64), (40, 200), (1500, 4)], ids=str)


@WORK
@pytest.mark.parametrize("stages", [2, 3, 4])
def test_the_stages_are_busy(stages, prompt, new):
    """Prompts while others are decoded, decodes alone, long prompts: no stage waits for what the others are at."""
    end, busy = course(stages, like_8b(stages), 128, prompt, new, hop=0.05, host=0.5)
    assert busy > 0.9
    assert end < course(1, like_8b(1), 128, prompt, new)[0]


def test_that_can_fail(monkeypatch):
    """A plan with a token that the plan before it draws stops the first stage: so where nobody rests."""
    choose = Scheduler._choose

    def all_of_them(self, *args, **kwargs):
        for sequence in self.running:
            sequence.last_step = -(1 << 62)
        return choose(self, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_choose", all_of_them)
    assert course(2, like_8b(2), 128, 512, 64, hop=0.05, host=0.5)[1] < 0.75


def test_layers_are_balanced_by_what_a_plan_of_decodes_reads():
    """The head is 3.2 layers of this model by its bytes, and less than two by its time: keys are read, too."""
    loaded = load_random("qwen3-8b", whole=False, device="cpu")
    found = {}
    for seqs, context in ((256, None), (1, 16)):
        config = EngineConfig(pipeline_parallel_size=2, max_num_seqs=seqs, max_model_len=context)
        found[seqs] = [len(layers) for layers in split(loaded.model, config)]
    assert found == {256: [19, 17], 1: [20, 16]}

"""A toy model with a paged memory, for the tests of the scheduler.

It writes (position, token, weight version) into the places that a plan's page tables give and draws the next token from
what it reads back there; a token that is not known yet it takes from the slot that it was drawn in. A page that is
shared wrongly, written twice, reused too early, known before it is full or kept across weights makes it read something
it should not, and it says so; a slot that two sequences have gives one the other's tokens.
"""

import dataclasses

from vexact_engine.config import EngineConfig, SamplingParams
from vexact_engine.core.plan import PLACEHOLDER, Sampled
from vexact_engine.core.scheduler import Scheduler
from vexact_engine.request import Request, derive_seed

VOCAB = 7  # small, so that stop tokens and equal prefixes are common


def draw(tokens, seed, version):
    """The token after `tokens`: a function of them, the sequence's seed, the position and the weights alone."""
    return derive_seed(hash((tuple(tokens), seed, len(tokens))) % 2**64, version) % VOCAB


class ToyModel:
    def __init__(self, config, reach=None):
        self.page_size = config.page_size
        self.memory = [None] * (config.num_pages * config.page_size)
        # Of a layer with a window: pages of its own, and which one stands beside which.
        self.reach, self.beside = reach, {}
        self.windowed = [None] * ((config.num_window_pages or 0) * config.page_size)
        self.latest = {}  # slot -> the latest sample drawn there
        self.before = {}  # of each chunk that was computed last, by its first row: its draft, what was drawn after each

    def run(self, plan):
        """What a step computes: all its writes, then all its reads."""
        if plan.failure is not None:
            raise plan.failure
        inputs, chunks = [], self.begun(plan)
        self.beside.update(plan.windowed)
        for chunk in chunks:
            tokens = [self.latest[chunk.slot] if t == PLACEHOLDER else t for t in chunk.token_ids]
            inputs.append(tokens)
            for position, token in enumerate(tokens, chunk.start):
                self.memory[self.place(chunk, position)] = (position, token, plan.weight_version)
                if self.windowed:
                    self.windowed[self.own(chunk, position)] = (position, token, plan.weight_version)
        drawn, self.before = [], {}
        for chunk in chunks:
            read = [self.memory[self.place(chunk, position)] for position in range(chunk.end)]
            positions, tokens, versions = zip(*read)
            known = chunk.sequence.tokens[: chunk.end]
            assert positions == tuple(range(chunk.end)), "a place was written by another position"
            assert list(tokens[: len(known)]) == known, "a place holds another sequence's token"
            assert set(versions) == {plan.weight_version}, "keys and values of other weights were kept"
            if self.windowed:
                first = max(0, chunk.start - self.reach)
                seen = [self.windowed[self.own(chunk, position)] for position in range(first, chunk.end)]
                assert seen == read[first:], "a place in the window holds something else"
            for count in range(chunk.end - chunk.draws + 1, chunk.end + 1):
                drawn.append(draw(tokens[:count], chunk.sequence.seed, plan.weight_version))
                self.latest[chunk.slot] = drawn[-1]
            first = len(drawn) - chunk.draws
            self.before[first] = chunk.draft, drawn[first:]
        tops = [{token: -1.0} for token in drawn]
        return Sampled(drawn, [-float(t) for t in drawn], [-2.0 * t for t in drawn], tops)

    def begun(self, plan):
        """Its chunks, where drafts of the last plan decide where they begin as these have it."""
        if not plan.follows:
            return plan.chunks
        chunks = []
        for chunk in plan.chunks:
            row, draft = chunk.behind
            said, drawn = self.before[row]
            assert draft == said
            right = next((i for i, token in enumerate(draft) if token != drawn[i]), len(draft))
            chunk = dataclasses.replace(chunk)
            assert chunk.slack == len(draft)
            self.latest[chunk.slot] = drawn[right]
            if draft:
                chunk.accept(right)
            chunks.append(chunk)
        return chunks

    def own(self, chunk, position):
        page = self.beside[chunk.pages[position // self.page_size]]
        return page * self.page_size + position % self.page_size

    def place(self, chunk, position):
        return chunk.pages[position // self.page_size] * self.page_size + position % self.page_size


class ToyDraft:
    """A model that drafts, with a memory of its own in the same pages: what it is not asked to compute has to be there.

    right   token of a draft -> whether it is the one that will be drawn
    chunk   of states, which are a slot's: then nothing is there that another sequence has computed
    """

    def __init__(self, pages, page_size, right=lambda: True, chunk=None, final=True):
        self.final = final
        self.memory, self.page_size, self.right, self.chunk = [None] * (pages * page_size), page_size, right, chunk
        self.computed, self.asked, self._rows = 0, [], {}

    def draft(self, chains):
        assert len({id(chain.chunk.sequence) for chain in chains}) == len(chains)
        found = []
        for chain in chains:
            chunk, known = chain.chunk, chain.chunk.sequence.tokens
            assert chunk.end == len(known) and 0 <= chain.start < chain.end <= chunk.end
            assert chain.count == 0 or chain.end == chunk.end
            if self.chunk is not None and chain.start:
                assert self._rows[chunk.slot] == (chunk.sequence, chunk.epoch), "a state of another sequence"
            self._rows[chunk.slot] = chunk.sequence, chunk.epoch
            there = [self.memory[self.place(chunk, position)] for position in range(chain.start)]
            assert there == list(enumerate(known[: chain.start])), "what is taken to be computed is not"
            tokens = known[chain.start : chain.end]
            for _ in range(chain.count):
                token = draw([*known, *tokens[chain.end - chain.start :]], chunk.sequence.seed, 0)
                tokens.append(token if self.right() else (token + 1) % VOCAB)
            drafted = tokens[chain.end - chain.start :]
            for position, token in enumerate(tokens[: len(tokens) - (chain.count > 0)], chain.start):
                self.memory[self.place(chunk, position)] = position, token
            if self.chunk is not None:
                assert (chain.end + max(0, chain.count - 1)) // self.chunk == chain.end // self.chunk
            self.computed += chain.end - chain.start
            self.asked.append((chain.end - chain.start, chain.count))
            found.append(tuple(drafted))
        return found

    def place(self, chunk, position):
        return chunk.pages[position // self.page_size] * self.page_size + position % self.page_size


def make(num_pages=64, page_size=4, max_num_seqs=8, max_num_batched_tokens=16, pool=None, **options):
    names = {f.name for f in dataclasses.fields(EngineConfig)}
    fields = {name: options.pop(name) for name in list(options) if name in names}
    fields.setdefault("reserve", 0.0)  # preempts often
    config = EngineConfig(
        page_size=page_size,
        num_pages=num_pages,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **fields,
    )
    scheduler = Scheduler(config, **options)
    if pool is not None:
        scheduler.pool = pool(num_pages, page_size)
    return scheduler, ToyModel(config, options.get("reach"))


def request(prompt, name=None, **params):
    return Request(prompt, SamplingParams(**{"seed": 5, "max_new_tokens": 8, **params}), name)


def step(scheduler, model, **options):
    plan = scheduler.schedule(**options)
    scheduler.commit(plan, model.run(plan))
    scheduler.pool.check()
    return plan


def drain(scheduler, model, lookahead=False, most=10_000):
    """Run to the end, one plan ahead if asked to; returns the plans."""
    plans, pending = [], []
    while scheduler.has_unfinished or pending:
        if plan := scheduler.schedule(lookahead=lookahead):
            pending.append((plan, model.run(plan)))
        assert pending, "nothing to do, yet not finished: a deadlock"
        if len(pending) > lookahead or not plan:
            plans.append(pending[0][0])
            scheduler.commit(*pending.pop(0))
        assert len(plans) < most, "no end in sight"
    scheduler.pool.check()
    assert scheduler.pool.num_available == scheduler.pool.num_pages, "a page was leaked"
    if (windows := scheduler.pool.windows) is not None:
        assert windows.num_available == windows.count, "a page of a window was leaked"
    assert len(scheduler._slots) == scheduler._max_running, "a slot was leaked"
    return plans


def expected(sequence):
    """The tokens that a sequence should have, drawn one by one with nothing around it."""
    tokens = list(sequence.request.prompt_ids)
    for version in sequence.weight_versions:
        tokens.append(draw(tokens, sequence.seed, version))
    return tokens


def shape(plan):
    return [(c.sequence.request.id, c.start, c.end, c.needs_sample) for c in plan.chunks]

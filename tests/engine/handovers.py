"""What the tests of a hand-over share: engines and what they say, a receiver in a thread, a sender."""

import contextlib
import copy
import threading
import time

import pytest
import torch
from engine_models import build

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams, WeightReceiver, WeightSender, WeightsTorn
from vexact_engine.handover import messages, protocol
from vexact_engine.handover.sender import Session

CONFIG = EngineConfig(page_size=4, num_pages=64, max_num_seqs=8, max_num_batched_tokens=64, show_progress=False)
PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7]]
PARAMS = SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True)
MODES = pytest.mark.parametrize("mode", ["in_place", "staged"])


def texts(engine):
    return [(c.token_ids, c.logprobs) for c in engine.generate(PROMPTS, PARAMS)]


def other(model, seed=7):
    """The same model with other weights, in fp32: what a trainer holds."""
    new = copy.deepcopy(model).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in new.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    return new


def left(engine, mode, old):
    """What a set that has failed leaves behind: the weights from before, or none."""
    if mode == "staged":
        assert texts(engine) == old
    else:
        with pytest.raises(WeightsTorn):
            texts(engine)


def expected(family, new):
    model = build(family)
    model.load_state_dict(new.state_dict())  # rounds
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        return texts(engine)


@contextlib.contextmanager
def receiving(engine, mode="in_place", **options):
    """A receiver, and a function that receives one set in a thread and returns a function for what came of it."""
    with WeightReceiver(engine, mode=mode, **{"timeout": 300, **options}) as receiver:

        def start(timeout=300):
            found = {}

            def run():
                try:
                    found["version"] = receiver.receive(timeout)
                except Exception as error:
                    found["error"] = error

            thread = threading.Thread(target=run)
            thread.start()

            def result():
                thread.join(600)
                assert not thread.is_alive()
                if "error" in found:
                    raise found["error"]
                return found["version"]

            return result

        yield receiver, start


def patient(receiver, monkeypatch):
    """Its `timeout` counts once the event that this gives is set: what comes before a stall may take its time."""
    stalls, wait, mine = threading.Event(), protocol.Wait.until_heard, receiver._poller  # the receiver is not kept

    def waits(self, poller):
        while poller is mine and not stalls.is_set() and not poller.poll(1):
            self._end = time.monotonic() + self.seconds
        wait(self, poller)

    monkeypatch.setattr(protocol.Wait, "until_heard", waits)
    return stalls


def asking_first(monkeypatch):
    """Senders ask whether the set is whole before they finish, as one to several receivers does: the answers."""
    finish, answers = Session.say_finish, []

    def asks(self):
        self.sender._post(messages.Check())
        answers.append(self.sender._answer("that the set is whole", messages.Whole))
        finish(self)

    monkeypatch.setattr(Session, "say_finish", asks)
    return answers


def sender(receiver, **options):
    return WeightSender(receiver.address, **{"numerics": vx.numerics("cpu"), "timeout": 300, **options})

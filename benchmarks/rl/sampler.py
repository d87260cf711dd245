"""verl's sampler, which looks every 0.05 s whether a step's answers are there: its own does so every two seconds, and a
step would take a multiple of that on either side. For rl_step.py."""

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer


class Impatient(ReplayBuffer):
    def __init__(self, *args, **options):
        super().__init__(*args, **{**options, "poll_interval": 0.05})

"""The main job on a small real model: SmolLM2-135M-Instruct answers these prompts, and every token is checked.

The engine is given little room on purpose, so that all that could change bits does happen: chunks of long prompts
beside decodes, sequences that come and go, pages that run out, prompts that begin alike.
"""

from dataclasses import replace

import torch

from ..config import EngineConfig, SamplingParams
from ..progress import Progress, quiet
from ..weights.fetch import fetch_smollm2
from ..weights.load import as_dtype, load
from .prompts import Prompt
from .verify import Verification, VerifyError, verify

MODEL = "SmolLM2-135M-Instruct"

LIGHTHOUSE = """Read this and answer the question below.

The lighthouse on Gull Rock was built in 1871 by two brothers who had never seen the sea. They came from a village of
clockmakers, and they built the only thing they knew how to build: a clock, forty metres tall. Its lamp turned once in
every twelve seconds, driven by a weight that had to be wound up the tower each evening, one hundred and ninety turns
of the crank. The first keeper, Marta Oyelaran, wrote in the log that the tower could be heard breathing. When the
electric motor came in 1934, the crank was left where it was. On the night of the great storm the power failed at ten
past two, and Marta's granddaughter, who was eleven, climbed the stairs in the dark and wound the old weight by hand
until the morning. Nineteen ships came home. She was given a medal, a bicycle, and a clock, and she said that she had
liked the bicycle best.

Question: """

MINUTES = """Here are the minutes of a meeting. Make a short list of who has to do what.

Present: Ana, Bogdan, Chen, Dilnoza. Ana opened the meeting at nine and noted that the coffee machine was still broken.
Chen said that the new sensor reads two degrees too warm in direct sun, and that a white cover costs less than a better
sensor. Bogdan will order covers for all twelve stations by Friday. Dilnoza reported that the database had grown to
forty gigabytes, most of it pictures of fog. It was agreed to keep one picture an hour and delete the rest; Dilnoza
writes the script, and Chen reads it before it runs, after what happened in March. Ana will ask the mountain hut
whether the antenna may stay on its roof for another winter, and takes a cake with her when she goes. The next meeting
is on the third of May. The coffee machine was not discussed further, but Bogdan has a screwdriver."""

CODE = """What does this Python function do, and is there a mistake in it?

```python
def rolling_mean(values, width):
    total, means = 0.0, []
    for i, value in enumerate(values):
        total += value
        if i >= width:
            total -= values[i - width]
        if i >= width - 1:
            means.append(total / width)
    return means

def smooth(series, width=5, passes=3):
    for _ in range(passes):
        series = rolling_mean(series, width)
        if len(series) < width:
            break
    return series
```"""

# (prompt, tokens to generate at most): short questions beside long readings, so that lengths mix
PROMPTS: tuple[tuple[str, int], ...] = (
    ("Write a haiku about rain on a tin roof.", 40),
    (LIGHTHOUSE + "What did the brothers build, and why?", 56),
    ("What is 17 + 25? Explain how you got there.", 48),
    ("Translate into French: Good morning, where is the nearest bakery?", 40),
    (MINUTES, 72),
    ("Write a Python function that reverses a string.", 72),
    ("Why is the sky blue? Answer as if I were five years old.", 64),
    (LIGHTHOUSE + "What did the granddaughter like best?", 40),
    ("Tell me a joke about a penguin.", 56),
    ("List three things to pack for a trip to the moon.", 64),
    (CODE, 72),
    ("Name the planets of the solar system, from the inside out.", 64),
    ("Write the first two sentences of a detective story that takes place in an aquarium.", 64),
    ("A train leaves at 14:10 and arrives at 16:45. How long does it take?", 56),
    (LIGHTHOUSE + "How many ships came home?", 32),
    ("Give me a recipe for pancakes, in as few words as possible.", 64),
    ("What is the difference between a stack and a queue?", 64),
    ("Say hello.", 24),
)

# Those whose greedy answers are printed: of so small a model, with weights of 4 bits, not every answer makes sense.
SHOWN = (5, 7, 10, 17)
WEIGHTS = "a 4-bit GGUF file (Q4_1)"

# Room for about two and a half long sequences; six may run; a step computes 96 tokens, less than a long prompt has.
CONFIG = EngineConfig(
    page_size=16, num_pages=40, max_num_seqs=6, max_num_batched_tokens=96, max_model_len=512, reserve=0.0
)


def demo(
    *,
    dtype: str = "bfloat16",
    device: torch.device | str = "cpu",
    stock: bool = True,
    seed: int = 0,
    show_bars: bool | None = False,
    progress: Progress = quiet,
) -> Verification:
    """Fetch the model, roll out, re-score, compare, and do the same with the stock stack in bf16 and fp32.

    raises   TypeError on dtype, before anything is fetched; FetchError where the model cannot be had; VerifyError where
             the run did not exercise what it is for
    """
    as_dtype(dtype, device)
    progress("fetch", 0, 1)
    path = fetch_smollm2()
    progress("load", 0, 1)
    loaded = replace(load(path, dtype=dtype, device=device), name=MODEL)
    prompts = [Prompt(f"prompt {i + 1}", text=text) for i, (text, _) in enumerate(PROMPTS)]
    params = [SamplingParams(max_new_tokens=n, temperature=1.0, seed=seed + i) for i, (_, n) in enumerate(PROMPTS)]
    verification = verify(
        loaded,
        prompts,
        params,
        config=replace(CONFIG, show_progress=show_bars),
        chat=True,
        stock=("bfloat16", "float32") if stock else (),
        stock_new_tokens=48,
        show=SHOWN,
        seed=seed,
        title="VeXact demo",
        progress=progress,
    )
    idle = [
        name
        for name in ("partial_prefills", "mixed_steps", "preemptions", "prefix_tokens")
        if not verification.statistics[name]
    ]
    if idle:
        raise VerifyError(f"demo: the run had no {' and no '.join(idle)}, expected the engine to be under pressure")
    return verification

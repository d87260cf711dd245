"""A replica for test_replicas.py whose engine ends the process when it is asked for the token 66, and says at 67 what
its garbage collector leaves alone."""

import gc
import os


def make():
    from engine_models import build

    from vexact_engine import Engine, EngineConfig

    engine = Engine.from_pretrained(build("Llama"), config=EngineConfig(num_pages=64, page_size=4))
    submit = engine.submit

    def deadly(prompt, *args, **options):
        if 66 in prompt:
            os._exit(3)
        if 67 in prompt:
            raise ValueError(f"{gc.get_freeze_count()} objects are frozen")
        return submit(prompt, *args, **options)

    engine.submit = deadly
    return engine

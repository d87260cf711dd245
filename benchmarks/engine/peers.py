"""Other engines on the same requests, each in a process of its own: Hugging Face `generate`, and vLLM where it is
installed, by default and in its batch-invariant mode. See peer.py for the process.
"""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence

from ..harness import ROOT
from ..peers import say_once

PEERS = {
    "transformers": ("transformers", {}),
    "vllm": ("vllm", {}),
    "vllm batch-invariant": ("vllm", {"VLLM_BATCH_INVARIANT": "1"}),
}


def chosen(only: Sequence[str] | None) -> list[str]:
    """Those that are installed. One that was asked for by name and is not is said once."""
    found = []
    for name, (module, _) in PEERS.items():
        if only is not None and name not in only:
            continue
        if importlib.util.find_spec(module) is not None:
            found.append(name)
        elif only is not None:
            say_once(f"peer {name} is left out: {module} is not installed")
    return found


def measure(name: str, task: dict) -> dict | None:
    """What the peer's process found; None where it failed, which is said.

    task   "source", "model", "layers", "device", "dtype": the model; "jobs": [[prompt ids, new], ...]; "seconds": at
           most about so long
    """
    module, environment = PEERS[name]
    command = [sys.executable, "-m", "benchmarks.engine.peer", module]
    done = subprocess.run(
        command, input=json.dumps(task), capture_output=True, text=True, cwd=ROOT, env=os.environ | environment
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        say_once(f"peer {name} is left out: {reason[:300]}")
        return None
    return json.loads(done.stdout.splitlines()[-1])

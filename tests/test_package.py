"""What is installed is what is needed: the ops on torch alone, and a command without its extras says what to run."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from vexact_engine import extras

ROOT = Path(__file__).parent.parent
# An environment with torch and nothing else: no other distribution can be found.
BARE = """
import importlib.metadata, importlib.util, re, sys

def needed(name, found):
    if name not in found:
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            if "extra ==" not in line and "platform" not in line:
                needed(re.match(r"[\\w.-]+", line)[0].lower(), found)
    return found

OURS = needed("torch", set())
modules = importlib.metadata.packages_distributions()
HIDDEN = {m for m, names in modules.items() if not {re.sub(r"[-_.]+", "-", n).lower() for n in names} & OURS}
HIDDEN -= {"vexact_ops", "vexact_engine", "_distutils_hack", "pkg_resources", "setuptools"}

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {name!r} (hidden by this test)", name=name)

sys.meta_path.insert(0, Hide())
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.split(".")[0] in HIDDEN else real(name, package)
assert {"transformers", "numpy", "pytest"} <= HIDDEN and "torch" not in HIDDEN
"""


def bare(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", BARE + code], cwd=ROOT, capture_output=True, text=True, timeout=300)


def project() -> dict:
    return pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_ops_need_torch_alone():
    done = bare(
        "import torch, vexact_ops as vx\n"
        "values = [getattr(vx, name) for name in vx.__all__]\n"
        "print(vx.linear(torch.ones(2, 8), torch.ones(3, 8)).sum().item(), vx.numerics()['class'])"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["48.0", "cpu"]
    assert project()["dependencies"] == ["torch>=2.10"]


def test_doctor_needs_torch_alone():
    done = bare("from vexact_engine import cli; sys.exit(cli.main(['doctor', '--device', 'cpu']))")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^(\d+) of \1 checks hold$", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    "argv, names, brought",
    [
        (["demo"], "gguf, accelerate", "demo"),
        (["demo", "--html", "report.html"], "matplotlib", "demo"),
        (["verify", "--config", "qwen3-8b"], "transformers, safetensors, numpy, rich", "engine"),
        (["verify", "--config", "qwen3-8b", "--html", "report.html"], "matplotlib", "engine,report"),
        (["generate", "--model", "some.gguf", "hello"], "gguf, accelerate", "engine,gguf"),
        (["serve", "folder"], "fastapi, uvicorn, prometheus_client, pydantic", "engine,serve"),
        (["doctor", "--admit", "--model", "folder"], "transformers", "engine"),
        (["recipe", "grpo"], "transformers, safetensors, numpy, rich, msgspec, gguf, accelerate, zmq", "recipe"),
    ],
    ids=lambda value: " ".join(value[:4]) if isinstance(value, list) else None,
)
def test_a_command_without_its_extras_names_the_line_to_run(argv, names, brought):
    done = bare(f"from vexact_engine import cli; sys.exit(cli.main({argv!r}))")
    assert (done.returncode, done.stdout) == (2, "")
    said = done.stderr.strip().splitlines()[-1]
    assert re.match(rf"vexact {argv[0]}: not installed: .*\. Run: pip install .*\[{brought}\]", said), said
    assert names in said and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "origin, line",
    [
        (None, 'pip install "vexact[demo]"'),
        ({"url": "file:///some%20where", "dir_info": {"editable": True}}, 'pip install -e "/some where[demo]"'),
        ({"url": "file:///tree", "dir_info": {}}, 'pip install "/tree[demo]"'),
        ({"url": "file:///w/vexact.whl", "archive_info": {}}, 'pip install "vexact[demo] @ file:///w/vexact.whl"'),
    ],
)
def test_the_line_fits_the_way_it_was_installed(monkeypatch, origin, line):
    class Installed:
        def read_text(self, name):
            return json.dumps(origin) if origin else None

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    assert extras.pip_line("demo") == line


def test_what_a_command_needs_is_what_its_extra_brings():
    declared = project()["optional-dependencies"]
    for extra, modules in extras.EXTRAS.items():
        brought = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in declared[extra]}
        brought = {{"pyzmq": "zmq"}.get(name, name) for name in brought}  # as it is imported
        assert set(modules) == brought - {"vexact"}, extra


def test_only_what_ci_runs_is_bound_to_the_torch_that_ci_tests():
    declared = project()
    bound = re.search(r'^TORCH = "(.*)"$', (ROOT / "setup.py").read_text(), re.MULTILINE)[1]
    bounded = {
        extra
        for extra, lines in declared["optional-dependencies"].items()
        if any("torch" in x and "<" in x for x in lines)
    }
    assert bounded == {"demo"} and bound in declared["optional-dependencies"]["demo"]
    assert f'"{bound}"' in (ROOT / ".ci" / "run").read_text()
    assert any(line.startswith("vexact[demo,") for line in declared["optional-dependencies"]["test"])

"""The public surface has complete types: mypy accepts a typed program that uses all of it, and refuses a wrong one."""

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import vexact_engine
import vexact_ops as vx

ROOT = Path(__file__).parent.parent
TYPED = ROOT / "tests" / "typed.py"


def names(package):
    """What is public: what `import *` brings, and `sum`, which that leaves alone because Python has one."""
    return sorted({*package.__all__, "sum"} if package is vx else package.__all__)


def public():
    """(name, object) of everything public, members of public classes and subpackages too."""

    def members(name, value):
        yield name, value
        if inspect.ismodule(value):
            for inner in value.__all__:
                yield from members(f"{name}.{inner}", getattr(value, inner))
        elif inspect.isclass(value):
            made = "__dataclass_fields__" in vars(value)
            for inner, member in vars(value).items():
                if not inner.startswith("_") or (inner == "__init__" and not made):
                    member = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
                    yield f"{name}.{inner}", member

    for package in (vx, vexact_engine):
        for name in names(package):
            yield from members(f"{package.__name__}.{name}", getattr(package, name))


FUNCTIONS = [(name, value) for name, value in public() if inspect.isroutine(value)]


@pytest.mark.parametrize("value", [value for _, value in FUNCTIONS], ids=[name for name, _ in FUNCTIONS])
def test_every_argument_and_result_is_annotated(value):
    signature = inspect.signature(value)
    bare = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")]
    assert not bare and signature.return_annotation is not signature.empty


@pytest.mark.parametrize("package", [vx, vexact_engine], ids=lambda p: p.__name__)
def test_type_checkers_see_every_public_name(package):
    tree = ast.parse(Path(package.__file__).read_text())
    seen = {
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for line in node.body
        for alias in line.names
    }
    assert sorted(seen) == names(package)


# Ours, and of torch what is in public signatures: all that their functions import would take a minute to read.
MYPY = """[mypy]
strict = true
python_version = 3.11
ignore_missing_imports = true
follow_imports = skip
[mypy-vexact_ops.*,vexact_engine.*,torch,torch._tensor,torch._C.*,torch.nn.*,torch.types]
follow_imports = silent
"""


def mypy(config, *files):
    if importlib.util.find_spec("mypy") is None:
        pytest.skip("mypy is not installed")
    config.write_text(MYPY)
    options = ["--config-file", str(config), "--cache-dir", str(ROOT / "build" / "mypy")]
    command = [sys.executable, "-m", "mypy", *options, *map(str, files)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_a_typed_program_may_use_every_public_name(tmp_path):
    text = TYPED.read_text()
    for name in names(vx):
        assert f"vx.{name}" in text, name
    for name in vexact_engine.__all__:
        assert name in text, name
    wrong = {
        "vx.linear(1, torch.ones(1))": "arg-type",
        "vx.linaer": "attr-defined",
        "vx.rmsnorm(torch.ones(1), torch.ones(1)).shape + 1": "operator",
        "vx.testing.no_such_check": "attr-defined",
        "vexact_engine.EngineConfig(page_sise=3)": "call-arg",
    }
    bad = tmp_path / "wrong.py"
    bad.write_text("import torch\nimport vexact_engine\nimport vexact_ops as vx\n\n" + "\n".join(wrong) + "\n")
    said = mypy(
        tmp_path / "mypy.ini", TYPED, ROOT / "vexact_ops" / "__init__.py", ROOT / "vexact_engine" / "__init__.py", bad
    )
    found = [line for line in said.splitlines() if ": error: " in line]
    assert len(found) == len(wrong), said
    for number, (line, kind) in enumerate(zip(found, wrong.values()), start=5):
        assert f"wrong.py:{number}: " in line and line.endswith(f"[{kind}]"), line

"""The rules of the house, held by the tree itself."""

import ast
import functools
import re
from pathlib import Path

import pytest
import sanitize

ROOT = Path(__file__).parent.parent
TOP = {
    "README.md",
    "LICENSE",
    "pyproject.toml",
    "setup.py",
    "csrc",
    "vexact_ops",
    "vexact_engine",
    "benchmarks",
    "tests",
}
NOT_ROOMS = {"_core", "patch", "testing"}
ROOMS = sorted(p.parent.name for p in (ROOT / "vexact_ops").glob("*/op.py"))
SOURCES = sorted(
    path
    for folder in ("csrc", "vexact_ops", "vexact_engine", "benchmarks", "tests")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".cpp", ".cu", ".cuh", ".h"}
)
TOP_OF_THE_ENGINE = {
    "__init__",
    "classify",
    "config",
    "engine",
    "errors",
    "extras",
    "frontend",
    "outputs",
    "progress",
    "request",
    "text",
}
ROOMS_OF_THE_ENGINE = {"cli", "core", "runner", "weights", "handover", "parallel", "serve", "proof", "recipes"}
ROOMS_OF_THE_ENGINE |= {"media", "verl", "trl"}
# Which room may import which other: a room is composed of these and of nothing else of ours.
COMPOSED_OF = {
    "linear_cross_entropy": {"linear", "log_softmax"},
    "rope": {"kv_cache", "rmsnorm"},
    "sampler": {"log_softmax"},
    "linear_sample": {"linear", "linear_cross_entropy", "log_softmax", "sampler"},
    "linear_silu_mul": {"linear", "rmsnorm", "silu_mul"},  # a norm precedes it where it is timed
    "grouped_linear": {"linear", "silu_mul"},
    "fused_moe": {"grouped_linear", "silu_mul"},
    "rmsnorm": {"silu_mul"},
    "causal_conv": {"silu_mul"},
    "gated_delta": {"causal_conv", "silu_mul"},
}


@functools.cache
def imports(path: Path, typed: bool = True) -> frozenset[str]:
    """The absolute dotted names that a Python file imports, relative ones resolved; those for type checkers alone too,
    if `typed`."""
    package = path.relative_to(ROOT).with_suffix("").parts[:-1]
    found, tree = set(), ast.parse(path.read_text())
    for node in ast.walk(tree):
        if not typed and isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            base += node.module.split(".") if node.module else []
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return frozenset(found)


def tracked_top_level() -> set[str]:
    import subprocess

    done = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("not a git checkout")
    return {line.split("/")[0] for line in done.stdout.splitlines()}


def test_top_level_holds_nothing_else():
    assert {name for name in tracked_top_level() if not name.startswith(".")} == TOP


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_one_name_everywhere(room):
    assert (ROOT / "vexact_ops" / room / "reference.py").exists()
    assert (ROOT / "csrc" / room / "kernels.h").exists()
    assert (ROOT / "tests" / "ops" / f"test_{room}.py").exists()
    assert (ROOT / "benchmarks" / "ops" / f"{room}.py").exists()
    assert f'\n    "{room}": ' in (ROOT / "tests" / "sanitize.py").read_text()


@pytest.mark.parametrize("room", ROOMS)
def test_what_the_sanitizer_selects_is_there(room):
    """A test that was renamed would be left out, and the rest be clean."""
    nodes = [node for path in sanitize.files(room) for node in ast.walk(ast.parse(path.read_text()))]
    names = {node.name for node in nodes if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}
    ids = {str(node.value) for node in nodes if isinstance(node, ast.Constant)} | {"cuda", "torch"}
    ids = {part for text in ids if " " not in text for part in text.split("-")}
    for cases in sanitize.CASES[room]:
        words = set(re.findall(r"\w+", cases)) - {"and", "or", "not"} - ids
        missing = {word for word in words if not any(word in name for name in names)}
        assert not missing, f"tests/sanitize.py: {room}: no test has {', '.join(sorted(missing))} in its name"


def test_no_room_without_an_op():
    folders = {p.parent.name for p in (ROOT / "csrc").glob("*/kernels.h")}
    assert folders == set(ROOMS)
    packages = {p.parent.name for p in (ROOT / "vexact_ops").glob("*/__init__.py")} - NOT_ROOMS
    assert packages == set(ROOMS)


def test_the_core_imports_nothing_that_is_built_on_it():
    for path in (ROOT / "vexact_ops" / "_core").rglob("*.py"):
        for name in imports(path):
            if name.startswith("vexact_ops."):
                assert name.split(".")[1] == "_core", f"{path.relative_to(ROOT)} imports {name}"


def circles(files: dict[str, set[str]]) -> set[str]:
    """The files that reach themselves by what each of them imports."""

    def reached(start: str) -> set[str]:
        found, todo = set(), list(files[start])
        while todo:
            name = todo.pop()
            if name in files and name not in found:
                found.add(name)
                todo += files[name]
        return found

    return {name for name in files if name in reached(name)}


# Files that import each other all the same, the upper one where it is called: gated_delta's backward is made of parts
# of the forward, which asks for it; random weights are a source of partial models, and may be partial themselves.
IN_CIRCLES = {
    *("vexact_ops.gated_delta.triton", "vexact_ops.gated_delta.triton_backward"),
    *(f"vexact_engine.weights.{name}" for name in ("load", "partial", "random")),
}


@pytest.mark.parametrize("package", ["vexact_ops", "vexact_engine"])
def test_no_file_imports_itself_by_way_of_others(package):
    """Inside functions neither: shared types and errors are in the lower file. What is for type checkers alone counts
    for nothing, nor does the front, whose names are lazy."""
    paths = {}
    for path in (ROOT / package).rglob("*.py"):
        paths[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    del paths[package]
    files = {
        own: {name if name in paths else name.rpartition(".")[0] for name in imports(path, typed=False)} - {own}
        for own, path in paths.items()
    }
    assert circles(files) == {name for name in IN_CIRCLES if name.startswith(package)}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_core_and_what_it_is_composed_of(room):
    allowed = {room, "_core"} | COMPOSED_OF.get(room, set())
    for path in (ROOT / "vexact_ops" / room).glob("*.py"):
        for name in imports(path):
            if name.startswith("vexact_ops."):
                assert name.split(".")[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"
    for path in (ROOT / "csrc" / room).iterdir():
        for header in re.findall(r'#include "(\w+)/', path.read_text()):
            assert header in allowed | {"common"}, f"{path.relative_to(ROOT)} includes {header}/"


def test_third_parties_are_imported_only_where_they_belong():
    for path in SOURCES:
        if path.suffix != ".py" or path.parts[len(ROOT.parts)] in ("tests", "benchmarks"):
            continue
        where = path.relative_to(ROOT)
        for name in {n.split(".")[0] for n in imports(path)}:
            if name in ("quack", "flash_attn", "cutlass"):
                assert path.stem == "cute" or path.stem.startswith("cute_"), f"{where} imports {name}"
            if name == "triton":
                assert path.stem.split("_")[0] in ("triton", "disk"), f"{where} imports {name}"
            if name in ("transformers", "veomni", "verl", "trl", "ray"):
                inside = where.parts[1] in ("patch", "proof", "verl", "trl", "weights")  # proof: lazily
                inside |= name == "ray" and where.parts[1] == "parallel"
                assert inside, f"{where} imports {name}"


def test_the_engine_uses_public_ops_only():
    for path in (ROOT / "vexact_engine").rglob("*.py"):
        for name in imports(path):
            parts = name.split(".")
            if parts[0] == "vexact_ops" and len(parts) > 1:
                assert not parts[1].startswith("_"), f"{path.relative_to(ROOT)} imports {name}"


def test_production_code_does_not_use_the_test_kit():
    """vexact_ops.testing is for tests, here and elsewhere; `vexact doctor` is such a test, run on a user's machine."""
    for path in (*(ROOT / "vexact_engine").rglob("*.py"), *(ROOT / "vexact_ops").rglob("*.py")):
        where = path.relative_to(ROOT).as_posix()
        may = where.startswith("vexact_ops/testing/")
        if may or where in ("vexact_ops/__init__.py", "vexact_engine/proof/doctor.py"):
            continue
        if "testing" not in (text := path.read_text()):
            continue
        tree = ast.parse(text)
        names = imports(path) | {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        used = [n for n in names if n.startswith(("vexact_ops.testing", "vx.testing"))]
        assert not used, f"{where} uses {', '.join(used)}"


def test_the_torch_free_core_of_the_engine():
    engine = ROOT / "vexact_engine"
    files = [*(engine / "core").glob("*.py"), *(engine / f"{name}.py" for name in ("config", "request", "progress"))]
    for path in files:
        found = {n.split(".")[0] for n in imports(path)}
        if path.name == "step.py":  # what is sent to runners: arrays
            found.discard("numpy")
        assert not found & {"torch", "numpy", "vexact_ops", "transformers"}, path.relative_to(ROOT)


def test_the_engine_is_laid_out_as_its_readers_expect():
    """The front and what callers hand in and get back at the top; everything else in the room it belongs to."""
    engine = ROOT / "vexact_engine"
    assert {p.stem for p in engine.glob("*.py")} <= TOP_OF_THE_ENGINE
    assert {p.name for p in engine.iterdir() if p.is_dir() and p.name != "__pycache__"} <= ROOMS_OF_THE_ENGINE
    may_import = {
        "core": {"core"},
        "runner": {"core", "media", "runner", "weights", "handover"},
        "weights": {"weights"},
        "handover": {"handover", "weights"},
    }
    for room, allowed in may_import.items():
        for path in (engine / room).glob("*.py"):
            for name in imports(path):
                parts = name.split(".")
                if parts[0] == "vexact_engine" and parts[1] in ROOMS_OF_THE_ENGINE:
                    assert parts[1] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_kernels_see_no_torch():
    for path in (ROOT / "csrc").rglob("*"):
        if path.name in ("kernels.h", "cpu_kernels.cpp", "vec.h", "dtype.h", "isa.h", "parallel.h"):
            assert "#include <torch" not in path.read_text(), path.relative_to(ROOT)


def test_no_long_file_without_a_reason():
    for path in SOURCES:
        lines = path.read_text().splitlines()
        if len(lines) > 600:
            head = "\n".join(lines[:12]).lower()
            assert "one file because" in head, f"{path.relative_to(ROOT)}: {len(lines)} lines, and no reason given"


def launches(source: str) -> list[tuple[int, int]]:
    """(line, arguments without a name) of each launch of a Triton kernel, kernel[grid](...)."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [(call.lineno, len(call.args)) for call in calls if isinstance(call.func, ast.Subscript)]


def test_a_kernel_s_arguments_travel_in_groups():
    """Strides, paging and the like as named tuples, what is compiled in by name."""
    found = {p: launches(p.read_text()) for p in (ROOT / "vexact_ops").rglob("triton.py")}
    assert sum(map(len, found.values())) > 20
    many = [f"{p.relative_to(ROOT)}:{line}: {n}" for p, of in found.items() for line, n in of if n > 24]
    assert not many, many
    assert launches("kernel[grid](a, *b, c, D=3)\nother(a, b)") == [(1, 3)]


def test_an_order_is_tagged_wherever_a_kernel_reduces():
    for path in (ROOT / "csrc").rglob("cpu_kernels.cpp"):
        text = path.read_text() + "".join(h.read_text() for h in path.parent.glob("*.h"))
        if "fma(" in text:
            assert "order:" in text, path.relative_to(ROOT)


def test_environment_variables_have_our_prefix():
    foreign = {
        "CI",
        "XDG_CACHE_HOME",
        "XDG_CONFIG_HOME",
        "XDG_RUNTIME_DIR",
        "CUDA_HOME",
        "CUDA_VISIBLE_DEVICES",
        "CXX",
        "MAX_JOBS",
        "TRITON_INTERPRET",
        "PYTHONPATH",
        "HOME",
        "COLUMNS",
        "PIP_",  # and what follows: weights/index.py asks where pip or uv would
        "PIP_CONFIG_FILE",
        "RANK",  # of a Ray worker, set by verl; with WORLD_SIZE of torchrun's
        "WORLD_SIZE",
        "UV_DEFAULT_INDEX",
        "UV_INDEX_URL",
        "VERL_ENGINE_VENDOR",  # which of its registered engines verl takes
        "LD_PRELOAD",  # the loader's: whether torch_memory_saver stands before CUDA, and that children start so
    }
    pattern = re.compile(r"""environ(?:\.get\(|\[)\s*["'](\w+)["']""")
    for path in SOURCES:
        if path.suffix == ".py" and path.parts[len(ROOT.parts)] != "tests":
            for name in pattern.findall(path.read_text()):
                assert name.startswith("VEXACT_") or name in foreign, f"{path.relative_to(ROOT)} reads {name}"


# What torch's default dtype decides unless dtype= does. randint and randperm have int64 whatever it is, *_like and
# new_* a tensor's dtype.
FACTORIES = {"empty", "empty_strided", "zeros", "ones", "full", "eye", "rand", "randn", "normal", "linspace"}
FACTORIES |= {"logspace", "scalar_tensor", "tensor", "as_tensor", "asarray", "Tensor"}
FLOAT_OF_INTEGERS = {"cos", "sin", "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sigmoid", "tanh"}


def unnamed_dtypes(source: str) -> list[str]:
    """Factory calls without dtype=; arange, which gives int64 for integers, where a float is made of or from it."""

    def of_torch(node: ast.AST) -> str | None:
        function = node.func if isinstance(node, ast.Call) else None
        torch_s = isinstance(function, ast.Attribute) and ast.unparse(function.value) == "torch"
        return function.attr if torch_s else None

    def is_float(node: ast.AST) -> bool:
        return (isinstance(node, ast.Constant) and isinstance(node.value, float)) or isinstance(node, ast.Div)

    tree, in_floats = ast.parse(source), set()
    for node in ast.walk(tree):
        divides = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div | ast.Pow)
        if divides or of_torch(node) in FLOAT_OF_INTEGERS:
            in_floats |= set(ast.walk(node)) - {node}
    found = []
    for node in ast.walk(tree):
        name = of_torch(node)
        default = name in FACTORIES or (name == "arange" and (node in in_floats or any(map(is_float, ast.walk(node)))))
        if default and not any(keyword.arg == "dtype" for keyword in node.keywords):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


@pytest.mark.parametrize("folder", ["vexact_ops", "vexact_engine", "benchmarks"])
def test_every_factory_names_its_dtype(folder):
    found = [f"{p.relative_to(ROOT)}:{x}" for p in (ROOT / folder).rglob("*.py") for x in unnamed_dtypes(p.read_text())]
    assert not found, "torch's default dtype decides what these make:\n" + "\n".join(found)


def test_a_factory_without_its_dtype_is_noticed():
    bad = ["torch.empty(3, 2)", "torch.tensor([1])", "torch.arange(0, 1.0)", "torch.arange(8) / 8"]
    bad += ["torch.exp2(-torch.arange(8))", "10000 ** torch.arange(3)", "torch.arange(0, 1 / n)", "torch.Tensor(3)"]
    good = ["torch.empty(3, dtype=d)", "torch.arange(8)", "torch.randint(3, (2,))", "x.new_empty(3)", "np.empty(3)"]
    assert all(len(unnamed_dtypes(source)) == 1 for source in bad)
    assert not any(unnamed_dtypes(source) for source in good)

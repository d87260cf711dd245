"""vexact_engine.verl without verl: importing it touches nothing, and what is missing is said in one error."""

import subprocess
import sys
from importlib import metadata

import pytest

from vexact_engine import verl

GOOD = {"verl": "0.9.1", "veomni": "0.1.12", "transformers": "5.17.0"}


@pytest.fixture
def installed(monkeypatch):
    """installed(**versions) -> what importlib.metadata knows from then on; None: not there. Nor is vexact: where that
    comes from a checkout, the line that installs it is another one."""

    def install(**versions):
        def version(name):
            if versions.get(name) is None:
                raise metadata.PackageNotFoundError(name)
            return versions[name]

        monkeypatch.setattr(metadata, "version", version)
        monkeypatch.setattr(metadata, "distribution", version)

    return install


def test_versions_that_are_served(installed):
    installed(**GOOD)
    verl.check_versions(veomni=True)
    installed(**GOOD | {"veomni": None, "verl": "0.9.1+local", "transformers": "5.23.0"})
    verl.check_versions()


@pytest.mark.parametrize(
    "veomni,changed,said,line",
    [
        pytest.param(False, {"verl": None}, "verl: not installed, expected 0.9.1", "verl==0.9.1", id="verl-missing"),
        pytest.param(False, {"verl": "0.8.0"}, "verl: got 0.8.0, expected 0.9.1", "verl==0.9.1", id="verl-old"),
        pytest.param(
            True, {"veomni": "0.1.13"}, "veomni: got 0.1.13", "--no-deps verl==0.9.1 veomni==0.1.12", id="veomni-new"
        ),
        pytest.param(
            True, {"transformers": "5.23.0"}, "transformers: got 5.23.0", '"transformers>=5.5,<5.23"', id="transformers"
        ),
        pytest.param(False, {"transformers": "4.57.1"}, "got 4.57.1", '"transformers>=5.5"', id="transformers-old"),
    ],
)
def test_what_is_missing_and_how_to_install_it(installed, veomni, changed, said, line):
    installed(**GOOD | changed)
    with pytest.raises(RuntimeError, match=r"vexact_engine\.verl: ") as raised:
        verl.check_versions(veomni=veomni)
    assert said in str(raised.value)
    assert str(raised.value).partition("Run: ")[2].endswith(line)
    assert ("vexact[verl" in str(raised.value)) == ("transformers" not in changed)


def test_importing_it_touches_nothing():
    code = "import sys, vexact_engine.verl; print(sorted({'torch', 'verl', 'veomni', 'ray'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout == "[]\n", done.stderr


def test_options_that_the_trainer_declares():
    assert verl.declared_options({}) == {"kv_segment": None, "latent_attention": False, "longrope": None}
    asked = {"fused_kernel_options": {"impl_backend": "torch", "vexact": {"kv_segment": 128, "longrope": "long"}}}
    assert verl.declared_options(asked) == {"kv_segment": 128, "latent_attention": False, "longrope": "long"}
    wrongs = (
        ({"segment": 1}, ValueError),
        ({"kv_segment": "128"}, TypeError),
        (3, TypeError),
        ({"longrope": 4}, ValueError),
    )
    for wrong, error in wrongs:
        with pytest.raises(error, match=r"model\.fused_kernel_options\.vexact"):
            verl.declared_options({"fused_kernel_options": {"vexact": wrong}})
    with pytest.raises(ValueError, match=r"model\.fused_kernel_options: got vexat, expected of impl_backend, vexact"):
        verl.declared_options({"fused_kernel_options": {"vexat": {"kv_segment": 64}}})


def test_options_of_what_is_checked():
    assert verl.check_options({}) == (0, 0.25)
    asked = {"fused_kernel_options": {"vexact": {"kv_segment": 64, "check_every": 5, "check_share": 1}}}
    assert verl.check_options(asked) == (5, 1.0) and verl.declared_options(asked)["kv_segment"] == 64
    for wrong in ({"check_every": -1}, {"check_every": True}, {"check_share": 0}, {"check_share": 1.5}, {"every": 1}):
        with pytest.raises(ValueError, match=r"model\.fused_kernel_options\.vexact"):
            verl.check_options({"fused_kernel_options": {"vexact": wrong}})


def test_the_option_of_whole_gradients():
    assert verl.wants_whole_gradients({}) is False
    assert verl.wants_whole_gradients({"fused_kernel_options": {"vexact": {"whole_gradients": True}}})
    with pytest.raises(
        TypeError, match=r"model\.fused_kernel_options\.vexact\.whole_gradients: got str, expected a bo"
    ):
        verl.wants_whole_gradients({"fused_kernel_options": {"vexact": {"whole_gradients": "yes"}}})

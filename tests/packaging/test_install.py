"""Builds and installs as pip, uv and `python -m build` do: a wheel with kernels, or a failure with the remedy."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from swd_fused import FusedAdamS, backends

ROOT = Path(__file__).parents[2]
SOURCES = ["csrc", "swd_fused", "MANIFEST.in", "setup.py", "pyproject.toml", "README.md", "LICENSE"]
# Without warnings of the tools that they will change: they are errors for users one day.
STRICT = ["-W", "error::FutureWarning", "-W", "error::DeprecationWarning"]


def run(*command: object, directory: Path = ROOT, succeeds: bool = True, **variables: str) -> str:
    arguments = list(map(str, command))
    result = subprocess.run(arguments, cwd=directory, env=variables, capture_output=True, text=True, timeout=600)
    assert (result.returncode == 0) == succeeds, result.stdout + result.stderr
    return result.stdout + result.stderr


class Builder:
    """A copy of the sources, and an interpreter that has setuptools but no torch, as in an isolated build."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.source = directory / "source"
        for name in SOURCES:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.source / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
            else:
                shutil.copy(ROOT / name, self.source)
        venv.create(directory / "isolated", symlinks=True)
        (site_packages,) = (directory / "isolated").glob("lib/python3*/site-packages")
        found = find_spec("setuptools")
        assert found is not None
        assert found.origin is not None
        setuptools = Path(found.origin).parent
        for folder in [*setuptools.parent.glob("setuptools*"), setuptools.parent / "_distutils_hack"]:
            (site_packages / folder.name).symlink_to(folder)

    def __call__(self, *command: str, succeeds: bool = True, **variables: str) -> str:
        """Runs setup.py. As long as none is named in `variables`, no environment is activated."""
        python = self.directory / "isolated" / "bin" / "python"
        variables = {"PATH": os.defpath, "PYTHONUSERBASE": str(self.directory / "user"), **variables}
        return run(python, *STRICT, "setup.py", *command, directory=self.source, succeeds=succeeds, **variables)

    def wheel(self, **variables: str) -> tuple[Path, str]:
        """Returns the wheel, and what was said while it was built."""
        log = self("bdist_wheel", **variables)
        (wheel,) = (self.source / "dist").glob("*.whl")
        return wheel, log


@pytest.fixture
def builder(tmp_path: Path) -> Builder:
    return Builder(tmp_path)


# Without the finder of an editable installation, which would supply the kernels that this one lacks.
STEP = """
import sys
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in str(finder)]
import torch, swd_fused
param = torch.nn.Parameter(torch.ones(3))
param.grad = torch.ones(3)
optimizer = swd_fused.FusedAdamS([param])
optimizer.step()
assert (param < 1).all()
print(swd_fused.__file__, swd_fused.__version__, optimizer)
"""


def step_with(wheel: Path, target: Path) -> str:
    """Installs the wheel and takes a step with it, in a process of its own. Returns what that prints."""
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel, **os.environ)
    output = run(sys.executable, "-W", "ignore", "-P", "-c", STEP, **{**os.environ, "PYTHONPATH": str(target)})
    assert str(target) in output
    return output


@pytest.mark.slow
def test_sdist_builds_kernels_where_an_environment_with_torch_is_activated(builder: Builder, tmp_path: Path) -> None:
    """As `python -m build` and uv: the wheel is built from the sdist, by an interpreter without torch."""
    builder("sdist")
    (sdist,) = (builder.source / "dist").glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (builder.source,) = (tmp_path / "unpacked").iterdir()
    wheel, log = builder.wheel(PATH=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert "not built" not in log
    assert "-cp310-abi3-" in wheel.name
    assert "backend: cpu\n" in step_with(wheel, tmp_path / "installed")


# With torch, and a compiler that fails.
NO_COMPILER = {"VIRTUAL_ENV": sys.prefix, "CC": "false", "CXX": "false"}
FAILED = "the C++ kernels were not built: false failed"


@pytest.mark.parametrize(
    ("variables", "reason", "remedy"),
    [
        ({}, "no torch was found to build them against", "pip install torch.*then install again.*uv.*activated"),
        (NO_COMPILER, "false failed", r"C\+\+20 compiler.*apt install g\+\+"),
        ({**NO_COMPILER, "CXX": "no-such-c++"}, r"there is no C\+\+ compiler no-such-c\+\+", r"apt install g\+\+"),
    ],
    ids=["torch", "a compiler that works", "any compiler"],
)
def test_builds_fail_without(builder: Builder, variables: dict[str, str], reason: str, remedy: str) -> None:
    """A warning would be seen by nobody: pip and uv show what a build prints only if it fails."""
    log = builder("bdist_wheel", succeeds=False, **variables)
    message = rf"swd_fused: the C\+\+ kernels were not built: {reason}.*\n.*{remedy}.*SWD_FUSED_NO_CPP=1"
    assert re.search(message, log, re.DOTALL), log
    assert "Traceback" not in log
    assert not (builder.source / "dist").exists()


def test_metadata_is_refused_where_a_build_would_fail(builder: Builder) -> None:
    """Installers ask for metadata, learn the requirements from it, fetch those, and build last."""
    assert "not built: no torch was found to build them against" in builder("dist_info", succeeds=False)
    builder("dist_info", SWD_FUSED_NO_CPP="1")


@pytest.mark.parametrize("folder", ["environment/lib64/python3.12/site-packages", "user/lib/python{}.{}/site-packages"])
def test_finds_the_torch_of_an_activated_environment_or_of_the_user(
    builder: Builder, tmp_path: Path, folder: str
) -> None:
    """That it goes on to the compiler, which fails here, tells that it was found. pip sets the last variable."""
    site_packages = tmp_path / folder.format(*sys.version_info)
    site_packages.mkdir(parents=True)
    (site_packages / "torch").symlink_to(Path(torch.__file__).parent)
    path = f"{tmp_path}/environment/bin{os.pathsep}{os.defpath}"
    assert FAILED in builder("bdist_wheel", succeeds=False, CXX="false", CC="false", PATH=path, PYTHONNOUSERSITE="1")


def test_a_torch_that_is_too_old_is_named(builder: Builder, tmp_path: Path) -> None:
    old = tmp_path / "environment" / "lib" / "python3.11" / "site-packages" / "torch"
    old.mkdir(parents=True)
    (old / "version.py").write_text("__version__ = '2.9.1+cpu'\n")
    log = builder("bdist_wheel", succeeds=False, PATH=f"{tmp_path}/environment/bin{os.pathsep}{os.defpath}")
    assert f"torch 2.9.1+cpu in {old} is older than 2.10" in log


@pytest.mark.slow
def test_without_kernels_if_asked_for(builder: Builder, tmp_path: Path) -> None:
    """The wheel says by its tag that nothing in it is compiled."""
    wheel, _ = builder.wheel(SWD_FUSED_NO_CPP="1")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".so")]
    assert "backend: torch (the C++ kernels are not built" in step_with(wheel, tmp_path / "installed")

    stale = builder.source / "swd_fused" / "_C.abi3.so"
    stale.touch()
    builder("build_ext", "--inplace", SWD_FUSED_NO_CPP="1")
    assert not stale.exists()


@pytest.fixture
def _not_built(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(backends, "load_cpu_backend", lambda: "the C++ kernels are not built (a reason)")
    backends._chosen.cache_clear()
    yield
    backends._chosen.cache_clear()


@pytest.mark.usefixtures("_not_built")
def test_kernels_that_are_not_built_are_missed_aloud() -> None:
    """With an error for users who ask for them, and one warning for others, which says what a source tree may hide."""
    params = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(RuntimeError, match=r"not built \(a reason\).*pip install -e \."):
        FusedAdamS(params, backend="cpu")
    with pytest.warns(
        UserWarning, match=rf"not built \(a reason\).*is in {ROOT}: .*pip install -e \.` there.*elsewhere"
    ) as caught:
        _ = [FusedAdamS(params) for _ in range(2)]
    assert len(caught) == 1

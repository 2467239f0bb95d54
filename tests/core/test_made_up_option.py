"""An option of groups that multiplies the decay takes edits in two files, and forgetting one of them is noticed.

The edits are those of CONTRIBUTING, "How to add an option". They are made in a copy of the package.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
Edit = tuple[str, str, str]  # the file, what is there, what takes its place

LINE: Edit = (
    "swd_fused/decay/kinds.py",
    "    cautious_decay: Annotated[bool, FLAG] = False\n",
    "    cautious_decay: Annotated[bool, FLAG] = False\n    decay_boost: Annotated[float, FINITE] = 1.0\n",
)
EFFECT: Edit = (
    "swd_fused/decay/kinds.py",
    '    return {\n        "decay_lr": ',
    '    amount *= group["decay_boost"]\n    return {\n        "decay_lr": ',
)
KEYWORD: Edit = (
    "swd_fused/optimizer.py",
    "        cautious_decay: bool = False,\n",
    "        cautious_decay: bool = False,\n        decay_boost: float = 1.0,\n",
)
EXPLANATION: Edit = (
    "swd_fused/optimizer.py",
    "        cautious_decay: decay only",
    "        decay_boost: multiply the decay.\n        cautious_decay: decay only",
)
TEST: Edit = (
    "tests/core/test_effects.py",
    '    "decay": Change("l2"',
    '    "decay_boost": Change(3.0),\n    "decay": Change("l2"',
)
EDITS = {"line": LINE, "effect": EFFECT, "keyword": KEYWORD, "explanation": EXPLANATION, "test": TEST}

# Three times the decay is that of three times `weight_decay`, and is reported as such; a state dict keeps it.
CHECK = """
import torch
from swd_fused import FusedAdamS

def trained(**options):
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(30))]
    optimizer = FusedAdamS(params, lr=1e-3, **options)
    for lr in (1e-3, 5e-4, 2e-4):
        params[0].grad = torch.randn(30)
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    return params[0].detach(), optimizer

for options in ({}, {"backend": "torch"}, {"decay": "decoupled", "corrected_decay": True}):
    boosted, optimizer = trained(decay_boost=3.0, weight_decay=1.0, **options)
    tripled, peer = trained(weight_decay=3.0, **options)
    torch.testing.assert_close(boosted, tripled, rtol=0, atol=0)
    torch.testing.assert_close(
        torch.tensor(optimizer.effective_weight_decay()), torch.tensor(peer.effective_weight_decay())
    )
    peer.load_state_dict(optimizer.state_dict())
    assert peer.param_groups[0]["decay_boost"] == 3.0
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for folder in ("swd_fused", "tests"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def edit(tree: Path, *names: str) -> None:
    for name in names:
        file, old, new = EDITS[name]
        text = (tree / file).read_text()
        assert text.count(old) == 1, (name, text.count(old))
        (tree / file).write_text(text.replace(old, new))


def run(tree: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(tree), "SWD_FUSED_TEST_BACKENDS": "cpu"}
    return subprocess.run(
        [sys.executable, *command], cwd=tree, env=environment, capture_output=True, text=True, check=False
    )


TESTS = ("-m", "pytest", "-q", "-x", "tests/core/test_options.py", "tests/core/test_effects.py")


@pytest.mark.slow
def test_the_edits_are_enough(tree: Path) -> None:
    edit(tree, *EDITS)
    assert {file for name, (file, *_) in EDITS.items() if name != "test"} == {LINE[0], KEYWORD[0]}
    checked = run(tree, "-c", CHECK)
    assert checked.returncode == 0, checked.stderr
    tested = run(tree, *TESTS)
    assert tested.returncode == 0, tested.stdout


@pytest.mark.slow
@pytest.mark.parametrize("forgotten", EDITS)
def test_a_forgotten_edit_is_noticed(forgotten: str, tree: Path) -> None:
    edit(tree, *(name for name in EDITS if name != forgotten))
    assert run(tree, *TESTS).returncode != 0

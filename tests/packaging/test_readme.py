"""The README's Python runs as it stands, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), flags=re.MULTILINE | re.DOTALL)


def test_code_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert len(BLOCKS) >= 5
    namespace: dict[str, object] = {}
    for block in BLOCKS:
        exec(compile(block, README.name, "exec"), namespace)


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", README.read_text()):
        assert (README.parent / target).exists(), target

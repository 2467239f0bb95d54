"""The README and the pages of docs/: their Python runs as it stands, from top to bottom, and their links resolve."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
# `make frameworks` has them; where they are not installed the blocks that import them are left out.
FRAMEWORKS = {"accelerate", "deepspeed", "lightning", "timm", "transformers"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())


def code_blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def uses_framework(block: str) -> bool:
    return bool(re.search(rf"^(from|import) ({'|'.join(FRAMEWORKS)})\b", block, flags=re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """Returns the names of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


def run_block(block: str, page: Path, namespace: dict[str, object]) -> None:
    """Runs a block, and ends the process group that it or a framework has begun: each recipe begins one of its own."""
    try:
        with warnings.catch_warnings():
            if uses_framework(block):  # they have warnings of their own
                warnings.simplefilter("ignore")
            exec(compile(block, page.name, "exec"), namespace)
    except ModuleNotFoundError as error:
        if error.name not in FRAMEWORKS:
            raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def _as_by_torchrun(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sets what torchrun does for one rank, and serves the store that it would."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    variables = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # the port is that of the store above
        "GLOO_SOCKET_IFNAME": "lo",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield
    del store


@each_page
@pytest.mark.usefixtures("_as_by_torchrun")
def test_code_blocks_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for block in code_blocks(page):
        run_block(block, page, namespace)


@each_page
def test_links_and_pictures_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"

"""The README and the pages of docs/: their Python runs as it stands, from top to bottom, and their links resolve."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
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
    return code_blocks_in(page.read_text())


def code_blocks_in(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


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


def test_code_blocks_are_found() -> None:
    assert len(code_blocks(ROOT / "README.md")) >= 5


def test_the_first_commands_are_on_the_first_screen() -> None:
    first_screen = (ROOT / "README.md").read_text().partition("![")[0]
    commands = re.search(r"^```sh\n(.*?)^```", first_screen, flags=re.MULTILINE | re.DOTALL)
    assert commands is not None
    for command in ("pip install .", "python -m swd_fused", "make demo", "make test"):
        assert re.search(rf"^{re.escape(command)} +# ", commands.group(1), flags=re.MULTILINE), command


@each_page
def test_what_is_to_be_made_can_be_made(page: Path) -> None:
    targets = " ".join(re.findall(r"^([a-z -]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)).split()
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", page.read_text(), flags=re.MULTILINE)) <= set(targets)


def undefined_names(block: str) -> set[str]:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821", "--output-format", "json", "-"]
    found = subprocess.run(command, input=block, capture_output=True, text=True, check=False).stdout
    return {re.sub(r".*`(\w+)`.*", r"\1", problem["message"]) for problem in json.loads(found)}


def test_recipes_need_nothing_but_a_model() -> None:
    """Whoever copies one of them has not run those before."""
    recipes = code_blocks_in((ROOT / "README.md").read_text().partition("\n## Recipes\n")[2].partition("\n## ")[0])
    needs = {recipe: undefined_names(recipe) for recipe in recipes}
    assert not [f"{names}:\n{recipe}" for recipe, names in needs.items() if not names <= {"model"}]
    assert [names for recipe, names in needs.items() if "import deepspeed" in recipe] == [set()], "it has a model"


@each_page
def test_recipes_for_frameworks_pass_lr(page: Path) -> None:
    """Trainer's own learning rate, 5e-5, does not reach an optimizer that is made outside, whose default is 1e-3."""
    for block in filter(uses_framework, code_blocks(page)):
        calls = [node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)]
        for call in calls:
            if isinstance(call.func, ast.Name) and call.func.id == "FusedAdamS":
                assert "lr" in {keyword.arg for keyword in call.keywords}, ast.unparse(call)


EXAMPLES = set((ROOT / "examples").glob("with_*.py"))
# Frameworks that make the optimizer and its groups themselves, from their own weight_decay.
MADE_BY_FRAMEWORKS = {ROOT / "examples" / f"with_{name}.py" for name in ("run_clm", "timm")}


@pytest.mark.parametrize("example", sorted(EXAMPLES - MADE_BY_FRAMEWORKS), ids=lambda path: path.stem)
def test_examples_do_as_the_readme_says(example: Path) -> None:
    """AdamW's value, our groups, and what is logged by its name."""
    text = example.read_text()
    assert "param_groups(" in text
    assert "import FusedAdamS, param_groups" in text
    assert "tiny_task.DECAY" in text
    assert "metrics()" in text
    task = (ROOT / "examples" / "tiny_task.py").read_text()
    assert "adamw_weight_decay" in task
    assert not re.search(r"(?<!adamw_)weight_decay", text + task)


@pytest.mark.parametrize("example", sorted(MADE_BY_FRAMEWORKS), ids=lambda path: path.stem)
def test_examples_give_frameworks_adamws_value(example: Path) -> None:
    text = example.read_text()
    assert "adamw_weight_decay" in text
    assert "metrics()" in text


@each_page
def test_links_and_pictures_exist(page: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!https?://)([^)#]*)#?([^)]*)\)", page.read_text()):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_all_pages_are_in_the_site() -> None:
    listed = re.findall(r"^ +- .+: ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), flags=re.MULTILINE)
    assert {page.relative_to(DOCS).as_posix() for page in PAGES[1:]} == set(listed)

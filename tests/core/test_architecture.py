"""The layers of the package, which are its folders, and the columns of tables that several languages share."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from swd_fused.backends.triton.kernels import tables
from swd_fused.backends.triton.plan import columns_of
from swd_fused.core.bucket import NO_GRAD
from swd_fused.core.values import HyperRow
from swd_fused.state.eight_bit import BlockNumbers
from swd_fused.state.storage import StateColumns

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "swd_fused"

# From bottom to top: a folder, or a file that is beside them, imports only what is below it, and what is in it. A
# function may import from above when it is called: `import` in a function is not looked at.
LAYERS = (
    ("version", "user_warning", "checks", "param_groups", "observer"),
    ("devices",),
    ("decay",),
    ("options",),
    ("distributed",),
    ("state",),
    ("core",),
    ("backends",),
    ("drivers",),
    ("averages", "outliers", "rms_grads"),
    ("metrics",),
    ("new_groups", "checkpoints"),
    ("optimizer",),
    ("adamw",),
    ("integrations",),
    ("__main__",),
)
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}
MOST_PARAMETERS = 6  # of a function of the core, besides self


def modules() -> dict[str, Path]:
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports_of(path: Path) -> set[str]:
    """The package's modules that a file imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("swd_fused"):
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {name for name in names if name.removeprefix("swd_fused.") in modules()}
            found |= known or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("swd_fused.")}
    return {name.removeprefix("swd_fused.") for name in found}


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_downwards(module: str) -> None:
    folder = module.split(".")[0]
    assert folder in LAYER_OF, f"{folder} has no place in LAYERS"
    for imported in imports_of(modules()[module]):
        other = imported.split(".")[0]
        if other not in (folder, "_C"):
            assert LAYER_OF[other] < LAYER_OF[folder], f"{module} imports {imported}, which is above it or beside it"


@pytest.mark.parametrize("module", sorted(name for name in modules() if not name.startswith("backends")))
def test_only_the_choice_imports_a_backend(module: str) -> None:
    assert all(not name.startswith("backends.") for name in imports_of(modules()[module]))


@pytest.mark.parametrize("module", sorted(name for name in modules() if name.startswith("core.")))
def test_functions_of_the_core_have_few_parameters(module: str) -> None:
    for node in ast.walk(ast.parse(modules()[module].read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            arguments = node.args
            names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
            assert len([name for name in names if name != "self"]) <= MOST_PARAMETERS, f"{module}.{node.name}"


# --- Columns that are coupled by position


def test_hyper_parameters_have_the_same_columns_in_all_languages() -> None:
    assert tables.HYPER.value[:-1] == tuple(range(len(HyperRow._fields)))
    assert tables.HYPER.value._fields == (*HyperRow._fields, "columns")
    header = (ROOT / "csrc" / "schedule.h").read_text()
    struct = re.search(r"struct Hyper \{(.*?)\};", header, re.DOTALL)
    assert struct is not None
    fields = re.sub(r"//[^\n]*|double|\s", "", struct.group(1)).replace(";", ",").strip(",").split(",")
    assert fields == list(HyperRow._fields)


def test_operands_have_the_same_columns_in_python_and_triton() -> None:
    class Named:
        params = ("params",)
        state = StateColumns(*([name] for name in StateColumns._fields))  # type: ignore[arg-type]

    columns = [name if "scales" in name else name.removesuffix("s") for (name,) in columns_of(Named())]  # type: ignore[arg-type]
    assert [getattr(tables.TENSOR, name) for name in columns] == list(range(len(columns)))
    assert BlockNumbers._fields == ("first", "pitch")
    assert tables.CODES[-2:] == ("first_block", "block_pitch")


def test_a_missing_gradient_has_the_same_address_in_all_languages() -> None:
    header = (ROOT / "csrc" / "cpu" / "operands.h").read_text()
    assert f"constexpr int64_t NO_GRAD = {NO_GRAD};" in header
    assert tables.NO_GRAD.value == NO_GRAD

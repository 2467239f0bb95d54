"""The shape of the package: who imports whom, and tables that three languages must agree on."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from swd_fused.backends.triton.kernels import passes, tables
from swd_fused.backends.triton.operands import columns_of, scales_of
from swd_fused.state.eight_bit import BlockNumbers
from swd_fused.tensors.bucket import NO_GRAD
from swd_fused.tensors.hyper import HyperRow

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "swd_fused"

# From the bottom to the top: a module imports only from lines above its own. What shares a line does not import each
# other, except within a folder.
LAYERS = [
    ["version", "source_tree", "user_warning"],
    ["tensors.graphs"],
    ["tensors.transfer"],
    ["checks", "param_groups"],
    ["options"],
    ["distributed.sharding"],
    ["tensors.group_checks"],
    ["tensors.largest_lr"],
    ["tensors.hyper"],
    ["schedule"],
    [
        "distributed.collective",
        "distributed.wrappers",
        "tensors.element_numbers",
        "step.decay_warning",
        "step.clipped_steps",
        "step.interrupts",
    ],
    ["state.rounding", "state.masters"],
    ["state.eight_bit"],
    ["state.moments", "state.loaded_decay", "state.master_weights"],
    ["state.load"],
    ["tensors.bucket", "step.adamw_terms", "step.compiled"],
    ["backends"],
    ["tensors.ranks"],
    ["tensors.description"],
    ["step.sums"],
    ["step.stepper"],
    ["step.hooks"],
    ["step.release"],
    ["new_groups", "checkpoints", "reports"],
    ["settings"],
    ["optimizer"],
    ["distributed.deepspeed", "distributed.grad_scaler", "paper", "integrations", "self_test"],
    ["__main__"],
]
FOLDERS = ("distributed", "state", "step", "tensors")  # whose modules have layers of their own
LAYER_OF = {name: layer for layer, names in enumerate(LAYERS) for name in names}

# What backends may know of the rest: no parameter groups, no ranks, no optimizer.
KNOWN_TO_BACKENDS = {
    "swd_fused.backends",
    *("swd_fused.tensors.bucket", "swd_fused.tensors.element_numbers", "swd_fused.tensors.hyper"),
    "swd_fused.tensors.graphs",
    *("swd_fused.tensors.transfer", "swd_fused.schedule", "swd_fused.options", "swd_fused.source_tree"),
    "swd_fused.user_warning",
    *("swd_fused.state.eight_bit", "swd_fused.state.masters", "swd_fused.state.rounding"),
    "swd_fused._C",
}


def modules() -> dict[str, Path]:
    paths = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return {".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imports_of(path: Path) -> set[str]:
    """The package's modules that a file imports, anywhere but under TYPE_CHECKING."""
    tree = ast.parse(path.read_text())
    typing_only = [
        node for test in ast.walk(tree) if isinstance(test, ast.If) and "TYPE_CHECKING" in ast.unparse(test.test)
        for node in ast.walk(test)
    ]  # fmt: skip
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("swd_fused"):
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            known = {name for name in names if name.removeprefix("swd_fused.") in modules()}
            found |= known or {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("swd_fused")}
    return found


def layer_of(module: str) -> int | None:
    """That of the module, or of the folder that it is in."""
    while module:
        if module in LAYER_OF:
            return LAYER_OF[module]
        module = module.rpartition(".")[0]
    return None


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_point_downwards(module: str) -> None:
    own = layer_of(module)
    if module in FOLDERS:
        return
    assert own is not None, f"{module} has no place in LAYERS"
    for imported in imports_of(modules()[module]):
        name = imported.removeprefix("swd_fused.")
        if name.split(".")[0] == module.split(".")[0] and name not in LAYER_OF:
            continue  # within a folder
        layer = layer_of(name)
        assert layer is None or layer < own, f"{module} imports {imported}, which is above it or beside it"


@pytest.mark.parametrize("module", sorted(name for name in modules() if name.startswith("backends")))
def test_backends_know_buckets_and_the_schedule_only(module: str) -> None:
    for imported in imports_of(modules()[module]):
        assert any(imported == known or imported.startswith(f"{known}.") for known in KNOWN_TO_BACKENDS), imported


@pytest.mark.parametrize("module", sorted(name for name in modules() if not name.startswith("backends")))
def test_only_the_choice_imports_a_backend(module: str) -> None:
    assert all(not name.startswith("swd_fused.backends.") for name in imports_of(modules()[module]))


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
        params, grads_or_params = ["param"], ["grad"]
        exp_avgs, exp_avg_sqs, max_exp_avg_sqs, masters = ["exp_avg"], ["exp_avg_sq"], ["max_exp_avg_sq"], ["master"]

    columns = [name for (name,) in columns_of(Named())]  # type: ignore[arg-type]
    assert [getattr(tables.TENSOR, name) for name in columns] == list(range(len(columns)))


def test_scales_have_the_same_columns_in_python_and_triton() -> None:
    class Named:
        exp_avg_scales, exp_avg_sq_scales = ["exp_avg_scales"], ["exp_avg_sq_scales"]

    scales = [name for (name,) in scales_of(Named())]  # type: ignore[arg-type]
    columns = (*scales, "row_length", "blocks_per_row", "first_block", "block_pitch", "columns")
    assert tables.CODEC.value._fields == columns
    assert BlockNumbers._fields == ("first", "pitch")  # the last two


def test_a_missing_gradient_has_the_same_address_in_all_languages() -> None:
    header = (ROOT / "csrc" / "cpu" / "operands.h").read_text()
    assert f"constexpr int64_t NO_GRAD = {NO_GRAD};" in header
    assert f"TENSOR.grad) != {NO_GRAD}" in Path(passes.__file__).read_text()

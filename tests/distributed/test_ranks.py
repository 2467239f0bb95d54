"""The harness of ranks: what it says of a rank that crashes, raises or hangs."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.distributed import ranks
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.slow  # of what only tests use


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the harness makes its folders in this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def failure(function: Callable[..., Any], *args: Any) -> str:
    with pytest.raises(AssertionError) as error:
        on_ranks(2, function, *args)
    return str(error.value)


def assert_core_is_kept_or_missed(message: str, folder: Path) -> None:
    pattern = Path("/proc/sys/kernel/core_pattern").read_text().strip()
    if pattern[0] in "|/" or resource.getrlimit(resource.RLIMIT_CORE)[1] == 0:
        assert f"kernel.core_pattern is {pattern!r}" in message
        return
    (core,) = folder.glob("core*")
    assert f"core dump: {core}" in message
    assert shutil.which("gdb") is None or "\n#0 " in message, "native stacks"
    with core.open("rb") as file:
        assert file.read(4) == b"\x7fELF"
    core.unlink()  # pytest keeps folders of several runs, and this is large


def frees_what_is_not_allocated() -> None:
    print("about to free")
    if dist.get_rank() == 1:
        block = ctypes.create_string_buffer(64)
        ctypes.CDLL(None).free(ctypes.c_void_p(ctypes.addressof(block) + 16))


def test_a_crash_at_work_tells_all_it_can(folders: Path) -> None:
    message = failure(frees_what_is_not_allocated)
    assert "rank 1 died at work: SIGABRT" in message
    assert re.search(r"free\(\): invalid (pointer|size)", message), "what glibc says"
    assert "about to free" in message, "what the rank had printed"
    assert "Fatal Python error: Aborted" in message
    assert re.search(r'File ".*test_ranks.py", line \d+ in frees_what_is_not_allocated', message), "where it was"
    assert_core_is_kept_or_missed(message, next(folders.glob("*/rank-1")))


def aborts_in_teardown() -> None:
    if dist.get_rank() == 0:
        dist.destroy_process_group = os.abort


def test_a_crash_in_teardown_is_told_from_one_at_work(folders: Path) -> None:
    message = failure(aborts_in_teardown)
    assert "rank 0 died in teardown: SIGABRT" in message
    assert "at work" not in message
    assert_core_is_kept_or_missed(message, next(folders.glob("*/rank-0")))


def raises(number: int) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        raise ValueError(f"{number} is too many")
    time.sleep(1e6)


def test_an_exception_has_its_traceback_and_says_where_the_others_were(folders: Path) -> None:
    message = failure(raises, 17)
    assert "rank 0 failed at work: exit code 1" in message
    assert "ValueError: 17 is too many" in message
    assert "rank 1 was still at work" in message
    assert len(re.findall(r'test_ranks.py", line \d+,? in raises', message)) == 2, "where each of them was"
    assert not list(folders.iterdir()), "the message has all there is"


def test_ranks_that_take_too_long_are_named(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "SECONDS", 0)
    message = failure(raises, 17)
    assert "rank 0 was still" in message
    assert "rank 1 was still" in message
    assert "after 0 s" in message
    assert not list(folders.iterdir())


def prints_and_returns(number: int) -> int:
    print(f"{number} on rank {dist.get_rank()}")
    return number + dist.get_rank()


def test_answers_come_in_order_and_what_ranks_print_is_not_lost(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_ranks(2, prints_and_returns, 17) == [17, 18]
    printed = capsys.readouterr().out
    assert "17 on rank 0" in printed
    assert "17 on rank 1" in printed
    assert not list(folders.iterdir())

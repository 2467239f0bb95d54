"""Make Triton's interpreter faster where kernels call functions: twice as fast for ours. Seen in Triton 3.7.1.

Each call, of the kernel and of any function within it, looks through all of Triton's language for builtins to replace,
though after the first of these calls there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

original_patch_lang = interpreter._patch_lang


def install() -> None:
    interpreter._patch_lang = patch_lang


def patch_lang(fn: Callable[..., Any]) -> Any:
    languages = [value for value in fn.__globals__.values() if value in (tl, tl.core)]
    if any(tl.core.is_builtin(language.load) for language in languages):
        return original_patch_lang(fn)
    return interpreter._LangPatchScope()

"""Calls of functions in PTX, such as pow in fp64, written out in place: the emulator then needs no stack.

A copy of the function for each call, with names of its own: parameters become registers, a return jumps to the end.
"""

from __future__ import annotations

import re
from itertools import count

CALL_BLOCK = re.compile(r"\{\s*(\.param[^{}]*?\bcall(?:\.uni)?\s[^{}]*?)\}", re.S)
CALL = re.compile(r"call(?:\.uni)?\s+(?:\(([^)]*)\)\s*,\s*)?([\w$]+)\s*(?:,\s*\(([^)]*)\))?\s*;")
FUNCTION = r"\.func\s*(?:\(([^()]*)\))?\s*{name}\s*\(([^()]*)\)\s*\{{"
REGISTER = re.compile(r"%(?!tid|ntid|ctaid|nctaid|laneid|warpid)")


def body_from(text: str, start: int) -> str:
    """What stands between the brace that ends before `start` and its partner."""
    depth, end = 1, start
    while depth:
        depth += (text[end] == "{") - (text[end] == "}")
        end += 1
    return text[start : end - 1]


def write_out_calls(body: str, module: str) -> str:
    number = count()
    while block := CALL_BLOCK.search(body):
        body = body[: block.start()] + _written_out(block[1], module, f"call{next(number)}$") + body[block.end() :]
    return body


def _written_out(block: str, module: str, prefix: str) -> str:
    """`prefix` stands before each name that belongs to this call only."""
    call = CALL.search(block)
    returned, name, given = call[1] or "", call[2], call[3] or ""
    function = re.search(FUNCTION.format(name=re.escape(name)), module)
    if function is None:
        raise NotImplementedError(f"the function {name} is called and not in the PTX")
    inside = REGISTER.sub(f"%{prefix}", body_from(module, function.end()))
    inside = re.sub(r"(\$L_\w+)", rf"{prefix}\1", inside)
    inside = re.sub(r"\bret\s*;", f"bra {prefix}return;", inside)
    parameters = _names(function[2]) + _names(function[1] or "")
    for parameter, argument in zip(parameters, _names(given) + _names(returned), strict=True):
        inside = inside.replace(f"[{parameter}]", f"[{argument}]")
    text = f"{block[: call.start()]}{inside} {prefix}return: {block[call.end() :]}"
    text = re.sub(r"\.param\s+\.(\w+)\s+([\w$]+)\s*;", rf".reg .\1 %{prefix}\2;", text)
    text = re.sub(r"\bst\.param\.[a-z](\d+)\s+\[([\w$]+)\]\s*,\s*([^;]+);", rf"mov.b\1 %{prefix}\2, \3;", text)
    return re.sub(r"\bld\.param\.[a-z](\d+)\s+([^,]+),\s*\[([\w$]+)\]\s*;", rf"mov.b\1 \2, %{prefix}\3;", text)


def _names(parameters: str) -> list[str]:
    return [p.split()[-1] for p in parameters.split(",") if p.strip()]

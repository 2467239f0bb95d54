"""PTX text to instructions: one kernel of one module, as Triton wrote it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .ptx_types import TYPES

CLASS_WIDTH = {name: t.width for name, t in TYPES.items()}


@dataclass(frozen=True)
class Instruction:
    text: str
    opcode: str
    operands: tuple[str, ...]
    guard: str | None = None
    guard_negated: bool = False

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    @property
    def base(self) -> str:
        return self.parts[0]


@dataclass(frozen=True)
class Parameter:
    name: str
    offset: int
    size: int


@dataclass
class Code:
    name: str
    parameters: list[Parameter]
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    registers: dict[str, int] = field(default_factory=dict)  # name to width in bits; 1 is a predicate
    shared: dict[str, int] = field(default_factory=dict)  # symbol to address
    static_shared_bytes: int = 0


def split_operands(text: str) -> list[str]:
    """At commas outside brackets."""
    operands, depth, current = [], 0, ""
    for c in text:
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            operands.append(current.strip())
            current = ""
        else:
            current += c
    return [*operands, current.strip()] if current.strip() else operands


def elements(operand: str) -> list[str]:
    """The registers of a vector operand; of a plain one, itself."""
    return split_operands(operand[1:-1]) if operand.startswith("{") else [operand]


def parse(ptx: str, name: str | None = None) -> Code:
    text = re.sub(r"/\*.*?\*/", "", re.sub(r"//[^\n]*", "", ptx), flags=re.S)
    wanted = re.escape(name) if name else r"[\w$]+"
    entry = re.search(rf"\.entry\s+({wanted})\s*\((.*?)\)(.*?)\{{", text, re.S)
    if entry is None:
        raise ValueError(f"no kernel {name or ''} in the PTX: looked for .entry NAME(...)")
    code = Code(entry[1], _parameters(entry[2]))
    body = _body_from(text, entry.end())
    _shared_symbols(text, code)
    _registers(body, code)
    _instructions(body, code)
    return code


def _body_from(text: str, start: int) -> str:
    """Returns what stands between the brace that ends before `start` and its partner."""
    depth, end = 1, start
    while depth:
        depth += (text[end] == "{") - (text[end] == "}")
        end += 1
    return text[start : end - 1]


def _parameters(text: str) -> list[Parameter]:
    parameters, offset = [], 0
    for declaration in split_operands(text):
        size = CLASS_WIDTH[re.search(r"\.param\s+\.(\w+)", declaration)[1]] // 8
        offset = -(-offset // size) * size
        parameters.append(Parameter(declaration.split()[-1], offset, size))
        offset += size
    return parameters


def _shared_symbols(text: str, code: Code) -> None:
    """Static arrays first, then those of open size, which all begin where the dynamic shared memory does."""
    arrays = re.findall(r"\.shared\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d*)\]", text)
    for align, name, size in sorted(arrays, key=lambda a: not a[2]):
        start = -(-code.static_shared_bytes // int(align)) * int(align)
        code.shared.setdefault(name, start)
        code.static_shared_bytes = start + int(size or 0)


def _registers(body: str, code: Code) -> None:
    for kind, names in re.findall(r"\.reg\s+\.(\w+)\s+([^;]*);", body):
        for name in names.split(","):
            if many := re.match(r"\s*(%[\w$]+)<(\d+)>", name):
                code.registers |= {f"{many[1]}{i}": CLASS_WIDTH[kind] for i in range(int(many[2]))}
            else:
                code.registers[name.strip()] = CLASS_WIDTH[kind]


def _instructions(body: str, code: Code) -> None:
    body = re.sub(r"^\s*\.(loc|file)[^\n]*$", "", body, flags=re.M)
    for statement in body.split(";"):
        statement = statement.strip()
        while True:
            if label := re.match(r"([\w$]+):(?!:)", statement):
                code.labels[label[1]] = len(code.instructions)
                statement = statement[label.end() :].strip()
            elif statement.startswith(("{", "}")):
                statement = statement[1:].strip()
            else:
                break
        if statement and not statement.startswith("."):
            code.instructions.append(_instruction(statement))


def _instruction(statement: str) -> Instruction:
    text = " ".join(statement.split())
    guard = re.match(r"@(!?)([%\w$]+)\s+", text)
    opcode, _, operands = text[guard.end() if guard else 0 :].partition(" ")
    return Instruction(
        text,
        opcode,
        tuple(" ".join(o.split()) for o in split_operands(operands)),
        guard[2] if guard else None,
        bool(guard and guard[1]),
    )

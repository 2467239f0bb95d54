"""Moments in 8 bits in NumPy, written from docs/notes/numerics.md. Nothing of the package is used here."""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from tests.definition import AdamS, Array

BLOCK = 256
LOW = 0xFFFFFFFF

Number = TypeVar("Number", int, Array)


def scrambled(x: Number) -> Number:
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & LOW
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & LOW
    return x ^ (x >> 16)


def moments_key(seed: int, tensor: int, step: int) -> int:
    start = scrambled((seed & LOW) ^ scrambled(((seed >> 32) + 1) & LOW))
    key = scrambled((scrambled((start + tensor) & LOW) + step) & LOW)
    return scrambled((key + 1) & LOW)


def random_bytes(key: int, block: Number, element: Number) -> tuple[Number, Number]:
    pair = block * (BLOCK // 2) + element // 2
    bits = scrambled(((key + scrambled(pair >> 32)) & LOW) ^ ((pair * 0x9E3779B9) & LOW)) >> (16 * (element % 2))
    return bits & 0xFF, bits >> 8 & 0xFF


def is_coded(shape: tuple[int, ...], least_numel: int = 4096) -> bool:
    columns = int(np.prod(shape[1:])) if len(shape) > 1 else int(np.prod(shape))
    return int(np.prod(shape)) >= least_numel and columns >= 16


class EightBitAdamS(AdamS):
    """Rounds the moments of large tensors after each step."""

    seed = 0
    least_numel = 4096

    def step(self, grads: list[Array | None]) -> None:
        super().step(grads)
        for i, grad in enumerate(grads):
            if grad is not None and is_coded(self.params[i].shape, self.least_numel):
                key = moments_key(self.seed, i, self.steps[i])
                self.exp_avg[i], self.exp_avg_sq[i] = self.rounded(self.exp_avg[i], self.exp_avg_sq[i], key)

    def rounded(self, exp_avg: Array, exp_avg_sq: Array, key: int) -> tuple[Array, Array]:
        """Codes and scales of both moments, and back."""
        shape = exp_avg.shape
        rows = shape[0] if len(shape) > 1 else 1
        m = exp_avg.astype(np.float32).reshape(rows, -1)
        root = np.sqrt(exp_avg_sq).astype(np.float32).reshape(rows, -1)
        blocks_of_row = -(-m.shape[1] // BLOCK)
        for row in range(rows):
            for b in range(blocks_of_row):
                part = np.s_[row, b * BLOCK : (b + 1) * BLOCK]
                noise = np.array([self.noise(key, row * blocks_of_row + b, e) for e in range(m[part].size)])
                m[part] = self.coded(m[part], 127, noise[:, 0], -127)
                root[part] = self.coded(root[part], 255, noise[:, 1], 1)
        return m.reshape(shape).astype(np.longdouble), root.reshape(shape).astype(np.longdouble) ** 2

    def noise(self, key: int, block: int, element: int) -> tuple[int, int]:
        return random_bytes(key, block, element)

    def coded(self, values: Array, largest: int, noise: Array, least: int) -> Array:
        scale = np.abs(values).max() * np.float32(1 / largest)
        if not scale > 0:
            return np.zeros_like(values)
        fixed = np.rint(values * (np.float32(256) / scale)).astype(np.int64)
        return np.clip((fixed + noise) >> 8, least, largest).astype(np.float32) * scale

"""Kernels of Triton are compiled, or found in its cache; prints the seconds, and those of processors.

They are compiled for a GPU (SM 9.0) that need not be here: nothing is launched.
"""

import json
import os
import time

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def softmax(out, x, n, BLOCK: tl.constexpr):
    row, columns = tl.program_id(0), tl.arange(0, BLOCK)
    value = tl.load(x + row * n + columns, mask=columns < n, other=-float("inf"))
    value = tl.exp(value - tl.max(value, 0))
    tl.store(out + row * n + columns, value / tl.sum(value, 0), mask=columns < n)


@triton.jit
def matmul(c, a, b, m, n, k, BLOCK: tl.constexpr, DEPTH: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for at in range(0, k, DEPTH):
        inner = at + tl.arange(0, DEPTH)
        left = tl.load(a + rows[:, None] * k + inner[None, :], mask=(rows < m)[:, None] & (inner < k)[None, :])
        right = tl.load(b + inner[:, None] * n + columns[None, :], mask=(inner < k)[:, None] & (columns < n)[None, :])
        total += tl.dot(left, right)
    place = c + rows[:, None] * n + columns[None, :]
    tl.store(place, total, mask=(rows < m)[:, None] & (columns < n)[None, :])


def softmaxes():
    types = {"out": "*fp32", "x": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    return [ASTSource(softmax, types, constexprs={"BLOCK": 1 << power}) for power in range(8, 15)]


def matmuls():
    types = {"c": "*fp32", "a": "*fp16", "b": "*fp16", **dict.fromkeys("mnk", "i32")}
    types |= {"BLOCK": "constexpr", "DEPTH": "constexpr"}
    sizes = [(block, depth) for block in (32, 64, 128) for depth in (32, 64)]
    return [ASTSource(matmul, types, constexprs={"BLOCK": block, "DEPTH": depth}) for block, depth in sizes]


began, cpu = time.perf_counter(), sum(os.times()[:4])
for source in [*softmaxes(), *matmuls()]:
    triton.compile(source, target=GPUTarget("cuda", 90, 32))
print(json.dumps({"seconds": time.perf_counter() - began, "cpu": sum(os.times()[:4]) - cpu}))

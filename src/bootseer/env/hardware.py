"""What processors and GPUs of this node can do, and which texts of set-up commands ask for it."""

from __future__ import annotations

import re
from pathlib import Path

from bootseer.patterns import pattern

_CPU = re.compile(
    r"s?sse|avx|amx|fma|f16c|bmi|v?aes|sha|gfni|v?pclmul|adx|popcnt|movbe|xop|sve|asimd|fphp|bf16|i8mm|lzcnt|abm|rdrnd"
)
_MOST = 1 << 20
_OF_CPU = pattern(r"=[ \t]*[\"']?native\b|-xHost\b|\b(?:lscpu|cpuinfo)\b")
_COUNTS = pattern(r"\bgrep[ \t]+-c[ \t]+[\"']?\^?processor\b[\"']?[ \t]+/proc/cpuinfo")
"""How many there are, for ``make -j``."""
_OF_GPU = pattern(
    r"\b(?:nvidia|rocm|amd)-smi\b|\brocminfo\b|\bget_device_(?:capability|name)\b|\barch=native\b"
    r"|ARCHITECTURES[ =\"']+native"
)
CPU, GPU = "_cpu", "_gpu"
"""Named as variables are, and compared like these."""
SHOWN = {CPU: "the processor", GPU: "the GPU"}


def counted(text: str) -> set[str]:
    """Which of the two decide what a program with this ``text`` makes."""
    text = _COUNTS.sub("", text) if "cpuinfo" in text else text
    return {name for name, shape in ((CPU, _OF_CPU), (GPU, _OF_GPU)) if shape.search(text)}


def value(name: str) -> str | None:
    """What is compared of ``name``; None where it is a variable, or there is no such thing here."""
    return (cpu() if name == CPU else gpu() if name == GPU else "") or None


def cpu() -> str:
    """What the compiler may use (``-march=native``)."""
    for line in _read("/proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join(sorted(flag for flag in value.split() if _CPU.match(flag)))
    return ""


def gpu() -> str:
    """Models and drivers of the node's GPUs; a model has one SM."""
    found = set[str]()
    for path in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        found |= {line.partition(":")[2].strip() for line in _read(path).splitlines() if line.startswith("Model")}
    if driver := re.search(r"Module\S*(?: for \S+)?\s+([\d.]+)", _read("/proc/driver/nvidia/version")):
        found.add(f"driver {driver[1]}")
    for path in Path("/sys/class/kfd/kfd/topology/nodes").glob("*/properties"):
        found |= set(re.findall(r"gfx_target_version [1-9]\d*", _read(path)))
    return ", ".join(sorted(found))


def _read(path: str | Path) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read(_MOST)
    except OSError:
        return ""

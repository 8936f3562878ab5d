"""The machine: its device, driver and packages."""

from __future__ import annotations

import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch

from tests.gpu.step import DEVICE, require_device, write_result

PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "grpcio",
    "protobuf",
    "pydantic",
    "pytest",
)


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def processor() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), "unknown")


require_device()
found = {package: installed(package) for package in PACKAGES}
found |= {"processor": processor(), "system": platform.platform(), "device": "none"}
if DEVICE.type == "cuda":
    facts = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip()
    except OSError as error:
        driver = str(error)
    found |= {
        "device": facts.name,
        "multiprocessors": facts.multi_processor_count,
        "memory_bytes": facts.total_memory,
        "capability": f"{facts.major}.{facts.minor}",
        "cuda": torch.version.cuda,
        "driver": driver,
    }
write_result(f"{found['device']}; torch {found['torch']}, triton {found['triton']}", **found)

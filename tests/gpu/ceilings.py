"""The device's ceilings: the speed of a copy, of bfloat16 products, and of launches."""

from __future__ import annotations

import torch

from tests.gpu.step import DEVICE, DRY, require_device, seconds, write_result

COPY_BYTES = 1 << (20 if DRY else 32)
PRODUCTS = (
    ((64, 64, 64), (8, 64, 64))
    if DRY
    else ((8192, 8192, 8192), (8, 4096, 14336), (64, 4096, 14336), (256, 4096, 14336))
)
TIMES = 3 if DRY else 20
LAUNCHES = 200


def copied_gb_per_s() -> float:
    """Gigabytes read and written in a second."""
    source = torch.ones(COPY_BYTES // 4, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / seconds(lambda: target.copy_(source), TIMES) / 1e9


def product(rows: int, inner: int, outputs: int) -> dict[str, float]:
    a, b = (torch.randn(*size, device=DEVICE).bfloat16() for size in ((rows, inner), (outputs, inner)))
    took = seconds(lambda: torch.nn.functional.linear(a, b), TIMES)
    return {
        "rows": rows,
        "inner": inner,
        "outputs": outputs,
        "us": round(1e6 * took, 2),
        "tflops": round(2 * rows * inner * outputs / took / 1e12, 3),
        "weight_gb_per_s": round(2 * inner * outputs / took / 1e9, 1),
    }


def launch_us() -> dict[str, float]:
    """Microseconds of a kernel on one number: launched one by one, and in a graph of LAUNCHES."""
    number = torch.zeros(1, device=DEVICE)

    def launches() -> None:
        for _ in range(LAUNCHES):
            number.add_(1)

    found = {"eager": 1e6 * seconds(launches, TIMES) / LAUNCHES}
    if DEVICE.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            launches()
        found["in a graph"] = 1e6 * seconds(graph.replay, TIMES) / LAUNCHES
    return {form: round(took, 3) for form, took in found.items()}


require_device()
copied = copied_gb_per_s()
print(f"copy of {COPY_BYTES} bytes: {copied:.1f} GB/s, read and written")
products = []
for sizes in PRODUCTS:
    products.append(product(*sizes))
    print(products[-1])
launched = launch_us()
print(f"a launch: {launched} us")
best = max(each["tflops"] for each in products)
line = f"copy {copied:.0f} GB/s, bf16 products {best:.1f} TFLOP/s, a launch in us: {launched}"
write_result(line, copy_gb_per_s=round(copied, 1), products=products, launch_us=launched)

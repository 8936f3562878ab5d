"""Regenerate the code of the .proto files; with --check, fail if it is stale instead.

Generated files are never edited. `make check` runs it with --check.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(out: Path) -> list[Path]:
    """Write the generated code of every .proto file below this folder into `out`. Returns the files' relative paths."""
    sources = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.proto"))
    command = [sys.executable, "-m", "grpc_tools.protoc", f"--proto_path={ROOT}"]
    command += [f"--{kind}_out={out}" for kind in ("python", "mypy", "grpc_python", "mypy_grpc")]
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"  # protoc finds its plugins on this path
    done = subprocess.run([*command, *map(str, sources)], env={"PATH": path}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    written = sorted(file.relative_to(out) for suffix in SUFFIXES for file in out.rglob(f"*{suffix}"))
    return [file for file in written if (out / file).stat().st_size]


def main() -> int:
    if sys.argv[1:] not in ([], ["--check"]):
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        stale = []
        for file in generate(fresh):
            there = ROOT / file
            if not there.exists() or there.read_bytes() != (fresh / file).read_bytes():
                stale.append(str(file))
                if not sys.argv[1:]:
                    there.write_bytes((fresh / file).read_bytes())
    if sys.argv[1:] and stale:
        print(f"generated code is stale; run python protos/generate.py: {', '.join(stale)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The demo pair's training text as files for `dendro train drafter`: `python -m cluster.demo.texts FOLDER`.

The held-out modules are left out, so a drafter that is trained on the folder can be measured on their passages.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cluster.demo.corpus import training_files


def write_texts(folder: Path) -> tuple[int, int]:
    """Write every file of the corpus under its name; returns their number and their bytes."""
    files = training_files()
    for source in files:
        file = folder / source.name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(source.text.encode())
    return len(files), sum(len(source.text.encode()) for source in files)


def main(folder: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    """Write the standard library of the running Python to a folder, without the modules that the demo holds out."""
    count, size = write_texts(folder)
    print(f"{count:,} files, {size:,} bytes in {folder}")


if __name__ == "__main__":
    typer.run(main)

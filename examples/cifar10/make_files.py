"""Makes small files of CIFAR-10's binary format, to try the training without the data set:

python make_files.py FOLDER --records 160
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from cifar import TEST, TRAINING, make_files


def main(
    folder: Annotated[Path, typer.Argument(help="the folder to write to")],
    records: Annotated[int, typer.Option(min=1, help="images in each file; CIFAR-10 has 10000")] = 160,
    seed: Annotated[int, typer.Option(min=0, help="other images for another number")] = 0,
) -> None:
    """Write five files for training and one for testing, of striped images in ten directions and colours."""
    make_files(folder, records, seed)
    print(f"{len(TRAINING) + len(TEST)} files of {records} images are in {folder}")


if __name__ == "__main__":
    typer.run(main)

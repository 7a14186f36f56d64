"""Fusion policies beside each other and DDP: `partway bench fusion`, which saves its figures and its plot in out/.

python benchmarks/fusion.py [--model gpt2] [--world 2] [--rounds 15] [--quick] [--timeline FILE] ...
"""

from __future__ import annotations

import sys
from pathlib import Path

from partway.commands.cli import app

if __name__ == "__main__":
    Path("out").mkdir(exist_ok=True)
    app(["bench", "fusion", "--json", "out/fusion.json", "--plot", "out/fusion.png", *sys.argv[1:]])

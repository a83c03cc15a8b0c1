"""`python -m omni_notebook`: the same as the command `omni-notebook`."""

from __future__ import annotations

import sys

from omni_notebook.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m omni_notebook.server --model MODEL …`: the same as `omni-notebook serve MODEL …`."""

from __future__ import annotations

import sys

from omni_notebook.errors import ArgumentError, OmniError
from omni_notebook.server import command, words

_PROG = "python -m omni_notebook.server"


def main() -> int:
    """The exit status: 0 ended, 1 it failed, 2 bad input, 130 interrupted."""
    try:
        parser = words.serve_parser(_PROG, "Serve an engine over HTTP until Ctrl-C.")
        return command.run(parser.parse_args(sys.argv[1:]))
    except (OmniError, OSError) as error:
        sys.stderr.write(f"{_PROG}: {' '.join(str(error).split())}\n")
        return 2 if isinstance(error, ArgumentError) else 1


if __name__ == "__main__":
    sys.exit(main())

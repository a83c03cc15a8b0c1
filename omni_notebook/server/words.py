"""The words of `omni-notebook serve` and of `python -m omni_notebook.server`."""

from __future__ import annotations

import argparse

from omni_notebook.errors import ArgumentError
from omni_notebook.verbs.engines import add_engine
from omni_notebook.verbs.lifecycle import add_stage_options
from omni_notebook.verbs.parsing import CommandParser
from omni_notebook.verbs.serving import KEY_VARIABLE, add_address

_END = f"""\
The model is demo, a pipeline file or a model folder; with --engine vllm-omni what that takes. Listens on 127.0.0.1;
another --host needs a key, which {KEY_VARIABLE} may hold instead of --api-key. Ctrl-C or SIGTERM: requests in
progress end, then memory goes back."""


def serve_parser(prog: str, about: str) -> CommandParser:
    """The specification's options, and those of a stage."""
    parser = CommandParser(
        prog=prog,
        description=about,
        epilog=_END,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL", help="what to serve")
    add("--model", dest="named_model", metavar="MODEL", help="the same")
    add("--omni", action="store_true", help="accepted, because vLLM-Omni's command has it: every pipeline is served")
    add("--enable-sleep-mode", action="store_true", help="let stages sleep; without it sleep is refused")
    add_engine(parser)
    add_address(parser)
    add_stage_options(parser)
    return parser


def model_of(args: argparse.Namespace) -> str:
    """What to serve.

    Raises:
        ArgumentError: it was not said, or twice.
    """
    said = [model for model in (args.model, args.named_model) if model is not None]
    if len(said) != 1:
        what = "no model was named" if not said else f"two models were named, {said[0]} and {said[1]}"
        msg = f"{what}; name one, for example: serve demo. Nothing was started"
        raise ArgumentError(msg)
    return str(said[0])

"""The published signatures that `engine/upstream` relies on, read from source by its syntax; nothing is imported.

    python tests/engine/upstream/signatures.py FOLDER > tests/engine/upstream/signatures_0_30.json

FOLDER holds `vllm_omni`, as a wheel unpacks.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

METHODS = {
    "abort",
    "add_lora",
    "check_health",
    "collective_rpc",
    "generate",
    "is_paused",
    "is_sleeping",
    "list_loras",
    "pause_generation",
    "pin_lora",
    "remove_lora",
    "resume_generation",
    "shutdown",
    "sleep",
    "wake_up",
}
FIELDS = {
    "OmniACK": "diffusion/data.py",
    "OmniRequestOutput": "outputs/__init__.py",
    "OmniDiffusionSamplingParams": "inputs/data.py",
}
ENTRY = ("entrypoints/async_omni_base.py", "entrypoints/async_omni.py")


def classes(path: Path) -> dict[str, ast.ClassDef]:
    """A file's classes by name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, object]:
    """Parameters in their order, how they are passed, and their defaults; annotations are left out."""
    args = node.args
    given = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(given) - len(args.defaults)) + [ast.unparse(one) for one in args.defaults]
    named = [None if one is None else ast.unparse(one) for one in args.kw_defaults]
    return {
        "async": isinstance(node, ast.AsyncFunctionDef),
        "by place": [[one.arg, default] for one, default in zip(given, defaults, strict=True)],
        "by name": [[one.arg, default] for one, default in zip(args.kwonlyargs, named, strict=True)],
    }


def fields(node: ast.ClassDef) -> dict[str, str | None]:
    """A dataclass's fields and their defaults."""
    return {
        one.target.id: None if one.value is None else ast.unparse(one.value)
        for one in node.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }


def read(root: Path) -> dict[str, dict[str, object]]:
    """`{"AsyncOmni.sleep": signature, "OmniACK": fields}` of a `vllm_omni` under `root`."""
    found: dict[str, dict[str, object]] = {}
    for name in ENTRY:
        path = root / "vllm_omni" / name
        for one in classes(path).values() if path.exists() else ():
            if one.name in {"AsyncOmni", "AsyncOmniBase"}:
                found |= {
                    f"AsyncOmni.{method.name}": signature(method)
                    for method in one.body
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name in METHODS
                }
    for name, place in FIELDS.items():
        found[name] = dict(fields(classes(root / "vllm_omni" / place)[name]))
    return dict(sorted(found.items()))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(read(Path(sys.argv[1])), indent=1) + "\n")

"""What a platform says about itself, and what its checks share. Found out without torch, vLLM or a device context."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from pathlib import Path

import msgspec

from omni_notebook.errors import UnsupportedError


class PlatformInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One platform: whether a pool can be made, and why not, or how it measures.

    `run_on_hardware`: whether this project's pool has run on such a device; if not, only against recorded fakes.
    """

    platform: str
    supported: bool
    reason: str
    run_on_hardware: bool = True


def why_no_extension(package: str, extension: str) -> str | None:
    """Why a package's compiled module can not be had: "is not installed", "was built without …"; None: it is there."""
    folders = folders_of(package)
    if not folders:
        return "is not installed"
    if not any(list(folder.glob(f"{extension}*.so")) for folder in folders):
        return f"was built without {extension}"
    return None


def folders_of(package: str) -> list[Path]:
    """Where a package's modules are; empty where it is not installed."""
    try:
        found = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return []
    return [Path(folder) for folder in (found.submodule_search_locations if found else None) or ()]


def version_of(package: str) -> str:
    """An installed package's version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def refuse(platform: str, why_not: str | None) -> None:
    """Raise UnsupportedError if there is a reason why a platform has no pool here."""
    if why_not is not None:
        msg = f"{platform}: {why_not}"
        raise UnsupportedError(msg)


def whole(platform: str, why_not: str | None, how: str) -> PlatformInfo:
    """What a platform that has not run on hardware says: why not, else how it works."""
    supported = why_not is None
    reason = how if why_not is None else f"{platform}: {why_not}"
    return PlatformInfo(platform=platform, supported=supported, reason=reason, run_on_hardware=False)

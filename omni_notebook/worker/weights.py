"""One rank's weights: where they came from, which version they are, whether they can be had again."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from omni_notebook.errors import ConfigError, NeedsWeightsError, OmniError
from omni_notebook.memory.base import WEIGHTS
from omni_notebook.models.loaders import checkpoint_files

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.worker.runner import Runner

DIGEST_CHARS = 10
Fingerprint = tuple[tuple[str, int, int], ...]


class WeightsMismatchError(OmniError):
    """Reloaded weights are not those that were loaded before."""

    error_code = "CHECKSUM"


class _Known(msgspec.Struct, frozen=True):
    """Where weights came from, what they are called, the checksum of all of them, and the files' state."""

    source: Path | None
    version: str
    digest: str
    files: Fingerprint


class Weights:
    """The books about one rank's weights.

    `valid`: the mapped weights are whole. `lost`: a sleep discarded contents that no path reproduces.
    `digest`: the checksum of `source` as it was when it was loaded.
    """

    def __init__(self, runner: Runner, pool: MemoryPool) -> None:
        self._runner = runner
        self._pool = pool
        self._known = _Known(None, "", "", ())
        self._before: _Known | None = None
        self._recorded = False
        self.version = ""
        self.valid = False
        self.lost = False

    def prepare(self, folder: Path) -> None:
        """Before a `load` on all ranks: does the checkpoint fit here?

        Raises:
            ConfigError: it does not; nothing changed.
        """
        self._runner.check_weights(folder)
        self._before = None

    def load(self, folder: Path, version: str | None) -> None:
        """Load a checkpoint folder and remember its checksum; the default version is the checksum's start.

        Raises:
            ConfigError: the checkpoint does not fit; raised before a parameter is touched.
        """
        self._runner.check_weights(folder)
        before, self._before = msgspec.structs.replace(self._known, version=self.version), None
        self.valid = self._recorded = False
        self._runner.load_weights(folder)
        digest = self._pool.record_checksum(WEIGHTS)
        self.version = version or digest[:DIGEST_CHARS]
        source = folder.resolve()
        self._known, self._before = _Known(source, self.version, digest, _fingerprint(source)), before
        self.valid = self._recorded = True
        self.lost = False

    def revoke(self) -> None:
        """Void the weights, because a rank could not load its part of them; a `reload` takes those before `prepare`."""
        if self._before is not None:
            self._known, self._before = self._before, None
            self.version = self._known.version
            self._recorded = False
        self.valid = False

    def reload(self, between: Callable[[], None] | None = None) -> None:
        """Load the last checkpoint again into mapped memory; `verify` tells whether it is the same.

        `between` is called before each tensor and may raise, which ends the reload.

        Raises:
            NeedsWeightsError: there is no path to load from.
            ConfigError: the checkpoint is gone or does not fit.
        """
        if self._known.source is None:
            msg = "no checkpoint path reproduces these weights; call load_weights(stage_id, source)"
            raise NeedsWeightsError(msg)
        self._runner.load_weights(self._known.source, between)  # checks the files before it touches a parameter

    def verify(self) -> None:
        """Compare with the checksum taken at load.

        Raises:
            WeightsMismatchError: the contents differ.
        """
        if not self._as_loaded():
            msg = (
                f"the checkpoint {self._known.source} is not the one that was loaded (its checksum differs); put the "
                "old file back and wake again, or call wake_up(reload=False) and load_weights(stage_id, source) to "
                "take it"
            )
            raise WeightsMismatchError(msg)

    def _as_loaded(self) -> bool:
        if self._recorded:
            return self._pool.verify_checksum(WEIGHTS)
        self._recorded = self._pool.record_checksum(WEIGHTS) == self._known.digest  # the pool's record is of others
        return self._recorded

    def why_unrecoverable(self, *, modified: bool) -> str | None:
        """Why a level 2 could not be undone, or None if it can."""
        source = self._known.source
        if source is None:
            return "the weights came from no checkpoint path"
        if modified:
            return f"the weights were changed in memory since {source} was loaded"
        try:
            self._runner.check_weights(source)
        except ConfigError as error:
            return f"the checkpoint can not be loaded any more ({error})"
        if _fingerprint(source) != self._known.files:
            return f"the files of {source} were changed since they were loaded"
        return None


def _fingerprint(folder: Path) -> Fingerprint:
    """Each file's name, size and time of change (ns): cheap, and different once someone has written to it."""
    stats = [(path.name, path.stat()) for path in checkpoint_files(folder)]
    return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)

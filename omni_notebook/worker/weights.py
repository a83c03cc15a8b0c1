"""One rank's weights: where they came from, which version they are, whether they can be had again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from omni_notebook.errors import ConfigError, NeedsWeightsError, OmniError
from omni_notebook.worker.intake import Intake

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from omni_notebook.memory.base import MemoryPool
    from omni_notebook.worker.runner import Loading
    from omni_notebook.worker.tensors import TensorChunk, TensorHeader

DIGEST_CHARS = 10
NO_SOURCE = "no checkpoint path reproduces these weights; call load_weights(stage_id, source)"
Fingerprint = tuple[tuple[str, int, int], ...]


class WeightsMismatchError(OmniError):
    """Reloaded weights are not those that were loaded before."""

    error_code = "CHECKSUM"


class _Known(msgspec.Struct, frozen=True):
    """Where weights came from (None: no path), what they are called, each tag's checksum, and the files' state."""

    source: Path | None
    version: str
    digests: dict[str, str]
    files: Fingerprint


class Weights:
    """The books about one rank's weights.

    `missing`: of the tags that hold weights (`tags`), those without valid contents; `valid`: none is missing.
    `lost`: a sleep discarded contents that no path reproduces.
    They come from a checkpoint folder (`prepare`, `load`), or as tensors that no path reproduces (`prepare_tensors`,
    `take` again and again, `finish`).
    """

    def __init__(self, runner: Loading, pool: MemoryPool) -> None:
        self._runner = runner
        self._pool = pool
        self._known = _Known(None, "", {}, ())
        self._before: _Known | None = None
        self._intake: Intake | None = None
        self._recorded: set[str] = set()
        self._missing: frozenset[str] | None = None
        self.version = ""
        self.lost = False

    @property
    def tags(self) -> tuple[str, ...]:
        """The pool's tags that hold weights."""
        return self._runner.weight_tags

    @property
    def missing(self) -> frozenset[str]:
        """Tags whose weights are not whole."""
        return frozenset(self.tags) if self._missing is None else self._missing

    @missing.setter
    def missing(self, tags: frozenset[str]) -> None:
        self._missing = tags

    @property
    def valid(self) -> bool:
        """Whether the weights are whole."""
        return not self.missing

    @property
    def source(self) -> Path | None:
        """The checkpoint folder that a `reload` reads, if there is one."""
        return self._known.source

    @property
    def replaced(self) -> bool:
        """Whether others were loaded since the last `prepare` or `prepare_tensors`."""
        return self._before is not None

    def prepare(self, folder: Path) -> None:
        """Before a `load` on all ranks: does the checkpoint fit here?

        Raises:
            ConfigError: it does not; nothing changed.
        """
        self._runner.check_weights(folder)
        self._intake, self._before = None, None

    def load(self, folder: Path, version: str | None) -> None:
        """Load a checkpoint folder and remember its checksum; the default version is the checksum's start.

        Raises:
            ConfigError: the checkpoint does not fit; raised before a parameter is touched.
        """
        self._runner.check_weights(folder)
        self._before = None
        self._void()
        self._runner.load_weights(folder)
        self._accept(folder.resolve(), version)

    def adopt(self, source: Path | None, version: str | None) -> None:
        """Take what is in memory for whole weights: somebody else has loaded them from `source` (None: from no path).

        Raises:
            ConfigError: `source` can not be read.
        """
        if source is not None:
            self._runner.check_weights(source)
        self._accept(None if source is None else source.resolve(), version)

    def _accept(self, source: Path | None, version: str | None) -> None:
        """What is in memory now is whole: name it, and remember what was known before, for `revoke`."""
        before = msgspec.structs.replace(self._known, version=self.version)
        digests = {tag: self._pool.record_checksum(tag) for tag in self.tags}
        self.version = version or _together(digests)[:DIGEST_CHARS]
        files = () if source is None else self._fingerprint(source)
        self._known, self._before = _Known(source, self.version, digests, files), before
        self._missing, self._recorded = frozenset(), set(digests)
        self.lost = False

    def _void(self) -> None:
        """The weights are being written to: nothing is known of them."""
        self._missing, self._recorded = None, set()

    def prepare_tensors(self, headers: Sequence[TensorHeader] | None) -> None:
        """Before the first `take`: do the tensors fit here, where all of them are known already?

        Raises:
            ConfigError: they do not; nothing changed.
        """
        intake = Intake(self._runner.places())
        if headers is not None:
            intake.check_all(headers)
        self._intake, self._before = intake, None

    def take(self, chunk: TensorChunk) -> None:
        """Write some tensors; from the first one on the weights are not valid, until `finish`.

        Raises:
            ConfigError: one does not fit, or with the last chunk one is missing; nothing of this chunk was written.
        """
        intake = self._opened()
        intake.check(chunk)
        self._void()
        intake.write(chunk)

    def finish(self, version: str | None) -> None:
        """All tensors came: the weights are whole, and no path reproduces them."""
        self._opened()
        self._intake = None
        self._accept(None, version)

    def _opened(self) -> Intake:
        if self._intake is None:
            msg = "no load of tensors is in progress on this rank; nothing changed"
            raise OmniError(msg)
        return self._intake

    def revoke(self) -> None:
        """Void the weights, because a rank could not load its part of them; a `reload` takes those before `prepare`."""
        self._intake = None
        if self._before is not None:
            self._known, self._before = self._before, None
            self.version = self._known.version
            self._recorded = set()
        self._missing = None

    def reload(self, between: Callable[[], None] | None = None, tags: Collection[str] | None = None) -> None:
        """Load the last checkpoint again into the mapped memory of `tags`; `verify` tells whether it is the same.

        `between` is called before each tensor and may raise, which ends the reload. `tags`: None = all.

        Raises:
            NeedsWeightsError: there is no path to load from.
            ConfigError: the checkpoint is gone or does not fit.
        """
        if self._known.source is None:
            raise NeedsWeightsError(NO_SOURCE)
        self._runner.load_weights(self._known.source, between, tags)  # checks the files before it touches a parameter

    def verify(self, tags: Collection[str] | None = None) -> None:
        """Compare with the checksum taken at load.

        Raises:
            WeightsMismatchError: the contents differ.
        """
        if not all(self._as_loaded(tag) for tag in (self.tags if tags is None else tags)):
            msg = (
                f"the checkpoint {self._known.source} is not the one that was loaded (its checksum differs); put the "
                "old file back and wake again, or call wake_up(reload=False) and load_weights(stage_id, source) to "
                "take it"
            )
            raise WeightsMismatchError(msg)

    def _as_loaded(self, tag: str) -> bool:
        if tag in self._recorded:
            return self._pool.verify_checksum(tag)
        if self._pool.record_checksum(tag) != self._known.digests[tag]:  # the pool's record is of others
            return False
        self._recorded.add(tag)
        return True

    def why_not_reloaded(self) -> str | None:
        """Why a wake must not reload what a sleep discarded, and the call that helps; None: it may."""
        if self._known.source is None:
            return NO_SOURCE
        if self.lost:
            return (
                "the sleep discarded weights that no path reproduces; call load_weights(stage_id, source), "
                "or wake_up once more to take the last checkpoint instead"
            )
        return None

    def why_unrecoverable(self, *, modified: bool) -> str | None:
        """Why a level 2 could not be undone, or None if it can."""
        source = self._known.source
        if source is None:
            return "the weights came from no checkpoint path"
        if modified:
            return f"the weights were changed in memory since {source} was loaded"
        try:
            if self._fingerprint(source) == self._known.files:
                return None  # files that fitted then; reading their headers again takes milliseconds
            self._runner.check_weights(source)
        except ConfigError as error:
            return f"the checkpoint can not be loaded any more ({error})"
        return f"the files of {source} were changed since they were loaded"

    def _fingerprint(self, folder: Path) -> Fingerprint:
        """Each file's name, size and time of change (ns): cheap, and different once someone has written to it."""
        stats = [(str(path.relative_to(folder)), path.stat()) for path in self._runner.weight_files(folder)]
        return tuple((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)


def _together(digests: Mapping[str, str]) -> str:
    """One digest of all tags; of one tag, its own."""
    if len(digests) == 1:
        return next(iter(digests.values()))
    return hashlib.sha256("".join(digests.values()).encode()).hexdigest()

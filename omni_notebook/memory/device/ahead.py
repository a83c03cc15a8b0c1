"""Host memory that waits for the next sleep: taken ahead, given back where the host runs short."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from omni_notebook.memory.books import TagState
from omni_notebook.memory.device.sleeping import host_bytes
from omni_notebook.memory.device.tags import WHOLE
from omni_notebook.protocol import GIB, gib

if TYPE_CHECKING:
    from collections.abc import Callable

    from omni_notebook.memory.base import HostMemory
    from omni_notebook.memory.device.core import DeviceCore
    from omni_notebook.memory.device.segments import DeviceSegment

_PLENTY = 2
"""It is taken while so many times as much as is still missing is free."""
_LOW_SHARE, _LOW_BYTES = 20, 8 * GIB
_log = logging.getLogger(__name__)


def low_bytes(room: HostMemory) -> int:
    """The host runs short where it has less than this: a twentieth of what it or its cgroup may use, at most 8 GiB."""
    return min(room.limit_bytes // _LOW_SHARE, _LOW_BYTES)


def never_low(_room: HostMemory) -> int:
    """For a pool that nobody watches."""
    return 0


class RoomAhead:
    """The pool's lock is held around each call. What a sleeping tag is restored from is never touched.

    `low`: the host runs short where less than these bytes are free. Memory is taken only where three times as much
    would stay free, so that it does not come and go.
    """

    def __init__(self, core: DeviceCore) -> None:
        self._core = core
        self.low: Callable[[HostMemory], int] = never_low
        self._wanted = False

    def begin(self) -> None:
        """See `DevicePool.write_ahead`; what the host is short of now is taken when it is looked at later."""
        core = self._core
        core.ahead.stop()
        self._wanted = True
        missing = self._without_room()
        if not missing:
            return

        def copy(stop: Callable[[], bool]) -> None:
            try:
                core.driver.attach()
                core.copies.make_room(missing, lambda rest: not stop() and self._is_plenty(rest))
            except BaseException:
                self._wanted = False  # it would not be had the next time either, twice a second
                raise

        core.ahead.start(copy)

    def _without_room(self) -> list[DeviceSegment]:
        """Awake segments that a level 1 would copy and that have no host memory for it yet."""
        tags = [tag for tag in self._core.books.in_state(TagState.AWAKE) if tag.backed_up_at(1)]
        return [one for tag in tags for one in tag.segments if not self._core.copies.has(one)]

    def _is_plenty(self, missing_bytes: int) -> bool:
        room = self._core.room()
        return room.available_bytes >= max(_PLENTY * missing_bytes, missing_bytes + 3 * self.low(room))

    def is_whole(self) -> bool:
        """Whether a level 1 would find all host memory that it needs."""
        return not self._without_room()

    def give_back(self) -> int:
        """See `DevicePool.drop_copies`."""
        core = self._core
        core.ahead.stop()
        self._wanted = False
        core.driver.attach()
        before = host_bytes(core)
        errors = core.give_up(one for tag in core.books.in_state(TagState.AWAKE) for one in tag.segments)
        if errors:
            raise errors[0]
        return before - host_bytes(core)

    # --------------------------------------------------------------------------------- pressure

    def look(self) -> None:
        """Give memory back where the host runs short, and take it again where it has plenty.

        Raises:
            DeviceError: the driver refused to unlock memory.
        """
        room = self._core.room()
        low = self.low(room)
        if room.available_bytes < low:
            self._relieve(2 * low)
        elif self._wanted and self._core.ahead.wait(0) and not self._in_transition():
            self._take_again()

    def _relieve(self, wanted_bytes: int) -> None:
        """Give back, until so much is free, what waits for a sleep and holds nothing that a wake needs.

        Raises:
            DeviceError: the driver refused to unlock some of it, which stays and counts.
        """
        core = self._core
        core.ahead.stop()
        core.driver.attach()
        before, errors = host_bytes(core), []
        for segment in self._idle():
            if core.room().available_bytes >= wanted_bytes:
                break
            errors += core.give_up([segment])
        given = before - host_bytes(core)
        if given:
            _log.warning(
                "the host runs short of memory (%s GiB are free now): %s GiB that waited, locked, for the next sleep "
                "were given back; a sleep takes them again, and so does this rank once there is plenty",
                gib(core.room().available_bytes),
                gib(given),
            )
        if errors:
            raise errors[0]

    def _idle(self) -> list[DeviceSegment]:
        """Segments with host memory that is awake, or asleep without a copy in it."""
        tags = self._core.books.in_state(TagState.AWAKE, TagState.ASLEEP)
        idle = [tag for tag in tags if tag.state is TagState.AWAKE or tag.backup not in WHOLE]
        return [one for tag in idle for one in tag.segments if self._core.copies.has(one)]

    def _in_transition(self) -> bool:
        return bool(self._core.books.in_state(TagState.PREPARED, TagState.MAPPED))

    def _take_again(self) -> None:
        missing = self._without_room()
        if missing and self._is_plenty(self._core.copies.missing_bytes(missing)):
            _log.info("the host has plenty of memory again: room for the next sleep's copies is taken")
            self.begin()

"""A rank's orders over a device in host memory, without a model: what tests of them share."""

from __future__ import annotations

from types import SimpleNamespace

from omni_notebook.protocol import RankId, SleepTask
from omni_notebook.worker.ack import AckBuilder
from omni_notebook.worker.control import Control
from omni_notebook.worker.graphs import NO_GRAPHS
from omni_notebook.worker.rank import Rank


class Books:
    """Weights that a checkpoint gives back, and a runner that waits for a device at rest."""

    tags, missing, lost, version, source = ("weights",), frozenset(), False, "v1", "folder"
    loras = None

    @property
    def valid(self):
        return not self.missing

    def why_unrecoverable(self, *, modified):
        return "changed" if modified else None

    def why_not_reloaded(self):
        return None

    def reload(self, _between, _tags):
        self.refill()

    def verify(self, _tags):
        assert self.pool.verify_checksum()

    graphs_bytes = 0

    def drop_graphs(self):
        self.cuda.cached_bytes += self.graphs_bytes
        self.graphs_bytes = 0

    def recall_graphs(self):
        return NO_GRAPHS

    def synchronize(self):
        pass


def control_of(rig, books, *, alone):
    """Orders over a rig; `books` stands for its weights and its runner."""
    books.pool, books.refill, books.cuda = rig.pool, rig.fill, rig.machine.cuda
    rig.pool.record_checksum()
    acks = AckBuilder(RankId(0, 0, 0), device=rig.pool.device, device_name=rig.pool.device_name)
    ballast = SimpleNamespace(fill=lambda: None)
    return Control(Rank(pool=rig.pool, runner=books, weights=books, ballast=ballast, acks=acks, alone=alone))


def sleep(control, level):
    """A sleep's two steps."""
    control.sleeping.prepare_sleep(SleepTask(task_id="s", level=level))
    return control.sleeping.commit_sleep("s")

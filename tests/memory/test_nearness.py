"""Which processors are near a GPU, as the kernel's files say."""

from __future__ import annotations

import os
import threading
from types import SimpleNamespace

import pytest

from omni_notebook.memory.device import nearness
from omni_notebook.memory.device.nearness import near_cpus, stay_near


def torch_of(properties):
    """A `torch.cuda` with this one device."""
    return SimpleNamespace(get_device_properties=[properties].__getitem__)


CARD = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9A, pci_device_id=3)


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-3,8\n", {0, 1, 2, 3, 8}), ("5\n", {5}), ("\n", set()), ("0-1,4-4\n", {0, 1, 4})]
)
def test_the_kernels_list_is_read_as_far_as_this_process_may_use_it(tmp_path, monkeypatch, text, cpus):
    (tmp_path / "0000:9a:03.0").mkdir()
    (tmp_path / "0000:9a:03.0" / "local_cpulist").write_text(text, encoding="ascii")
    monkeypatch.setattr(nearness, "_SYSFS", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(8)))
    assert near_cpus(torch_of(CARD), 0) == cpus - {8}


@pytest.mark.parametrize(
    "properties", [CARD, SimpleNamespace(uuid="x")], ids=["no such file", "a torch that is silent"]
)
def test_where_nobody_says_there_are_none(tmp_path, monkeypatch, properties):
    monkeypatch.setattr(nearness, "_SYSFS", tmp_path)
    assert near_cpus(torch_of(properties), 0) == frozenset()


def test_a_thread_stays_near_and_the_others_stay_where_they_are():
    before = os.sched_getaffinity(0)
    one = min(before)
    found = []

    def run() -> None:
        stay_near(frozenset({one}))
        found.append(os.sched_getaffinity(0))
        stay_near(frozenset())
        stay_near(frozenset({10**6}))  # a processor that is not there
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [{one}, {one}]
    assert os.sched_getaffinity(0) == before

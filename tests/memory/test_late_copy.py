"""Sleeps whose commit copies: the same figures, and a copy that fails leaves everything as it was."""

from __future__ import annotations

import pytest
import torch

from omni_notebook.memory.base import DeviceError, TransitionOrderError
from omni_notebook.memory.device import shadow
from tests.memory.fake_cuda import CONTEXT_BYTES, MIB, Rig
from tests.memory.fake_ranges import OwnRig
from tests.memory.machines import SPANS, all_equal, resident
from tests.memory.pools import late, saved, sleep, wake


@pytest.fixture(params=[Rig, OwnRig], ids=["vllm", "own"])
def rig(request):
    return request.param()


def assert_works(rig, before):
    """Awake with its contents, and able to sleep and wake with others."""
    assert resident(rig.pool) == SPANS
    assert rig.pool.plan(1).expected_bytes == 16 * MIB
    assert all_equal(rig.copies(), before)
    rig.model.big[1000, 1000] += 1
    changed = rig.copies()
    late(rig.pool)
    assert rig.gpu.ours_bytes == CONTEXT_BYTES
    wake(rig.pool)
    assert all_equal(rig.copies(), changed)


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("times", [1, 2, 3])
def test_reports_are_those_of_a_sleep_that_copies_first(rig, level, times):
    reports = []
    for late_copy in (False, True):
        other = type(rig)()
        before = other.copies()
        for turn in range(times):
            other.model.turned[turn, turn] += 1 if turn == 1 else 0
            before = other.copies()
            prepared = other.pool.prepare_sleep(level, late_copy=late_copy)
            unmapped = other.pool.commit_sleep()
            _, restored = other.pool.map_restore()
            other.pool.commit_wake()
            if level == 1:
                assert all_equal(other.copies(), before)
            else:
                other.fill()
        reports.append(
            (
                prepared.backup,
                prepared.host_backup_bytes,
                *saved(prepared, unmapped),
                unmapped.freed,
                unmapped.observed_bytes,
                restored.copied_bytes,
                restored.needs_reload,
            )
        )
        assert (unmapped.copy_ms > 0) is (late_copy and level == 1 and times < 3)
    assert reports[0] == reports[1]


def test_a_clean_repeat_copies_nothing_and_a_single_changed_byte_one_chunk(rig):
    late(rig.pool)
    wake(rig.pool)
    assert saved(*late(rig.pool)) == (0, 12 * MIB)
    wake(rig.pool)
    rig.model.big.view(-1)[3 * MIB // 4] += 1
    before = rig.copies()
    assert saved(*late(rig.pool)) == (2 * MIB, 10 * MIB)
    wake(rig.pool)
    assert all_equal(rig.copies(), before)


def test_what_taking_sums_takes_of_the_device_is_not_missing_in_what_left(rig, monkeypatch):
    real = torch._int_mm

    def int_mm(*args, out):
        rig.gpu.torch_bytes += MIB
        rig.machine.cuda.cached_bytes += MIB
        return real(*args, out=out)

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    for _ in range(2):
        _, unmapped = late(rig.pool)
        assert (unmapped.observed_bytes, unmapped.freed) == (16 * MIB, SPANS)
        wake(rig.pool)
        rig.model.scale.add_(1)


def test_what_the_first_streams_take_of_the_device_is_not_missing_in_what_left(rig, monkeypatch):
    new_stream = rig.machine.libcuda.new_stream

    def new():
        rig.gpu.torch_bytes += 2 * MIB  # the driver's own, and it stays
        return new_stream()

    monkeypatch.setattr(rig.machine.libcuda, "new_stream", new)
    _, unmapped = late(rig.pool)
    assert (unmapped.observed_bytes, unmapped.freed) == (16 * MIB, SPANS)


def test_nothing_is_given_up_before_its_copy_is_there(own, monkeypatch):
    order = []
    held, table, driver = own.pool._core.copies, own.pool._core.table, own.pool._core.driver
    segments = own.pool._core.table.of("weights")
    begin, unmap, reached = held.begin, table.unmap, driver.reached
    monkeypatch.setattr(held, "begin", lambda run: (order.append(("copy", run.segment)), begin(run)))
    monkeypatch.setattr(driver, "reached", lambda mark: (order.append(("reached", None)), reached(mark)))

    def unmapping(segment):
        order.append(("unmap", segment))
        return unmap(segment)

    monkeypatch.setattr(table, "unmap", unmapping)
    late(own.pool)
    names = [name for name, _ in order]
    assert names == ["copy"] * 4 + ["unmap"] + ["reached", "unmap"] * 4
    assert [segment for name, segment in order if name == "unmap"][1:] == segments


def test_sums_that_find_no_room_do_not_read_what_is_unmapped(rig, monkeypatch):
    """Those of the first segments are under way when there is no room for the next one's."""
    order, taken = [], shadow.ChunkSums.add
    table, cuda = rig.pool._core.table, rig.machine.cuda
    unmap, synchronize = table.unmap, cuda.synchronize

    def take(*parts):
        if order.count("sum") == 2:
            raise torch.OutOfMemoryError
        order.append("sum")
        return taken(*parts)

    rig.pool.prepare_sleep(1, late_copy=True)
    monkeypatch.setattr(shadow.ChunkSums, "add", take)
    monkeypatch.setattr(cuda, "synchronize", lambda index: (order.append("synchronize"), synchronize(index)))
    monkeypatch.setattr(table, "unmap", lambda segment: (order.append("unmap"), unmap(segment))[1])
    before = rig.copies()
    rig.pool.commit_sleep()
    assert order[: order.index("unmap")] == ["synchronize", "sum", "sum", "synchronize"]
    monkeypatch.undo()
    wake(rig.pool)
    assert_works(rig, before)


def test_an_order_between_prepare_and_commit_that_aborts_leaves_all_as_before(rig):
    before = rig.copies()
    rig.pool.prepare_sleep(1, late_copy=True)
    rig.pool.abort_sleep()
    assert rig.pool.host_backup_bytes() == 0
    assert (rig.cache.kv == 5).all()
    with pytest.raises(TransitionOrderError):
        rig.pool.commit_sleep()
    assert_works(rig, before)


@pytest.mark.parametrize("place", [1, MIB], ids=["in the same chunk", "in another"])
@pytest.mark.parametrize("seen", ["dirty", "clean"])
def test_what_is_written_between_prepare_and_commit_never_makes_a_copy_that_only_seems_right(rig, seen, place):
    late(rig.pool)
    wake(rig.pool)
    first = rig.model.big.clone()
    if seen == "dirty":
        rig.model.big.view(-1)[0] += 1
    planned = rig.model.big.clone()
    rig.pool.prepare_sleep(1, late_copy=True)
    rig.model.big.view(-1)[place] += 1  # against the rules; the sleep may take it or leave it
    written = rig.model.big.clone()
    rig.pool.commit_sleep()
    wake(rig.pool)
    for contents in (written, planned, first, written):
        rig.model.big.copy_(contents)
        sleep(rig.pool)
        wake(rig.pool)
        assert torch.equal(rig.model.big, contents)


# ------------------------------------------------------------------------------------ copies that fail

FAULTS = [(name, number) for name, last in (("memcpy", 4), ("wait", 5)) for number in range(1, last + 1)]


@pytest.mark.parametrize("ahead", [False, True], ids=["first sleep", "later sleep"])
@pytest.mark.parametrize(("name", "number"), FAULTS)
def test_a_copy_that_fails_in_the_commit_leaves_memory_contents_and_books_as_before(rig, name, number, ahead):
    if ahead:
        late(rig.pool)
        wake(rig.pool)
        for tensor in rig.tensors():
            tensor.add_(1)
    before = rig.copies()
    rig.pool.prepare_sleep(1, late_copy=True)
    rig.cumem.fail(name, number)
    with pytest.raises(DeviceError):
        rig.pool.commit_sleep()
    rig.pool.abort_sleep()
    assert rig.pool.host_backup_bytes() == (12 * MIB if ahead else 0)
    assert_works(rig, before)


@pytest.mark.parametrize("number", [1, 2, 4])
def test_an_event_that_can_not_be_recorded_ends_the_commit_and_leaves_no_other_behind(own, number):
    before = own.copies()
    own.pool.prepare_sleep(1, late_copy=True)
    own.machine.fail("event", number)
    with pytest.raises(DeviceError):
        own.pool.commit_sleep()
    assert own.machine.libcuda.events == 0
    own.pool.abort_sleep()
    assert_works(own, before)


@pytest.mark.parametrize(("name", "number"), FAULTS)
def test_no_event_outlives_a_commit_that_failed(own, name, number):
    own.pool.prepare_sleep(1, late_copy=True)
    own.machine.fail(name, number)
    with pytest.raises(DeviceError):
        own.pool.commit_sleep()
    assert own.machine.libcuda.events == 0


@pytest.mark.parametrize("room", ["old copies", "no room"])
@pytest.mark.parametrize("number", [1, 2])
def test_weights_that_a_level_2_gives_up_are_still_there_when_the_copy_of_others_fails(own, number, room):
    lora = own.machine.tensor("lora", (1000,)).fill_(3)
    own.pool.keep("lora", [lora])
    if room == "old copies":
        late(own.pool)
        wake(own.pool)
        own.model.big.add_(1)  # the copies are of what was before
        lora.add_(1)
    before, kept = own.copies(), lora.clone()
    prepared = own.pool.prepare_sleep(2, late_copy=True)
    assert prepared.backup["lora"] == "pinned"
    own.machine.fail("wait", number)
    with pytest.raises(DeviceError):
        own.pool.commit_sleep()
    own.pool.abort_sleep()
    assert all_equal(own.copies(), before)
    assert torch.equal(lora, kept)
    late(own.pool, 2)
    _, restored = wake(own.pool)
    assert restored.needs_reload == ("weights",)
    assert torch.equal(lora, kept)


def test_a_stray_tensor_in_a_cache_is_put_back_too(own):
    stray = torch.nn.Module()
    stray.register_buffer("odd", own.machine.tensor("kv_cache", (10,)).fill_(9))
    own.pool.adopt(stray)
    own.pool.prepare_sleep(1, late_copy=True)
    own.machine.fail("wait", 4)
    with pytest.raises(DeviceError):
        own.pool.commit_sleep()
    own.pool.abort_sleep()
    assert (stray.odd == 9).all()


@pytest.mark.parametrize("name", ["create", "map"])
def test_memory_that_can_not_be_put_back_is_said_to_be_lost_and_the_pool_refuses_all_but_its_end(own, name):
    own.pool.record_checksum()
    own.pool.prepare_sleep(1, late_copy=True)
    own.machine.fail("wait", 3)
    own.machine.fail(name, 1)
    with pytest.raises(DeviceError, match="restart the stage") as caught:
        own.pool.commit_sleep()
    assert caught.value.lost
    own.pool.abort_sleep()
    pool = own.pool
    steps = (
        lambda: pool.prepare_sleep(1),
        pool.commit_sleep,
        pool.map,
        pool.restore,
        pool.map_restore,
        pool.commit_wake,
        pool.drop_backup,
        pool.write_ahead,
        pool.record_checksum,
        pool.verify_checksum,
        lambda: pool.empty((1,), torch.uint8),
        lambda: pool.adopt(torch.nn.Linear(1, 1)),
        lambda: pool.discard("weights"),
    )
    for step in steps:
        with pytest.raises(TransitionOrderError, match="restart the stage"):
            step()
    pool.close()
    assert own.gpu.ours_bytes == CONTEXT_BYTES
    assert (pool.host_backup_bytes(), own.machine.pinned) == (0, {})


@pytest.mark.parametrize("number", [1, 2, 3, 4])
@pytest.mark.parametrize("ahead", [False, True], ids=["first sleep", "later sleep"])
def test_a_segment_whose_unmap_was_lost_is_put_back_too_when_a_later_copy_fails(own, ahead, number):
    """The driver kept its memory, and nothing can reach that: fresh pages come behind the address."""
    if ahead:
        late(own.pool)
        wake(own.pool)
        for tensor in own.tensors():
            tensor.add_(1)
    before = own.copies()
    own.pool.prepare_sleep(1, late_copy=True)
    own.machine.fail("release", number)
    own.machine.fail("wait", 4)
    with pytest.raises(DeviceError) as caught:
        own.pool.commit_sleep()
    own.pool.abort_sleep()
    assert not caught.value.lost
    assert resident(own.pool) == SPANS
    assert all_equal(own.copies(), before)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_segment_whose_unmap_was_refused_is_left_alone_when_a_later_copy_fails(own, number):
    before, kv = own.copies(), own.cache.kv.clone()
    own.pool.prepare_sleep(1, late_copy=True)
    own.machine.fail("unmap", number)
    own.machine.fail("wait", 4)
    with pytest.raises(DeviceError):
        own.pool.commit_sleep()
    own.pool.abort_sleep()
    assert resident(own.pool) == SPANS
    assert all_equal(own.copies(), before)
    assert torch.equal(own.cache.kv, kv) is (number == 1)


def test_what_is_refused_one_by_one_is_counted_as_in_any_other_sleep(own):
    before = own.copies()
    own.pool.prepare_sleep(1, late_copy=True)
    own.machine.fail("unmap", 2)  # the first is the cache
    unmapped = own.pool.commit_sleep()
    assert unmapped.freed == {"weights": 6 * MIB, "kv_cache": 4 * MIB}
    assert "refused to unmap" in unmapped.note
    wake(own.pool)
    assert all_equal(own.copies(), before)

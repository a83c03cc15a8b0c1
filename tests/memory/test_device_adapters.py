"""What each platform's driver and probe do that the others do not."""

from __future__ import annotations

import ctypes
import types

import pytest
import torch

from omni_notebook.errors import OutOfMemoryError, UnsupportedError
from omni_notebook.memory.base import DeviceError
from omni_notebook.memory.device import sysman
from omni_notebook.memory.device.amdsmi_probe import AmdsmiProbe
from omni_notebook.memory.device.npu_driver import NpuDriver
from omni_notebook.memory.device.npu_probe import NpuProbe
from omni_notebook.memory.device.rocm_driver import RocmDriver
from omni_notebook.memory.device.sysman import SysmanProbe
from omni_notebook.memory.device.xpu_driver import XpuDriver
from tests.memory.fake_cuda import CONTEXT_BYTES, INVALID, MIB, OUT_OF_MEMORY, OldData, Rig
from tests.memory.fake_npu import NpuMachine
from tests.memory.fake_rocm import CHUNK, RocmMachine
from tests.memory.fake_xpu import XpuMachine
from tests.memory.machines import all_equal, resident
from tests.memory.pools import sleep, wake

# --------------------------------------------------------------------------------------------- ROCm


@pytest.fixture
def amd():
    return Rig(machine=RocmMachine())


def test_a_segment_of_several_chunks_is_unmapped_and_mapped_chunk_by_chunk_at_its_address(amd):
    address = amd.model.big.data_ptr()
    (chunks,) = [one.handle[3] for one in amd.machine.allocator.pointer_to_data.values() if one.handle[2] == address]
    assert [size for _, size in chunks] == [CHUNK, 2 * MIB]
    sleep(amd.pool)
    wake(amd.pool)
    assert amd.gpu.mappings[address][0] == CHUNK
    assert amd.gpu.mappings[address + CHUNK][0] == 2 * MIB


def test_memory_whose_access_is_refused_after_mapping_is_unmapped_again(amd):
    before = amd.copies()
    sleep(amd.pool)
    amd.machine.fail("access", 2)
    with pytest.raises(DeviceError, match="HIP driver refused to map: CUDA Error: invalid argument"):
        amd.pool.map()
    assert amd.gpu.pool_bytes == 0
    wake(amd.pool)
    assert all_equal(amd.copies(), before)


def test_an_error_that_an_allocation_left_in_the_extension_is_not_taken_for_one_of_ours(amd):
    before = amd.copies()
    for _ in range(2):
        amd.machine.cumem.error_code = OUT_OF_MEMORY
        sleep(amd.pool)
        amd.machine.cumem.error_code = OUT_OF_MEMORY
        wake(amd.pool)
    assert all_equal(amd.copies(), before)
    assert amd.gpu.pool_bytes == 16 * MIB


def test_a_segment_whose_handles_an_unmap_has_lost_is_never_unmapped_or_mapped_again(amd):
    amd.pool.prepare_sleep(1)
    amd.machine.fail("unmap", 2)  # the second chunk of the first segment
    unmapped = amd.pool.commit_sleep()
    assert unmapped.freed["weights"] == 6 * MIB
    assert resident(amd.pool)["weights"] == 0
    for step in (amd.pool.map, amd.pool.map_restore):
        with pytest.raises(DeviceError, match="restart the stage"):
            step()
    amd.pool.close()  # releases no handle twice: the fake would end the test


def test_rocm_needs_a_vllm_that_notes_what_sleeps():
    machine = RocmMachine(data_class=OldData)
    machine.tensor("weights", (5,))
    with pytest.raises(UnsupportedError, match=r"use vLLM 0\.32"):
        RocmDriver(0, machine.module, cuda=machine.torch_device)


def test_hips_last_error_is_forgotten_after_every_call_that_it_refused(amd):
    amd.machine.hip.pin_error = 1
    prepared, _ = sleep(amd.pool)
    assert (prepared.backup["weights"], amd.machine.hip.last_error) == ("pageable", 0)
    amd.machine.fail("memcpy")
    with pytest.raises(DeviceError, match="hipMemcpyAsync: HIP error 1"):
        amd.pool.map_restore()
    amd.machine.fail("wait")
    with pytest.raises(DeviceError, match="hipStreamSynchronize: HIP error 1"):
        amd.pool.map_restore()
    assert amd.machine.hip.last_error == 0


@pytest.mark.parametrize("answer", [0, 2])
def test_where_hip_calls_nothing_or_everything_mapped_vllms_books_are_asked(answer):
    machine = RocmMachine()

    def attributes(found, _pointer):
        found._obj[0] = answer
        return 0

    machine.hip.hipPointerGetAttributes = attributes
    rig = Rig(machine=machine)
    before = rig.copies()
    sleep(rig.pool)
    for entry in machine.allocator.pointer_to_data.values():
        machine.wake_by_vllm(entry)
    assert "were mapped by somebody else" in rig.pool.foreign_changes()
    wake(rig.pool)
    assert all_equal(rig.copies(), before)
    assert rig.gpu.pool_bytes == 16 * MIB


def amd_probe(machine, smi="the machine's"):
    return AmdsmiProbe(0, machine.smi if smi == "the machine's" else smi, cuda=machine.torch_device)


def test_amd_smi_tells_vram_of_this_process_and_of_the_device_that_torch_means(amd):
    amd.gpu.others_bytes = 3 * MIB
    probe = amd_probe(amd.machine)
    assert (probe.process_bytes(), probe.device_bytes()) == (CONTEXT_BYTES + 16 * MIB, CONTEXT_BYTES + 19 * MIB)
    amd.machine.smi.uuid = "GPU-0000000000000000"
    other = amd_probe(amd.machine)
    assert (other.process_bytes(), other.device_source) == (None, "hipMemGetInfo")
    assert other.device_bytes() == CONTEXT_BYTES + 19 * MIB
    assert amd_probe(amd.machine, None).process_bytes() is None


def test_bytes_that_amd_smi_does_not_tell_are_not_counted_as_none_held(amd):
    probe = amd_probe(amd.machine)
    amd.machine.show_bytes(lambda: "N/A")
    assert probe.process_bytes() is None
    amd.machine.break_probe()
    for ask in (probe.process_bytes, probe.device_bytes):
        with pytest.raises(DeviceError, match="could not be measured by AMD SMI: Error code: 32"):
            ask()
    with pytest.raises(DeviceError):
        sleep(amd.pool)
    assert resident(amd.pool) == {"weights": 12 * MIB, "kv_cache": 4 * MIB}
    held = amd.pool.held()
    assert (held.scope, held.total_bytes, held.parts.other) == ("mapping", 16 * MIB, None)


# ---------------------------------------------------------------------------------------------- XPU


@pytest.fixture
def intel():
    return Rig(machine=XpuMachine())


def test_zeroes_are_copied_from_a_block_that_goes_with_the_wake(intel):
    intel.machine.tensor("kv_cache", (20 * MIB,), torch.uint8).fill_(7)
    sleep(intel.pool)
    intel.pool.map()
    assert intel.machine.faults.calls["memset"] == 3 + 1 + 4  # 20 MiB by 8, the cache, the weights
    assert intel.machine.torch.blocks == {}
    intel.pool.restore()
    intel.pool.commit_wake()
    assert not intel.cache.kv.any()


def test_a_wake_without_room_for_the_block_of_zeroes_maps_nothing(intel):
    sleep(intel.pool, 2)
    intel.gpu.others_bytes = intel.gpu.free_bytes - 17 * MIB
    with pytest.raises(OutOfMemoryError):
        intel.pool.map()
    assert intel.gpu.pool_bytes == 0
    intel.gpu.others_bytes = 0
    wake(intel.pool)


def test_addresses_above_the_signed_range_are_passed_as_torch_takes_them():
    machine, passed = XpuMachine(), []
    machine.torch.ops._C.xpu_memcpy_sync = lambda *arguments: passed.append(arguments)
    XpuDriver(0, machine.module, torch=machine.torch).copy(0xFFFF_8000_0000_0000, 0x7000, 5)
    assert passed == [(-0x8000_0000_0000, 0x7000, 5, 1, 0)]


def test_sysman_finds_the_device_by_its_uuid_and_tells_bytes_of_this_process(intel):
    intel.gpu.others_bytes = 3 * MIB
    probe = SysmanProbe(0, intel.machine.sysman, xpu=intel.machine.torch_device)
    assert (probe.process_bytes(), probe.device_bytes()) == (CONTEXT_BYTES + 16 * MIB, CONTEXT_BYTES + 19 * MIB)
    intel.machine.break_probe()
    with pytest.raises(DeviceError, match="by Sysman: zesDeviceProcessesGetState: 0x70000001"):
        probe.process_bytes()


def test_without_sysman_the_device_is_measured_by_torch_and_the_answer_says_so():
    machine = XpuMachine()
    machine.sysman = None
    rig = Rig(machine=machine)
    _, unmapped = sleep(rig.pool)
    assert (unmapped.scope, unmapped.observed_bytes) == ("device", 16 * MIB)
    assert "by torch.xpu.mem_get_info" in unmapped.note


def test_where_torch_sees_no_memory_leave_nothing_is_claimed_to_have_been_seen():
    """Some drivers tell torch that all memory is always free."""
    machine = XpuMachine()
    machine.sysman = None
    rig = Rig(machine=machine)
    machine.torch_device.mem_get_info = lambda _index: (machine.gpu.capacity, machine.gpu.capacity)
    _, unmapped = sleep(rig.pool)
    assert (unmapped.observed_bytes, unmapped.expected_bytes) == (0, 16 * MIB)  # the ACK of that is an error


def does_not_tell(_index):
    msg = "The device (Intel(R) Arc(TM)) doesn't support querying the available free memory"
    raise RuntimeError(msg)


def test_a_device_that_can_not_be_measured_is_left_as_it_was():
    machine = XpuMachine()
    machine.sysman = None
    rig = Rig(machine=machine)
    rig.pool.prepare_sleep(1)
    machine.torch_device.mem_get_info = does_not_tell
    with pytest.raises(DeviceError, match="could not be measured by mem_get_info: The device"):
        rig.pool.commit_sleep()
    rig.pool.abort_sleep()
    assert resident(rig.pool) == {"weights": 12 * MIB, "kv_cache": 4 * MIB}


def test_a_device_that_does_not_tell_its_free_memory_is_refused():
    machine = XpuMachine()
    machine.torch_device.mem_get_info = does_not_tell
    with pytest.raises(UnsupportedError, match="xpu:0 does not tell its free memory"):
        machine.pool()


def test_level_zeros_structures_have_the_sizes_of_its_header():
    assert ctypes.sizeof(sysman.ProcessState) == 48
    assert sysman.ProcessState.memSize.offset == 24
    assert sysman.DeviceProperties.core.offset == 16
    assert ctypes.sizeof(sysman.DeviceProperties) == 16 + 368 + 4 + 6 * 64 + 4
    assert sysman.DeviceProperties.core.size == 368


# ---------------------------------------------------------------------------------------------- NPU


@pytest.fixture
def ascend():
    return Rig(machine=NpuMachine())


def test_the_physical_handle_is_where_the_extension_looks_for_it_when_it_frees(ascend):
    sleep(ascend.pool)
    wake(ascend.pool)
    for tensor in [*ascend.tensors(), ascend.cache.kv]:
        ascend.machine.free(tensor)
    assert (ascend.gpu.pieces, ascend.gpu.reserved, ascend.machine.complaints) == ({}, {}, [])


def test_a_callback_that_only_the_extension_knew_is_kept_by_the_pool(ascend):
    ascend.machine.camem.loaded()
    sleep(ascend.pool)
    ascend.machine.free(ascend.model.big)
    late = ascend.machine.tensor("weights", (5,)).fill_(1)
    wake(ascend.pool)
    assert (late == 1).all()


def test_an_unmap_that_can_not_release_its_memory_is_not_called_freed(ascend):
    ascend.pool.prepare_sleep(1)
    ascend.machine.fail("release", 1)
    unmapped = ascend.pool.commit_sleep()
    assert unmapped.freed == {"weights": 6 * MIB, "kv_cache": 4 * MIB}
    assert "CANN driver refused to unmap: acl.rt.free_physical: error 107000" in unmapped.note
    assert resident(ascend.pool) == {"weights": 0, "kv_cache": 0}


def test_pyacl_without_a_call_that_is_needed_is_refused_by_its_name():
    machine = NpuMachine()
    runtime = types.SimpleNamespace(malloc_physical=None, free_physical=None, map_mem=None)
    with pytest.raises(UnsupportedError, match=r"no acl\.rt\.unmap_mem; install a newer CANN"):
        NpuDriver(0, machine.camem, runtime=runtime, npu=machine.torch_device)


def npu_probe(machine, index=0, **environ):
    return NpuProbe(index, machine.acl, run=machine.smi, environ=environ)


def test_npu_smi_tells_bytes_of_this_process_on_the_chip_that_torch_means(ascend):
    ascend.gpu.others_bytes = 3 * MIB
    probe = npu_probe(ascend.machine)
    assert (probe.process_bytes(), probe.device_bytes()) == (CONTEXT_BYTES + 16 * MIB, CONTEXT_BYTES + 19 * MIB)
    assert npu_probe(ascend.machine, ASCEND_RT_VISIBLE_DEVICES="0").process_bytes() == CONTEXT_BYTES + 16 * MIB
    assert npu_probe(ascend.machine, 1, ASCEND_RT_VISIBLE_DEVICES="1,0").process_bytes() == CONTEXT_BYTES + 16 * MIB
    assert npu_probe(ascend.machine, 7).process_bytes() is None
    assert npu_probe(ascend.machine, ASCEND_RT_VISIBLE_DEVICES="0-3").process_bytes() is None


def test_without_npu_smi_the_device_is_measured_by_cann_and_its_errors_are_errors(ascend):
    ascend.machine.smi.installed = False
    pool = ascend.machine.pool()
    pool.prepare_sleep(2)
    unmapped = pool.commit_sleep()
    assert (unmapped.scope, unmapped.observed_bytes) == ("device", 16 * MIB)
    ascend.machine.acl.mem_info_error = INVALID
    with pytest.raises(DeviceError, match=r"by acl\.rt\.get_mem_info: error 1"):
        npu_probe(ascend.machine).device_bytes()

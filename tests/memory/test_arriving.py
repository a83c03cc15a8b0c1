"""Wakes whose copies are followed by what computes: in the order asked for, each part as far as it has come."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from omni_notebook.errors import OutOfMemoryError
from omni_notebook.memory.base import DeviceError, TransitionOrderError
from omni_notebook.models.decoder import Decoder, DecoderConfig
from omni_notebook.models.dit import DiT, DiTConfig
from omni_notebook.worker.arriving import Execution
from tests.memory.fake_cuda import MIB, Rig
from tests.memory.fake_ranges import OwnMachine, OwnRig
from tests.memory.machines import MACHINES, all_equal
from tests.memory.pools import sleep, wake
from tests.vllm.models import CONFIG

WIDTH = 768  # a layer is a bit more than 2 MiB


class Model(nn.Module):
    """Layers that run in another order than they are registered in; the head's weight is used without its call."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.first = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return self.last(self.middle(self.first(x * self.scale)))


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.setattr("omni_notebook.memory.cuda.PART_BYTES", MIB)  # a segment a layer
    return OwnMachine()


@pytest.fixture
def pool(machine):
    pool = machine.pool()
    yield pool
    pool.close()


@pytest.fixture
def model(pool):
    torch.manual_seed(3)
    model = Model().requires_grad_(False)
    pool.adopt(model)
    model.cache = pool.empty((4 * MIB,), torch.uint8)
    model.cache.fill_(5)
    return model


@pytest.fixture
def execution(model):
    execution = Execution(model)
    model(torch.zeros(1, WIDTH))
    return execution


@pytest.fixture
def x():
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(4))


def layers(model, tensors):
    names = {id(tensor): name for name, tensor in model.named_parameters()}
    return list(dict.fromkeys(names[id(tensor)].split(".")[0] for tensor in tensors))


def test_the_order_is_that_of_the_first_pass_and_it_leaves_no_hook(model, execution):
    assert layers(model, execution.tensors()) == ["scale", "first", "middle", "last", "head"]
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_pass_over_layers_that_arrive_gives_the_same_and_each_layer_waits_for_its_own_alone(
    pool, machine, model, execution, x
):
    golden, head = model(x), model.head.weight.clone()
    sleep(pool)
    mapped, arrivals = pool.begin_wake(order=execution.tensors())
    assert mapped.mapped_bytes == sum(tag.span_bytes for tag in pool.tags().values())
    copied, seen = machine.libcuda.done, []
    copying = pool._core.driver._copying
    begun = copied[copying]
    for layer in (model.first, model.middle, model.last):
        layer.register_forward_hook(lambda *_: seen.append(copied[copying] - begun))
    with execution.following(arrivals):
        drawn = model(x)
    assert torch.equal(drawn, golden)
    assert seen == [2, 3, 4]  # with the scale, in whose segment the head is, too
    assert len(arrivals) == 4
    assert torch.equal(model.head.weight, head)  # a pass that ends has waited for all
    assert not model.cache.any()  # and the first module for what is cleared
    restored = pool.finish_wake()
    assert restored.copied_bytes == pool.tags()["weights"].span_bytes
    pool.commit_wake()
    assert machine.libcuda.events == 0
    assert torch.equal(model(x), golden)


def test_a_wake_can_not_be_committed_before_it_has_finished(pool, model, execution, x):
    golden = model(x)
    sleep(pool)
    pool.begin_wake(order=execution.tensors())
    with pytest.raises(TransitionOrderError, match="was not restored"):
        pool.commit_wake()
    pool.finish_wake()
    pool.commit_wake()
    assert torch.equal(model(x), golden)


def test_a_copy_that_fails_is_told_when_the_wake_finishes_and_after_an_abort_a_later_wake_works(
    pool, machine, model, execution, x
):
    golden = model(x)
    sleep(pool)
    _, arrivals = pool.begin_wake(order=execution.tensors())
    with execution.following(arrivals):
        model(x)
    machine.fail("wait")
    with pytest.raises(DeviceError):
        pool.finish_wake()
    pool.abort_wake()
    assert {name: held.resident_bytes for name, held in pool.memory().items()} == {"weights": 0, "kv_cache": 0}
    assert machine.libcuda.events == 0
    wake(pool)
    assert torch.equal(model(x), golden)


def test_a_wake_may_finish_on_another_thread_before_a_pass_has_followed_anything(pool, machine, model, execution, x):
    golden = model(x)
    sleep(pool)
    _, arrivals = pool.begin_wake(order=execution.tensors())

    def finish():
        pool._core.driver.attach()
        pool.finish_wake()

    with ThreadPoolExecutor(1) as other:
        other.submit(finish).result(10)
    with execution.following(arrivals):
        assert torch.equal(model(x), golden)
    pool.commit_wake()
    assert machine.libcuda.events == 0


def test_an_abort_waits_for_the_copies_and_unmaps_all(pool, machine, model, execution, x):
    golden = model(x)
    sleep(pool)
    pool.begin_wake(order=execution.tensors())
    pool.abort_wake()
    assert sum(held.resident_bytes for held in pool.memory().values()) == 0
    assert machine.libcuda.events == 0
    wake(pool)
    assert torch.equal(model(x), golden)


@pytest.mark.parametrize("call", ["create", "map", "memcpy", "event"])
def test_a_wake_that_does_not_begin_leaves_nothing(pool, machine, model, execution, x, call):
    golden = model(x)
    sleep(pool)
    machine.fail(call, 3 if call != "event" else 2)
    with pytest.raises(DeviceError):
        pool.begin_wake(order=execution.tensors())
    assert sum(held.resident_bytes for held in pool.memory().values()) == 0
    assert machine.libcuda.events == 0
    wake(pool)
    assert torch.equal(model(x), golden)


def test_a_device_without_room_is_refused_before_anything_is_mapped(pool, machine, model, execution):
    sleep(pool)
    machine.gpu.others_bytes = machine.gpu.free_bytes - MIB
    with pytest.raises(OutOfMemoryError, match="wake again"):
        pool.begin_wake(order=execution.tensors())
    assert sum(held.resident_bytes for held in pool.memory().values()) == 0


def test_what_a_pass_writes_between_kept_tensors_before_the_wake_has_finished_stays(pool, model, execution):
    kept = [model.cache[:100], model.cache[1000:1100]]
    pool.keep("kv_cache", kept)
    sleep(pool)
    _, arrivals = pool.begin_wake(order=execution.tensors())
    arrivals.follow_all()
    model.cache[400:500] = 7  # keys and values of a batch that began early
    pool.finish_wake()
    pool.commit_wake()
    assert all((tensor == 5).all() for tensor in kept)
    assert (model.cache[400:500] == 7).all()


def test_level_2_keeps_what_it_kept_and_says_what_is_to_be_reloaded(pool, model):
    pool.keep("weights", [model.scale])
    sleep(pool, 2)
    pool.begin_wake()
    assert pool.finish_wake().needs_reload == ("weights",)
    assert (model.scale == 1).all()
    pool.commit_wake()


def dit():
    config = DiTConfig(
        image_size=16,
        patch_size=4,
        channels=3,
        hidden_size=256,
        num_layers=3,
        num_heads=4,
        mlp_size=512,
        plan_vocab_size=16,
        plan_length=4,
        cond_hidden_size=64,
    )
    noisy, plan, hidden = torch.ones(1, 3, 16, 16), torch.ones(1, 4, dtype=torch.long), torch.ones(1, 4, 64)
    return DiT(config), lambda model: model(noisy, torch.ones(1), plan, hidden)


def decoder():
    shape = {**CONFIG, "num_hidden_layers": 3, "hidden_size": 256}
    tokens = torch.arange(8)[None]
    return Decoder(DecoderConfig.from_hf(shape)), lambda model: model.logits(model(tokens, tokens))


@torch.no_grad()
@pytest.mark.parametrize("make", [dit, decoder])
def test_our_models_compute_the_same_while_they_arrive(pool, machine, make):
    torch.manual_seed(5)
    model, run = make()
    for parameter in model.parameters():
        parameter.normal_(std=0.1)
    pool.adopt(model)
    golden, execution = run(model), Execution(model)
    run(model)
    sleep(pool)
    _, arrivals = pool.begin_wake(order=execution.tensors())
    assert len(arrivals) > 3
    blocks, begun = model.blocks if make is dit else model.model.layers, machine.libcuda.done.copy()
    came = []
    blocks[0].register_forward_hook(lambda *_: came.append(sum((machine.libcuda.done - begun).values())))
    with execution.following(arrivals):
        assert torch.equal(run(model), golden)
    assert came[0] < len(arrivals)  # the first block did not wait for all
    pool.finish_wake()
    pool.commit_wake()
    assert torch.equal(run(model), golden)


@pytest.mark.parametrize("kind", MACHINES.values(), ids=MACHINES)
def test_every_platform_brings_all_back(kind):
    rig = OwnRig() if kind is OwnMachine else Rig(machine=kind())
    before = rig.copies()
    sleep(rig.pool)
    _, arrivals = rig.pool.begin_wake(order=rig.tensors())
    arrivals.follow([rig.model.big])
    assert torch.equal(rig.model.big, before[0])
    arrivals.follow_all()
    assert all_equal(rig.copies(), before)
    rig.pool.finish_wake()
    rig.pool.commit_wake()
    assert all_equal(rig.copies(), before)
    rig.pool.close()

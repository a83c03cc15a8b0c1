"""What a rank's process does in the tests of split models: load its part, run it, give back what came out."""

from __future__ import annotations

import torch

from omni_notebook.memory.cpu import CpuPool
from omni_notebook.models.decoder import Decoder
from omni_notebook.models.dit import DiT
from omni_notebook.models.loaders import load_into
from omni_notebook.protocol import LoRARequest
from omni_notebook.worker.group import RankGroup
from omni_notebook.worker.lora import Loras


class ModelRank:
    """One rank's membership and the models that it runs."""

    def __init__(self, rank, size, timeout_s=30.0):
        self._group = RankGroup(size, rank, timeout_s)

    def open_rendezvous(self):
        return self._group.open()

    def join(self, rendezvous):
        self._group.join(rendezvous)

    def leaves_the_default_group_free(self):
        """Whether torch's own group is unset: modules of torch keep it in default arguments, so it would not close."""
        return self._group.parallel.size > 1 and not torch.distributed.is_initialized()

    def leave(self):
        self._group.close()

    def run_decoder(self, config, folder, dtype=torch.float32):
        return run_decoder(_filled(Decoder(config, self._group.parallel), folder, dtype))

    def run_dit(self, config, folder):
        return run_dit(_filled(DiT(config, self._group.parallel), folder, torch.float32))

    def run_adapted(self, kind, config, folder, adapters, lora_ids):
        """What this rank's part gives with adapters on its rows, and the bytes that the adapters take here."""
        make, run = (Decoder, run_decoder) if kind == "Decoder" else (DiT, lambda model: [run_dit(model)])
        model = _filled(make(config, self._group.parallel), folder, torch.float32)
        pool = CpuPool()
        loras = Loras(model, pool, slots=2, max_rank=8)
        for number, adapter in enumerate(adapters, start=1):
            loras.prepare(LoRARequest(f"a{number}", number, adapter))
            loras.commit(number)
        with loras.applied(lora_ids):
            outcome = run(model)
        used = sum(info.used_bytes for info in pool.tags().values())
        pool.close()
        return outcome, used

    def all_reduce(self, arrays, dtype=torch.float32):
        """The sums over the ranks, float32; each array has a row a rank."""
        parallel = self._group.parallel
        rows = [torch.from_numpy(array[parallel.rank]).to(dtype) for array in arrays]
        return [parallel.all_reduce(row).float().numpy() for row in rows]

    def any(self, flags):
        return self._group.parallel.any(flags[self._group.parallel.rank])


def _filled(model, folder, dtype):
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    load_into(model, folder)
    return model.eval()


@torch.inference_mode()
def run_decoder(model):
    """Scores of a prefill and a decode over a cache, and of a pass without one: float32 arrays."""
    config, parallel = model.config, model.parallel
    dtype = model.model.norm.weight.dtype
    ids = torch.randint(config.vocab_size, (2, 9), generator=torch.Generator().manual_seed(5))
    places = torch.arange(9).expand(2, 9)
    kv = torch.zeros(config.kv_shape(3, 16, parallel.size), dtype=dtype)
    slots = torch.tensor([2, 0])
    states = [
        model(ids[:, :8], places[:, :8], kv, slots),
        model(ids[:, 8:], places[:, 8:], kv, slots),
        model(ids, places),
    ]
    return [model.logits(state).float().numpy() for state in states]


@torch.inference_mode()
def run_dit(model):
    """Predicted images of a batch of three."""
    config = model.config
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(3, *config.image_shape, generator=generator)
    plan = torch.randint(config.plan_vocab_size, (3, config.plan_length), generator=generator)
    hidden = torch.randn(3, config.plan_length, config.cond_hidden_size, generator=generator)
    return model(x, torch.tensor([0.1, 0.5, 0.9]), plan, hidden, torch.tensor([True, False, True])).numpy()

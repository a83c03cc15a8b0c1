"""What is mixed into vLLM's worker class (`worker_extension_cls`): two calls, which reach our rank in that process.

vLLM imports this module before it makes the worker, hence before a weight is loaded: on a CPU its linear layers are
told here to keep their weights as parameters. Packed by oneDNN they would lie in buffers that nothing can address,
measure or give back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from vllm.platforms import current_platform

from omni_notebook.worker.vllm.wire import Attach

if TYPE_CHECKING:
    from omni_notebook.worker.vllm.rank import VllmRank


def keep_weights_addressable() -> None:
    """Have vLLM's CPU linear layers multiply with the parameter itself (`torch.nn.functional.linear`)."""
    from vllm import _custom_ops  # noqa: PLC0415  (a CPU build's module)
    from vllm.model_executor.layers import utils  # noqa: PLC0415

    _custom_ops._supports_onednn = False  # noqa: SLF001  (there is no switch)
    utils.check_cpu_sgl_kernel = lambda *_args, **_kwargs: False


if current_platform.is_cpu():
    keep_weights_addressable()


class OmniWorkerExtension:
    """Reached through `collective_rpc`; the answers go to the host by a socket of their own, one a rank."""

    omni_rank: VllmRank

    def omni_attach(self, attach: bytes) -> None:
        """Make the rank; vLLM has loaded the model and made its KV cache."""
        from omni_notebook.worker.vllm.rank import VllmRank  # noqa: PLC0415  (loads our pools)

        self.omni_rank = VllmRank(self, msgspec.msgpack.decode(attach, type=Attach))

    def omni_call(self, number: int, method: str, arguments: bytes) -> None:
        """Carry an order out and send its answer, whatever becomes of it."""
        self.omni_rank.answer(number, method, arguments)

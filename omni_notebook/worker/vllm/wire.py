"""What the engine, the host process and the ranks in vLLM's workers say to each other; plain types, no vLLM."""

from __future__ import annotations

from typing import Any

import msgspec

from omni_notebook.protocol import LoRARequest, RankStatus
from omni_notebook.worker.faults import Fault
from omni_notebook.worker.reports import WorkerSpec

LAST_WORDS = "omni: "
"""What the line begins with in which a host says why it ends."""


NEWS_AHEAD = 4
"""The host says news at most so often before it hears that the engine has taken some; until then they wait and merge,
so that an engine which is behind has less to take."""
MESSAGE_BYTES = 64 * 1024
"""How long what a rank says may be; what the system takes in one datagram differs, and what is longer it drops."""
UNASKED = 0
"""The number of a reply to no order: a rank refused what did not come from us."""


class TextRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request as the host takes it: `prompt` is text or token ids; `generated` were made before a restart."""

    request_id: str
    prompt: str | tuple[int, ...]
    generated: tuple[int, ...]
    seed: int
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]
    lora: LoRARequest | None = None


class TextOutput(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """News of one request: tokens and text since the last; `finish_reason` ends it, so does `fault`.

    The first says how many tokens of the prompt were cached, and for a prompt of text which they are.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    cached_tokens: int | None = None
    fault: Fault | None = None

    def followed_by(self, later: TextOutput) -> TextOutput:
        """Both as one."""
        return TextOutput(
            request_id=self.request_id,
            token_ids=self.token_ids + later.token_ids,
            text=self.text + later.text,
            finish_reason=later.finish_reason,
            prompt_token_ids=self.prompt_token_ids,
            cached_tokens=self.cached_tokens,
            fault=later.fault,
        )


class Attach(msgspec.Struct, frozen=True, kw_only=True):
    """The first order to a rank: what it belongs to, where its answers go (a datagram socket).

    `source`: the checkpoint folder that vLLM has loaded, None where the weights come from no file.
    """

    spec: WorkerSpec
    address: str
    source: str | None


class RankReply(msgspec.Struct, frozen=True, array_like=True, tag="reply"):
    """A rank's answer to order `number`: `value` is msgpack of the method's answer, unless it raised."""

    number: int
    rank: int
    value: bytes
    fault: Fault | None


class RankSample(msgspec.Struct, frozen=True, array_like=True, tag="sample"):
    """A rank's memory."""

    status: RankStatus


FromRank = RankReply | RankSample


def packed(value: Any) -> bytes:
    """Plain types as bytes."""
    return msgspec.msgpack.encode(value)

"""Golden outputs: what a fixed prompt and seed gave, and whether it gives the same again."""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from omni_notebook.errors import OmniError
from omni_notebook.protocol import MemoryState, RequestEvent, RequestState
from omni_notebook.verbs.auditing.record import OutputLine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from omni_notebook.protocol import EngineStatus, OmniRequestOutput, StageStatus
    from omni_notebook.verbs.engine_api import Engine

_AT_WORK = frozenset({RequestState.WAITING, RequestState.RUNNING})


@dataclass(frozen=True, slots=True)
class Route:
    """The stages that a generation goes through, and the modalities that ask for just that."""

    stages: tuple[int, ...]
    modalities: list[str] | None


def route_for(status: EngineStatus) -> Route | None:
    """The longest way through stages that are all awake: all of them, or the text; None where there is none."""
    stages = status.stages
    if all(map(_awake, stages)):
        return Route(tuple(stage.stage_id for stage in stages), None)
    for place, stage in enumerate(stages):
        if stage.kind == "ar":
            way = stages[: place + 1]
            return Route(tuple(s.stage_id for s in way), ["text"]) if all(map(_awake, way)) else None
    return None


def _awake(stage: StageStatus) -> bool:
    return stage.state is MemoryState.AWAKE


@dataclass(slots=True)
class Made:
    """What one generation gave: token ids a text stage, PIL images and their PNG files."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    images: list[Any] = field(default_factory=list)
    png: list[bytes] = field(default_factory=list)
    weight_versions: dict[str, str] = field(default_factory=dict)
    others: bool = False
    ms: float = 0.0

    def add(self, output: OmniRequestOutput) -> None:
        """Take one output of the request; later ones of a stage replace its earlier ones."""
        if output.outputs:
            self.tokens[output.stage_id] = list(output.outputs[0].token_ids)
        if output.finished:
            self.images, self.png = output.images, output.png
        if output.weight_version is not None:
            self.weight_versions[str(output.stage_id)] = output.weight_version

    def line(self, route: Route) -> OutputLine:
        """The record of it."""
        tokens = [(stage, self.tokens[stage]) for stage in sorted(self.tokens)]
        return OutputLine(
            covers=route.stages,
            tokens=sum(len(ids) for _, ids in tokens),
            tokens_sha256=_hash([repr(tokens).encode()]) if tokens else None,
            images=len(self.images),
            images_sha256=_hash(_pixels(self.images)) if self.images else None,
            weight_versions=dict(self.weight_versions),
            others=self.others,
            ms=self.ms,
        )


async def generate(engine: Engine, prompt: str, params: dict[str, Any], route: Route) -> Made:
    """One generation, from its admission to its last output; runs on the engine's loop.

    Raises:
        OmniError: it was refused, or it failed.
    """
    request_id = f"audit-{uuid.uuid4().hex[:8]}"
    made, events = Made(), engine.subscribe()
    watching = asyncio.create_task(_others(events, request_id, set(route.stages)))
    started_s = time.perf_counter()
    try:
        source = engine.generate(prompt, request_id, params, output_modalities=route.modalities, admission_timeout=0.0)
        async for output in source:
            made.add(output)
            if output.state == RequestState.ABORTED:
                msg = "the audit's own request was aborted by someone"
                raise OmniError(msg)
        made.ms = (time.perf_counter() - started_s) * 1000
    finally:
        events.close()
        made.others = await watching
    return made


async def _others(events: Any, request_id: str, stages: set[int]) -> bool:
    """Whether other requests were about in these stages."""
    seen = False
    async for event in events:
        if isinstance(event, RequestEvent) and event.request_id != request_id:
            seen |= event.stage_id in stages and event.state in _AT_WORK
    return seen


def compared(made: Made, golden: Made, route: Route) -> OutputLine:
    """The record of a generation beside the golden one."""
    return msgspec.structs.replace(
        made.line(route),
        same_tokens=made.tokens == golden.tokens if golden.tokens else None,
        same_images=_pixels(made.images) == _pixels(golden.images) if golden.images else None,
        same_weights=made.weight_versions == golden.weight_versions,
        max_difference=_max_difference(made.images, golden.images) if golden.images else None,
    )


def same(line: OutputLine) -> bool:
    """Whether nothing differs."""
    return line.same_tokens is not False and line.same_images is not False


def _max_difference(images: Sequence[Any], golden: Sequence[Any]) -> int | None:
    """The largest difference of a pixel's channel, 0 … 255; None where the images do not have the same shape."""
    import numpy as np  # noqa: PLC0415  (loaded when used)

    if [image.size for image in images] != [image.size for image in golden]:
        return None
    pairs = zip(images, golden, strict=True)
    return max(int(np.abs(np.asarray(a, np.int16) - np.asarray(b, np.int16)).max()) for a, b in pairs)


def difference_png(images: Sequence[Any], golden: Sequence[Any]) -> list[bytes]:
    """Where the first two images that differ do so, brightened to be seen; nothing where there is none to compare."""
    import numpy as np  # noqa: PLC0415  (loaded when used)
    from PIL import Image  # noqa: PLC0415

    for one, other in zip(images, golden, strict=False):
        if one.size == other.size and one.tobytes() != other.tobytes():
            off = np.abs(np.asarray(one.convert("RGB"), np.int16) - np.asarray(other.convert("RGB"), np.int16))
            buffer = io.BytesIO()
            Image.fromarray((off * 255 // max(int(off.max()), 1)).astype(np.uint8)).save(buffer, format="PNG")
            return [buffer.getvalue()]
    return []


def _pixels(images: Sequence[Any]) -> list[bytes]:
    return [repr((image.mode, image.size)).encode() + image.tobytes() for image in images]


def _hash(parts: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()

"""`generate` and `abort`."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from omni_notebook import units
from omni_notebook.errors import (
    ArgumentError,
    AsleepError,
    EngineClosedError,
    NeedsWeightsError,
    OmniError,
    PausedError,
    StageFailedError,
)
from omni_notebook.protocol import RequestEvent, RequestState
from omni_notebook.verbs import hints
from omni_notebook.verbs.frontend import PlainFrontend, Progress
from omni_notebook.verbs.interrupts import InterruptedVerb, interrupts_held
from omni_notebook.verbs.jobs import Work, add_background, begin, written
from omni_notebook.verbs.lora import find
from omni_notebook.verbs.parsing import LORA, REQUEST, VerbParser, add_out
from omni_notebook.verbs.registry import verb

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator

    from omni_notebook.protocol import Event, OmniRequestOutput
    from omni_notebook.verbs.engine_api import Engine
    from omni_notebook.verbs.frontend import Frontend
    from omni_notebook.verbs.jobs import Job
    from omni_notebook.verbs.session import Session


_CLOSED = (AsleepError, PausedError, NeedsWeightsError, StageFailedError)


@dataclass(kw_only=True)
class Generation:
    """What `%omni generate` returns.

    Attributes:
        prompt: the text that was asked for.
        text: what the AR stage wrote.
        images: PIL images, as the diffusion stage made them.
        output: the request's last output, with ids and metrics.
        seed, steps, guidance: what it was made with; steps and guidance are None for text.
        lora: the name of the adapter that had a part in it, or None.
        elapsed_s: seconds from the call to the last output.
    """

    prompt: str
    request_id: str
    text: str = ""
    images: list[Any] = field(default_factory=list)
    output: OmniRequestOutput | None = None
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None
    lora: str | None = None
    elapsed_s: float = 0.0

    def caption(self) -> str:
        """`seed 42 · 20 steps · guidance 2 · 0.84 s`."""
        parts = [
            None if self.seed is None else f"seed {self.seed}",
            None if self.steps is None else f"{self.steps} steps",
            None if self.guidance is None else f"guidance {self.guidance:g}",
            None if self.lora is None else f"lora {self.lora}",
            f"{self.elapsed_s:.2f} s",
        ]
        if self.output is not None and self.output.state == RequestState.ABORTED:
            parts.append("ABORTED")
        return " · ".join(part for part in parts if part)

    def __repr__(self) -> str:
        """What it is, in one line."""
        what = units.count(len(self.images), "image") if self.images else f"{len(self.text)} characters"
        return f"<Generation {self.request_id}: {what}, {self.caption()}>"


class _Stream:
    """Outputs on their way from the engine's loop to the waiting thread, which writes new text as it comes."""

    def __init__(self, frontend: Frontend, label: str = "") -> None:
        self.outputs: deque[OmniRequestOutput] = deque()
        self.text = ""
        self.last: OmniRequestOutput | None = None
        self.images: list[Any] = []
        self._previewed = False
        self._frontend = frontend
        self._label = label

    async def fill(self, source: AsyncIterator[OmniRequestOutput], *, keep: bool = True) -> None:
        """Runs on the engine's loop; closes the source also when it is cancelled. `keep` them for a thread to drain."""
        try:
            async for output in source:
                self.outputs.append(output)
                if not keep:
                    self.drain()
        finally:
            if isinstance(source, AsyncGenerator):
                await source.aclose()

    def drain(self) -> None:
        """Runs on the waiting thread; writes what is new in one piece."""
        text = self.text
        while self.outputs:
            output = self.outputs.popleft()
            self.last = output
            self.images = output.images or self.images
            if output.images and not output.finished:
                self._previewed = True
                self._frontend.preview(output.images, _how_far(output.metrics))
            text = output.text or text
        if text != self.text:
            label = "" if self.text else self._label
            self._frontend.write(label + (text[len(self.text) :] if text.startswith(self.text) else f"\n{text}"))
            self.text = text

    def progress(self) -> Progress:
        """How far the request is, by its last output."""
        if self.last is None:
            return Progress("waiting for the first output")
        metrics = self.last.metrics
        if metrics.get("step"):
            return Progress(_how_far(metrics), metrics["step"] / max(metrics.get("num_inference_steps") or 1, 1))
        if self.last.final_output_type != "image":
            return Progress(f"{len(self.text)} characters of text")
        if self.last.outputs and self.last.outputs[0].finish_reason is not None:
            return Progress("the plan is written, the image is queued or being drawn")
        return Progress(f"the plan is being written, {len(self.text)} characters")

    def end(self) -> None:
        """Close the line of text that was being written, and take previews away."""
        if self._previewed:
            self._frontend.preview([], "")
        if self.text and not self.text.endswith("\n"):
            self._frontend.write("\n")


def _how_far(metrics: dict[str, Any]) -> str:
    return f"step {metrics.get('step')} of {metrics.get('num_inference_steps')}"


@verb
class Generate:
    """Generate from a prompt: the text streams, images show with seed, steps and time.

    On a step-level stage (start --step-execution) an image sharpens in place while it is drawn.
    The prompt is the cell (%%omni generate) or the rest of the line. A gate that is closed refuses at once.
    Where a diffusion stage follows, the text is its plan and is shown as such.
    Example: %omni generate a red star above a blue circle --seed 42
    """

    name = "generate"
    gives_orders = True
    takes_cell = True
    quotes = '"'
    python = "async for out in engine.generate(prompt)"

    def prepare_parser(self, parser: VerbParser) -> None:
        """The prompt and how to sample."""
        parser.add_argument("prompt", nargs="*", help="the prompt, in the line form")
        parser.add_argument("--seed", type=int, metavar="N", help="same seed, same bytes; none = a fresh one")
        parser.add_argument("--steps", type=int, metavar="N", help="denoise steps; time grows with them")
        parser.add_argument("--guidance", type=float, metavar="X", help="classifier-free guidance, 1 = off")
        parser.add_argument("--max-tokens", type=int, metavar="N", help="most new tokens of text")
        parser.add_argument("--temperature", type=float, metavar="X", help="0 = the likeliest token each time")
        parser.add_argument("--lora", metavar=LORA, help="id or name of an adapter (%%omni lora list)")
        parser.add_argument("--text-only", action="store_true", help="end after the text; no image stage is needed")
        add_out(parser)
        add_background(parser)

    def run(self, session: Session, args: argparse.Namespace) -> Generation | Job[Generation]:
        """The text and the images; with --bg a job that comes to them."""
        prompt = _prompt(args)
        args.lora_id = None if args.lora is None else find(session.engine.status(), args.lora).lora_int_id
        if args.bg:
            job = _in_background(session, prompt, args)
            session.store(args.out, job)
            return job
        draws = not args.text_only and any(stage.kind == "diffusion" for stage in session.engine.status().stages)
        stream = _Stream(session.frontend, "plan: " if draws else "")
        request_id = f"nb-{uuid.uuid4().hex[:8]}"
        begin = time.perf_counter()
        try:
            session.call(lambda engine: stream.fill(_source(engine, prompt, request_id, args)), tick=stream.drain)
        except InterruptedVerb as interrupt:
            raise InterruptedVerb(
                str(interrupt).replace("interrupted;", "interrupted: the request was aborted;")
            ) from None
        except OmniError as error:
            _explain(error, session, args)
            raise
        finally:
            stream.end()
        made = _generation(prompt, request_id, stream)
        made.elapsed_s = time.perf_counter() - begin
        session.frontend.write(f"{made.caption()}\n")
        session.store(args.out, made)
        return made


class _Mute(PlainFrontend):
    """Shows nothing: what a request gives behind the notebook is kept, not written."""

    def write(self, text: str) -> None:
        """Nowhere."""


def _in_background(session: Session, prompt: str, args: argparse.Namespace) -> Job[Generation]:
    engine, stream = session.engine, _Stream(_Mute())
    request_id = f"nb-{uuid.uuid4().hex[:8]}"
    source = _source(engine, prompt, request_id, args)

    def is_sign(event: Event) -> bool:
        return isinstance(event, RequestEvent) and event.request_id == request_id

    with interrupts_held():
        try:
            future = begin(engine, _collect(engine, stream, source, prompt), is_sign)
        except OmniError as error:
            _explain(error, session, args)
            raise
        work = Work(
            written("generate", args, prompt),
            future,
            gauge=stream.progress,
            explain=lambda error: _explain(error, session, args),
        )
        return session.jobs.start(work)


async def _collect(
    engine: Engine, stream: _Stream, source: AsyncIterator[OmniRequestOutput], prompt: str
) -> Generation:
    """Runs on the engine's loop.

    Raises:
        EngineClosedError: the engine was stopped, and the request aborted with it.
    """
    begin = time.perf_counter()
    await stream.fill(source, keep=False)
    last = stream.last
    if last is not None and last.state == RequestState.ABORTED and engine.status().closed:
        msg = "the engine was stopped before the request ended; start a new one"
        raise EngineClosedError(msg)
    made = _generation(prompt, "" if last is None else last.request_id, stream)
    made.elapsed_s = time.perf_counter() - begin
    return made


def _prompt(args: argparse.Namespace) -> str:
    line = " ".join(args.prompt).strip()
    cell = (args.cell or "").strip()
    if line and cell:
        msg = "omni generate got a prompt in the line and one in the cell; give one; nothing was started"
        raise ArgumentError(msg)
    if not line and not cell:
        msg = "omni generate: the prompt is empty; write it in the cell, or after %omni generate; nothing was started"
        raise ArgumentError(msg)
    return line or cell


def _source(engine: Engine, prompt: str, request_id: str, args: argparse.Namespace) -> AsyncIterator[OmniRequestOutput]:
    modalities = ["text"] if args.text_only else None
    return engine.generate(
        prompt,
        request_id,
        _sampling(args),
        output_modalities=modalities,
        admission_timeout=0.0,
        lora_request=args.lora_id,
    )


def _explain(error: OmniError, session: Session, args: argparse.Namespace) -> None:
    """Name everything that kept the prompt out, not only the first gate; and the flag that a cut plan needs."""
    if isinstance(error, _CLOSED):
        gates = hints.closed_gates(session.engine.status(), text_only=args.text_only)
        if gates is not None:
            error.args = (f"{gates}; nothing was started",)
    elif args.max_tokens is not None and "is not a scene plan" in str(error):
        error.args = (f"{error}; --max-tokens {args.max_tokens} may have cut the plan: raise it, or leave it out",)


def _sampling(args: argparse.Namespace) -> dict[str, Any]:
    given = {
        "seed": args.seed,
        "num_inference_steps": args.steps,
        "guidance_scale": args.guidance,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
    }
    return {key: value for key, value in given.items() if value is not None}


def _generation(prompt: str, request_id: str, stream: _Stream) -> Generation:
    metrics = stream.last.metrics if stream.last else {}
    drawn = bool(stream.images)
    return Generation(
        prompt=prompt,
        request_id=request_id,
        text=stream.text,
        images=stream.images,
        output=stream.last,
        seed=metrics.get("seed"),
        steps=metrics.get("num_inference_steps") if drawn else None,
        guidance=metrics.get("guidance_scale") if drawn else None,
        lora=metrics.get("lora"),
    )


@verb
class Abort:
    """End a request; its consumer gets what there is, marked as aborted.

    A prompt of %omni generate is ended by Ctrl-C; this is for requests that Python started with a request_id.
    Example: %omni abort nb-1a2b3c4d
    """

    name = "abort"
    gives_orders = True
    python = "await engine.abort(request_id)"

    def prepare_parser(self, parser: VerbParser) -> None:
        """One request."""
        parser.add_argument("request_id", metavar=REQUEST, help="the request's id")

    def run(self, session: Session, args: argparse.Namespace) -> None:
        """Abort, and say so."""
        ended = session.call(lambda engine: engine.abort(args.request_id))
        what = "was aborted" if ended else "is not in progress: nothing was aborted"
        session.frontend.write(f"request {args.request_id} {what}\n")

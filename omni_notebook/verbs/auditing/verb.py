"""`audit`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from omni_notebook.engine.ledger_file import ledger_path, refuse_ledger
from omni_notebook.errors import ArgumentError, OmniError
from omni_notebook.paths import expanded
from omni_notebook.protocol import sampling_params_from
from omni_notebook.verbs.auditing.calls import auditor_of, in_front
from omni_notebook.verbs.auditing.judging import GROWTH_CYCLES
from omni_notebook.verbs.auditing.plan import PROMPT, SEED, plan_from
from omni_notebook.verbs.interrupts import InterruptedVerb, interrupts_held
from omni_notebook.verbs.jobs import Work, add_background, written
from omni_notebook.verbs.parsing import VerbParser, add_out, add_stages, size
from omni_notebook.verbs.registry import verb
from omni_notebook.verbs.waits import Background, in_thread

if TYPE_CHECKING:
    import argparse

    from omni_notebook.verbs.auditing.plan import Plan
    from omni_notebook.verbs.auditing.result import AuditResult
    from omni_notebook.verbs.jobs import Job
    from omni_notebook.verbs.session import Session

_FILES = ("html", "json", "csv")


@verb
class Audit:
    """Prove a sleep: memory gone as seen from outside, memory back, the same outputs; PASS, WARN or FAIL.

    Generates twice from the prompt, then sleeps, looks at the ranks' processes from another process, wakes and
    generates again; each --cycles once more. The engine must be idle, the stages awake. --probe takes that much memory
    while they sleep, as a trainer would, and gives it back: the first line then says whether a trainer may take it.
    Afterwards the stages are awake again. Level 2 never gives up weights that can not be had again.
    Example: %omni audit 0 1 --level 2 --prompt "a red star" --probe 256MiB --html audit.html
    """

    name = "audit"
    gives_orders = True
    python = "omni.audit(stage_ids=[0], level=2)"

    def prepare_parser(self, parser: VerbParser) -> None:
        """Stages, what to generate, how often, and where to write."""
        add_stages(parser, "audit")
        parser.add_argument("--level", type=int, choices=(1, 2), default=2, help="of the sleep (default 2)")
        parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help=f"what to generate ({PROMPT!r})")
        parser.add_argument("--seed", type=int, default=SEED, metavar="N", help=f"of the generation ({SEED})")
        parser.add_argument("--steps", type=int, metavar="N", help="denoise steps; time grows with them")
        growth = f"how often (default 1); {GROWTH_CYCLES} or more also judge whether memory grows"
        parser.add_argument("--cycles", type=int, default=1, metavar="N", help=growth)
        parser.add_argument("--probe", type=size, metavar="SIZE", help="memory to take while they sleep, as 256MiB")
        for kind in _FILES:
            parser.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write the report as {kind.upper()}")
        add_out(parser)
        add_background(parser)

    def run(self, session: Session, args: argparse.Namespace) -> AuditResult | Job[AuditResult]:
        """The result; it is kept before an interrupt that came too late is raised. With --bg a job that comes to it."""
        plan, files = _plan(session, args), _files(args)
        if args.bg:
            job = _in_background(session, plan, files, written(self.name, args))
            session.store(args.out, job)
            return job
        try:
            result = in_front(session.engine, plan, session.frontend)
        except InterruptedVerb as interrupt:
            if interrupt.result is not None:
                session.store(args.out, interrupt.result)
            raise
        session.store(args.out, result)
        paths = write(result, files)
        session.frontend.write("".join(f"{line}\n" for line in (*result.first_lines(), *map(_written, paths))))
        return result


def _in_background(session: Session, plan: Plan, files: dict[str, Path], line: str) -> Job[AuditResult]:
    engine, wait = session.engine, Background()
    plan.stages(engine.status())  # a refusal is this line's, not the job's
    sampling_params_from(plan.params)

    def work() -> AuditResult:
        result = auditor_of(engine, plan, wait).run()
        write(result, files)
        return result

    with interrupts_held():
        future = in_thread(work, "omni-audit")
        session.frontend.write("".join(f"at its end: {path.absolute()}\n" for path in files.values()))
        return session.jobs.start(Work(line, future, stop=wait.stop.set, gauge=wait.progress))


def _plan(session: Session, args: argparse.Namespace) -> Plan:
    sampling: dict[str, Any] = {} if args.steps is None else {"num_inference_steps": args.steps}
    return plan_from(
        session.stage_ids(args.stages),
        args.probe,
        level=args.level,
        prompt=args.prompt,
        seed=args.seed,
        cycles=args.cycles,
        sampling=sampling,
    )


def _files(args: argparse.Namespace) -> dict[str, Path]:
    """`{kind: path}` of what is to be written, each in a folder that is there.

    Raises:
        ArgumentError: a folder is not there, or a file is the ledger; nothing was changed.
    """
    files = {kind: expanded(getattr(args, kind)) for kind in _FILES if getattr(args, kind) is not None}
    for kind, path in files.items():
        refuse_ledger(path, ledger_path())
        if path.is_dir() or not path.parent.is_dir():
            what = "is a folder" if path.is_dir() else "is in a folder that does not exist"
            msg = f"omni audit: --{kind} {path} {what}; nothing was changed"
            raise ArgumentError(msg)
    return files


def _written(path: Path) -> str:
    return f"written: {path}"


def write(result: AuditResult, files: dict[str, Path]) -> list[Path]:
    """Write the report's files, all that can be; where they are.

    Raises:
        OmniError: one could not be written; the verdict and its reasons are in the message.
    """
    failed = []
    for kind, path in files.items():
        try:
            getattr(result, f"to_{kind}")(path)
        except OSError as error:
            failed.append(f"{path} could not be written: {error.strerror or error}")
    if failed:
        reasons = "; ".join(result.reasons)
        msg = f"the audit ended with {result.verdict}, but {'; '.join(failed)}. Why {result.verdict}: {reasons}"
        raise OmniError(msg)
    return [path.absolute() for path in files.values()]

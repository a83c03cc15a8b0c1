"""An audit as HTML: a page that needs nothing else, and the part of it that a notebook shows. Every text is escaped."""

from __future__ import annotations

import base64
from html import escape
from typing import TYPE_CHECKING

from omni_notebook import units
from omni_notebook.palette import GREEN, ORANGE, RED
from omni_notebook.verbs.auditing import drawing
from omni_notebook.verbs.auditing.record import Verdict
from omni_notebook.verbs.auditing.summary import not_judged, summary, trainer_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omni_notebook.verbs.auditing.record import Cycle, OutputLine, ProcessLine, RankLine
    from omni_notebook.verbs.auditing.result import AuditResult

_MARKS = {Verdict.PASS: ("✓", GREEN), Verdict.WARN: ("!", ORANGE), Verdict.FAIL: ("✗", RED)}
_OPEN_ROWS = 12
_STYLE = """
.omni-audit{color:inherit;font-family:system-ui,sans-serif;line-height:1.45;max-width:1280px}
.omni-audit h1{font-size:1.3em;margin:.2em 0;display:flex;gap:.6em;align-items:center;flex-wrap:wrap}
.omni-audit h2{font-size:1.05em;margin:1.2em 0 .3em}
.omni-audit .badge{color:#000;padding:.1em .6em;border-radius:.3em;font-weight:700}
.omni-audit .fail .badge{color:#fff}
.omni-audit ul{margin:.2em 0;padding-left:1.3em}
.omni-audit li.FAIL::marker{content:"✗ ";color:#D55E00}
.omni-audit li.WARN::marker{content:"! ";color:#E69F00}
.omni-audit li.PASS::marker{content:"✓ ";color:#009E73}
.omni-audit .charts,.omni-audit .pictures{display:flex;flex-wrap:wrap;gap:1em}
.omni-audit figure{margin:0}
.omni-audit figcaption,.omni-audit .quiet{font-size:.88em;opacity:.8}
.omni-audit .legend span{margin-right:1.2em;font-size:.9em}
.omni-audit img{width:192px;height:auto;image-rendering:pixelated;border:1px solid rgba(128,128,128,.5)}
.omni-audit .scroll{overflow-x:auto}
.omni-audit table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.9em;color:inherit}
.omni-audit th,.omni-audit td{padding:3px 8px;text-align:left!important;vertical-align:top;border-bottom:1px solid
 rgba(128,128,128,.35);white-space:nowrap;background:none}
.omni-audit td.wide{white-space:normal;min-width:16em}
.omni-audit tr.bad td:first-child{border-left:4px solid #D55E00}
.omni-audit code{font-size:.92em;overflow-wrap:anywhere}
.omni-audit summary{cursor:pointer}
"""
_PAGE_STYLE = ":root{color-scheme:light dark}body{margin:1.5em;background:Canvas;color:CanvasText}"


def page(result: AuditResult) -> str:
    """The whole report as a page of its own."""
    title = f"Audit {result.verdict}: {result.record.model}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{_PAGE_STYLE}</style></head>'
        f"<body>{fragment(result, whole=True)}</body></html>\n"
    )


def fragment(result: AuditResult, *, whole: bool = False) -> str:
    """The report without a page around it; only a `whole` one has every finding and how things were judged."""
    parts = [_head(result), _reasons(result), _charts(result), _processes(result), _ranks(result), _outputs(result)]
    if whole:
        parts += [_probes(result), _all_findings(result), _asked(result), _method(result)]
    return f'<div class="omni-audit"><style>{_STYLE}</style>{"".join(parts)}</div>'


# --------------------------------------------------------------------------------------- the verdict


def _head(result: AuditResult) -> str:
    mark, colour = _MARKS[result.record.verdict]
    badge = f'<span class="badge" style="background:{colour}">{mark} {result.verdict}</span>'
    answer = trainer_line(result.record)
    said = "" if answer is None else f"<p><strong>{escape(answer)}</strong></p>"
    return f'<h1 class="{result.verdict.lower()}">{badge}Audit · {escape(_subject(result))}</h1>{said}'


def _subject(result: AuditResult) -> str:
    return result.headline().removeprefix(f"audit {result.verdict} · ")


def _reasons(result: AuditResult) -> str:
    record = result.record
    passed = record.verdict is Verdict.PASS
    seen = [(line, Verdict.PASS if passed else None) for line in summary(record)]
    seen += [(line, None) for line in not_judged(record)]
    bad = [f for kind in (Verdict.FAIL, Verdict.WARN) for f in result.findings if f.severity is kind]
    why = f"<h2>Why</h2>{_list((str(finding), finding.severity) for finding in bad)}" if bad else ""
    return f"{why}<h2>What was seen</h2>{_list(seen)}"


def _list(items: Iterable[tuple[str, Verdict | None]]) -> str:
    made = "".join(f'<li class="{kind or ""}">{escape(text)}</li>' for text, kind in items)
    return f"<ul>{made}</ul>"


# ---------------------------------------------------------------------------------- charts and tables


def _charts(result: AuditResult) -> str:
    processes = drawing.chosen(result.cycles)
    if not processes:
        return ""
    all_of_them = len({(p.pid, p.device) for c in result.cycles for p in c.processes if p.source is not None})
    left_out = f" The {len(processes)} largest of {all_of_them} processes." if len(processes) < all_of_them else ""
    figures = "".join(
        f"<figure><figcaption>process {lines[0].pid} · {escape(', '.join(lines[0].ranks))}</figcaption>"
        f"{drawing.chart(lines)}</figure>"
        for lines in processes
    )
    return (
        f"<h2>What the ranks' processes held, as seen from outside</h2>{drawing.legend()}"
        f'<div class="charts">{figures}</div><p class="quiet">{left_out}</p>'
    )


_PROCESS_COLUMNS = (
    "cycle",
    "process",
    "ranks",
    "before",
    "asleep",
    "awake again",
    "gone / freed",
    "came back / mapped",
    "tolerance",
    "seen by",
)


def _processes(result: AuditResult) -> str:
    rows = [(_process_cells(cycle, line), line.source is None) for cycle in result.cycles for line in cycle.processes]
    return _section(
        "Processes: what was gone and came back, as seen from outside / what their ACKs say", _PROCESS_COLUMNS, rows
    )


def _process_cells(cycle: Cycle, line: ProcessLine) -> tuple[str, ...]:
    return (
        str(cycle.number),
        f"{line.pid} · {line.device}",
        ", ".join(line.ranks),
        units.size(line.before_bytes),
        units.size(line.asleep_bytes),
        units.size(line.awake_bytes),
        f"{units.size(line.left_bytes)} / {units.size(line.freed_bytes)}",
        f"{units.size(line.came_back_bytes)} / {units.size(line.mapped_bytes)}",
        units.size(line.tolerance_bytes),
        str(line.source) if line.source else f"not available: {line.why_not}",
    )


_RANK_COLUMNS = (
    "cycle",
    "rank",
    "sleep",
    "freed",
    "expected",
    "residual",
    "host backup",
    "sleep took",
    "wake",
    "mapped",
    "wake took",
    "error",
)


def _ranks(result: AuditResult) -> str:
    rows = [(_rank_cells(cycle, line), _is_bad(line)) for cycle in result.cycles for line in cycle.ranks]
    return _section("Ranks: what they answered (source: ack)", _RANK_COLUMNS, rows)


def _is_bad(line: RankLine) -> bool:
    return line.sleep_status != "SUCCESS" or line.wake_status not in {"SUCCESS", None}


def _rank_cells(cycle: Cycle, line: RankLine) -> tuple[str, ...]:
    return (
        str(cycle.number),
        line.place,
        line.sleep_status or "no answer",
        units.size(line.freed_bytes),
        units.size(line.expected_bytes),
        units.size(line.residual_bytes),
        units.size(line.host_backup_bytes),
        units.milliseconds(line.sleep_ms),
        line.wake_status or "no answer",
        units.size(line.mapped_bytes),
        units.milliseconds(line.wake_ms),
        "; ".join(filter(None, (line.sleep_error, line.wake_error))),
    )


def _section(title: str, columns: Sequence[str], rows: Sequence[tuple[tuple[str, ...], bool]]) -> str:
    """A table under its title; columns in which nothing stands are left out, a long table is folded."""
    if not rows:
        return ""
    said = [any(cells[place] not in {"", units.NONE} for cells, _ in rows) for place in range(len(columns))]
    head = "".join(f'<th scope="col">{escape(c)}</th>' for c, say in zip(columns, said, strict=True) if say)
    body = "".join(
        f'<tr class="{"bad" if bad else ""}">'
        + "".join(_cell(c, text) for c, text, say in zip(columns, cells, said, strict=True) if say)
        + "</tr>"
        for cells, bad in rows
    )
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    if len(rows) > _OPEN_ROWS:
        table = f"<details><summary>{len(rows)} rows</summary>{table}</details>"
    return f"<h2>{escape(title)}</h2>{table}"


def _cell(column: str, text: str) -> str:
    wide = ' class="wide"' if column in {"error", "outcome", "seen by"} and len(text) > len("nvml") else ""
    return f"<td{wide}>{escape(text)}</td>"


# ------------------------------------------------------------------------------------------- outputs


def _outputs(result: AuditResult) -> str:
    golden = result.record.golden
    if golden is None:
        return ""
    figures = "".join(
        f'<figure><img src="data:image/png;base64,{base64.b64encode(png).decode()}" alt="{escape(name, quote=True)}">'
        f"<figcaption>{escape(name)}</figcaption></figure>"
        for name, files in result.pictures.items()
        for png in files
    )
    rows = [(_output_cells("before the sleep", golden), False)]
    rows += [(_output_cells(str(c.number), c.output), False) for c in result.cycles if c.output is not None]
    columns = ("cycle", "tokens", "images", "largest difference", "SHA-256 of the pixels", "others ran", "took")
    table = _section("Outputs (source: output)", columns, rows)
    prompt = f"<p>Prompt: <code>{escape(result.record.prompt)}</code>, seed {result.record.seed}</p>"
    return f'{table}{prompt}<div class="pictures">{figures}</div>'


def _output_cells(name: str, line: OutputLine) -> tuple[str, ...]:
    return (
        name,
        _same(line.tokens, same=line.same_tokens),
        _same(line.images, same=line.same_images) if line.images_sha256 else units.NONE,
        units.NONE if line.max_difference is None else f"{line.max_difference} of 255",
        units.NONE if line.images_sha256 is None else f"{line.images_sha256[:16]}…",
        "yes" if line.others else "no",
        units.milliseconds(line.ms),
    )


def _same(count: int, *, same: bool | None) -> str:
    return str(count) if same is None else f"{count} {'✓ the same' if same else '✗ DIFFERENT'}"


# --------------------------------------------------------------------------------------- the details


def _probes(result: AuditResult) -> str:
    rows = [
        (
            (
                str(cycle.number),
                units.size(cycle.probe.asked_bytes),
                units.size(cycle.probe.taken_bytes),
                units.size(cycle.probe.available_bytes),
                units.milliseconds(cycle.probe.ms),
                cycle.probe.outcome,
            ),
            not cycle.probe.taken,
        )
        for cycle in result.cycles
        if cycle.probe is not None
    ]
    columns = ("cycle", "asked for", "taken", "free beside the reserve", "took", "outcome")
    return _section("Could a trainer take it? (source: probe)", columns, rows)


def _all_findings(result: AuditResult) -> str:
    found = _list((str(finding), finding.severity) for finding in result.findings)
    return f"<h2>All findings</h2><details><summary>{len(result.findings)} findings</summary>{found}</details>"


def _asked(result: AuditResult) -> str:
    record = result.record
    stages = [f"stage {s.stage_id} ({s.name}, {s.kind}, weights {s.weight_version}): {s.model}" for s in record.stages]
    facts = [
        f"model {record.model}, omni-notebook {record.version}",
        f"begun {record.started}, took {record.elapsed_s:.1f} s",
        f"level {record.level}, {units.count(record.cycles_asked, 'cycle')}, sampling {record.sampling_params}",
        *stages,
    ]
    return f"<h2>What was asked</h2>{_list((fact, None) for fact in facts)}"


def _method(result: AuditResult) -> str:
    record = result.record
    sources = [f"{name}: {meaning}" for name, meaning in record.sources.items()]
    return f"<h2>How it was judged</h2>{_list((line, None) for line in (*record.rules, *sources))}"

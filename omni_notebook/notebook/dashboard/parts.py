"""The pieces of a dashboard that are text and tables: head, cards, bars, devices, log. Pure; every text escaped."""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from omni_notebook import units
from omni_notebook.notebook import charts
from omni_notebook.notebook.dashboard import looks
from omni_notebook.notebook.dashboard.log import Moved
from omni_notebook.notebook.dashboard.orders import CLOSED
from omni_notebook.protocol import PauseState
from omni_notebook.verbs import hints

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from omni_notebook.notebook.dashboard.devices import Device
    from omni_notebook.notebook.dashboard.log import Answered, Log
    from omni_notebook.protocol import EngineStatus, OmniACK, RankStatus, StageStatus, TagMemory

MOST_BARS = 16
SHOWN_ORDERS, SHOWN_ACKS, SHOWN_ROWS, SHOWN_HOLDERS = 12, 4, 256, 12

CSS = f"""
.omni-dash {{ color: {looks.INK}; line-height: 1.45; }}
.omni-dash table {{ border-collapse: collapse; color: inherit; font-variant-numeric: tabular-nums; }}
.omni-dash th, .omni-dash td {{ padding: 2px 8px; text-align: left; vertical-align: top; }}
.omni-dash tr {{ border-bottom: 1px solid {looks.LINE}; background: none; }}
.omni-dash .omni-numbers td {{ white-space: nowrap; }}
.omni-dash .omni-soft {{ color: {looks.SOFT}; }}
.omni-dash .omni-alarm {{ color: {looks.ALARM}; overflow-wrap: anywhere; }}
.omni-dash .omni-title {{ font-weight: 600; }}
.omni-dash .omni-scroll {{ overflow: auto; max-height: 22em; }}
.omni-dash .omni-wrong {{ border-left: 4px solid {charts.RED}; }}
.omni-dash .omni-grid {{ display: grid; gap: 4px 14px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, var(--omni-width)), 1fr)); }}
.omni-dash .omni-grid svg {{ width: 100%; max-width: calc(var(--omni-width) * 1.3); overflow: visible; }}
.omni-dash .omni-facts {{ display: grid; grid-template-columns: max-content 1fr; gap: 0 10px; }}
.omni-dash .omni-facts > :nth-child(odd) {{ color: {looks.SOFT}; }}
.omni-dashboard .widget-html, .omni-dashboard .widget-html-content {{ min-width: 0; max-width: 100%; }}
.omni-dashboard .jupyter-widget-Collapse-header {{ color: {looks.INK}; }}
.omni-card {{ border: 1px solid {looks.LINE}; border-radius: 4px; }}
.omni-card .jupyter-button {{ width: auto; padding: 0 9px; }}
""".strip()


def dash(content: str, *, drawn_ms: int | None = None) -> str:
    """Content under the dashboard's style; `drawn_ms` is the wall clock's time of a drawing."""
    stamp = "" if drawn_ms is None else f' data-drawn-ms="{drawn_ms}"'
    return f'<div class="omni-dash"{stamp}>{content}</div>'


# ------------------------------------------------------------------------------------------ words


def head(status: EngineStatus, trouble: str = "") -> str:
    """The engine's line."""
    if status.left_at is not None:
        words = f"■ disconnected · the engine there was left as it is; %omni connect {status.left_at} connects again"
    elif status.closed:
        words = f"■ shut down · {CLOSED}"
    else:
        words = f"admission {'closed' if status.paused else 'open'} · up {units_of_time(status.uptime_s)}"
    alarm = f'<div class="omni-alarm" role="alert">✗ {looks.text(trouble)}</div>' if trouble else ""
    return dash(f'<span class="omni-title">{looks.text(status.model)}</span> · {looks.text(words)}{alarm}')


def units_of_time(seconds: float) -> str:
    """`12 s`, `3 min 05 s`, `2 h 10 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def card(stage: StageStatus, *, closed: bool = False) -> str:
    """What a stage is and does."""
    paused = stage.pause_state is not PauseState.OPEN
    sign, colour = looks.badge(stage.state, closed=closed, paused=paused)
    state = "STOPPED" if closed else hints.memory_words(stage)
    name, kind = f"{stage.stage_id} {stage.name}", f"{stage.kind} · {stage.runtime} · {_short(stage.model)}"
    title = (
        f'<div title="{looks.text(stage.model)}"><span class="omni-title">{looks.text(name)}</span> '
        f'<span class="omni-soft">{looks.text(kind)}</span></div>'
        f'<div style="font-weight:600"{_held_out(paused=paused and not closed)}>'
        f'<span aria-hidden="true" style="color:{colour}">{sign}</span> '
        f"{looks.text(state)}{_pause(stage, closed=closed)}</div>"
    )
    facts = "".join(f"<span>{looks.text(name)}</span><span>{looks.text(text)}</span>" for name, text in _facts(stage))
    return dash(f'{title}<div class="omni-facts">{facts}</div>')


def _short(model: str) -> str:
    """The last two parts of a path."""
    parts = model.rstrip("/").split("/")
    return model if len(parts) <= 2 else f"…/{'/'.join(parts[-2:])}"


def _pause(stage: StageStatus, *, closed: bool) -> str:
    if closed:
        return ""
    mode = f" ({stage.pause_mode})" if stage.pause_mode else ""
    return f' <span class="omni-soft">·</span> {looks.text(f"{stage.pause_state}{mode}")}'


def _held_out(*, paused: bool) -> str:
    """A tooltip on the state: what a pause means for a new request."""
    return f' title="{looks.text(f"paused; a new request: {hints.NEW_REQUESTS}")}"' if paused else ""


def _facts(stage: StageStatus) -> Iterable[tuple[str, str]]:
    ranks = stage.ranks
    resident, mapped = resident_bytes(ranks), mapped_bytes(ranks)
    yield "weights", (stage.weight_version or units.NONE) + ("" if stage.recoverable else " · can NOT be read again")
    yield "requests", f"{stage.running} running · {stage.queued} queued" + _more(stage)
    many = f" in {len(ranks)} ranks" if len(ranks) > 1 else ""
    yield "memory", f"{units.size(resident)} of {units.size(mapped)}{many}" if mapped else _in_processes(stage) + many
    yield "host copy", units.size(stage.host_backup_bytes)


def _in_processes(stage: StageStatus) -> str:
    """What the ranks' processes hold, where nobody tells what of it is a pool."""
    sizes = [rank.process_bytes for rank in stage.ranks]
    return units.size(None if None in sizes else sum(size or 0 for size in sizes))


def _more(stage: StageStatus) -> str:
    parts = ((stage.in_transit, "in transit"), (stage.waiting_at_gate, "at the gate"))
    return "".join(f" · {count} {word}" for count, word in parts if count)


def below(stage: StageStatus, words: str, *, wrong: bool, closed: bool = False) -> str:
    """What stands under a stage's buttons, so that they never move: the last press, trouble, the call that helps."""
    ink = "omni-alarm" if wrong else "omni-soft"
    note = f'<div role="status" class="{ink}">{looks.text(" ".join(words.split()))}</div>' if words else ""
    return dash(note + _trouble(stage, closed=closed))


def _trouble(stage: StageStatus, *, closed: bool) -> str:
    lines = []
    dead = [rank for rank in stage.ranks if not rank.alive]
    if dead and not closed:
        lines.append(f"✗ {len(dead)} of {len(stage.ranks)} workers dead")
    if stage.last_error:
        lines.append(f"✗ last error: {hints.in_verbs(stage.last_error)}")
    alarm = "".join(f'<div class="omni-alarm">{looks.text(line)}</div>' for line in lines)
    call = None if closed else hints.call_that_helps(stage)
    return alarm + (f'<div class="omni-soft">{looks.text(call)}</div>' if call else "")


def resident_bytes(ranks: Iterable[RankStatus]) -> int:
    """What is physically there of these ranks' pools."""
    return sum(tag.resident_bytes for rank in ranks for tag in rank.tags.values())


def mapped_bytes(ranks: Iterable[RankStatus]) -> int:
    """What these ranks' pools span."""
    return sum(tag.mapped_bytes for rank in ranks for tag in rank.tags.values())


def notice(text: str) -> str:
    """A line that holds for the whole dashboard."""
    edge = f"border-left:4px solid {charts.ORANGE};padding-left:8px"
    return dash(f'<div role="status" style="{edge}">{looks.text(text)}</div>')


# ------------------------------------------------------------------------------------------- bars


def reclaimed(log: Log) -> str:
    """Freed against what its process still held, a rank (or a group of ranks), from each rank's last sleep."""
    acks = log.last_sleeps
    title = '<div class="omni-title">Last sleep of each rank: freed, still held</div>'
    if not acks:
        return dash(f'{title}<div class="omni-soft">no rank has slept since this opened</div>')
    if len(acks) > MOST_BARS:
        return dash(title + _since_then(log, acks) + _bars(grouped_bars(acks), "freed and still held memory by rank"))
    since = {units.place(ack): log.since(ack) for ack in acks}
    bars = [
        replace(bar, note=" · ".join(filter(None, (bar.note, since.get(bar.label))))) for bar in charts.ack_bars(acks)
    ]
    shared = any(bar.label not in since for bar in bars)
    return dash(title + _bars(bars, "freed and still held memory by rank") + (_since_then(log, acks) if shared else ""))


def _since_then(log: Log, acks: Sequence[OmniACK]) -> str:
    """A line for what is not one rank's: these are figures of the sleep, and many ranks may be awake now."""
    moved = sum(bool(log.since(ack)) for ack in acks)
    if not moved:
        return ""
    words = f"the figures of that sleep; {moved} of {units.count(len(acks), 'rank')} since woken or restarted"
    return f'<div class="omni-soft">{words}</div>'


def _bars(bars: Sequence[charts.Bar], title: str) -> str:
    """The bars, with names of our own for their patterns: another drawing's may be hidden, and its patterns with it."""
    drawn = charts.svg_bars(bars, title=title, width=760)
    own = drawn.replace('id="omni-', f'id="{looks.IDS}').replace("url(#omni-", f"url(#{looks.IDS}")
    return f'<div style="overflow-x:auto">{own}</div>'


def grouped_bars(acks: Sequence[OmniACK]) -> list[charts.Bar]:
    """About `MOST_BARS` bars: neighbours of one stage together, with the least and the most that one freed."""
    size = -(-len(acks) // MOST_BARS)
    stages: dict[int, list[OmniACK]] = defaultdict(list)
    for ack in acks:
        stages[ack.stage_id].append(ack)
    size = max(size, 2)
    groups = [(stage, own[n : n + size], n) for stage, own in stages.items() for n in range(0, len(own), size)]
    return [_group_bar(stage, group, first) for stage, group, first in groups]


def _group_bar(stage: int, group: Sequence[OmniACK], first: int) -> charts.Bar:
    parts = [charts.main_segment(ack) for ack in group]
    sums: dict[charts.Look, int] = defaultdict(int)
    for segment in parts:
        sums[segment.look] += segment.n_bytes
    residual = sum(process.residual_bytes for process in charts.processes(group))
    segments = [charts.Segment(look, n_bytes) for look, n_bytes in sums.items()]
    segments += [charts.Segment(charts.RESIDUAL, residual)] if residual else []
    sizes = [segment.n_bytes for segment in parts]
    wrong = sum(not ack.ok for ack in group)
    alike = min(sizes) == max(sizes)
    text = units.size(sizes[0]) if alike else f"{units.size(min(sizes))} – {units.size(max(sizes))}"
    text += " each" + (f" · {wrong} ERROR" if wrong else "")
    return charts.Bar(f"stage {stage} · ranks {first}–{first + len(group) - 1}", tuple(segments), text)


def host(stages: Sequence[StageStatus]) -> str:
    """Device memory and its copy on the host, a stage."""
    bars = []
    for stage in stages:
        resident, mapped = resident_bytes(stage.ranks), mapped_bytes(stage.ranks)
        copy = stage.host_backup_bytes
        pool = (charts.Segment(charts.RESIDENT, resident), charts.Segment(charts.ABSENT, mapped - resident))
        words = f"{units.size(resident)} of {units.size(mapped)}" if mapped else _in_processes(stage)
        bars.append(charts.Bar(f"stage {stage.stage_id} · device", pool, words))
        bars.append(
            charts.Bar(
                f"stage {stage.stage_id} · host copy", (charts.Segment(charts.HOST_COPY, copy or 0),), units.size(copy)
            )
        )
    title = '<div class="omni-title">Device memory and the copy on the host</div>'
    return dash(title + _bars(bars, "device memory and host copy by stage"))


def devices(found: Sequence[Device]) -> str:
    """Each device and who holds what of it."""
    lines = []
    for device in found:
        used = ""
        if device.used_bytes is not None:
            used = f": {units.size(device.used_bytes)} of {units.size(device.total_bytes)} in use"
        held = "".join(f"<li>{looks.text(line)}</li>" for line in _held(device))
        columns = "columns:300px;column-gap:2.5em" if len(device.holders) > SHOWN_ACKS else ""
        text = f'<div class="omni-soft">{looks.text(device.note)}</div>' if device.note else ""
        lines.append(
            f'<div><span class="omni-title">{looks.text(device.name)}</span>{looks.text(used)}'
            f'<ul style="margin:0 0 4px 1.2em;padding:0;{columns}">{held}</ul>{text}</div>'
        )
    return dash('<div class="omni-title">Who holds what</div>' + "".join(lines))


def _held(device: Device) -> list[str]:
    """Who holds how much, the largest first."""
    largest = sorted(device.holders, key=lambda holder: holder.n_bytes or 0, reverse=True)
    shown = [f"{holder.who}: {units.size(holder.n_bytes)}" for holder in largest[:SHOWN_HOLDERS]]
    rest = largest[SHOWN_HOLDERS:]
    if rest:
        shown.append(f"{len(rest)} more: {units.size(sum(holder.n_bytes or 0 for holder in rest))}")
    return shown


# -------------------------------------------------------------------------------------------- log


def log_html(log: Log) -> str:
    """The newest orders with every rank's answer, errors in full, and what stages did by themselves."""
    title = '<div class="omni-title">Answers and events, newest first</div>'
    entries: list[Answered | Moved] = [*log.orders, *log.moves]
    entries = sorted(entries, key=lambda entry: entry.at_s, reverse=True)[:SHOWN_ORDERS]
    if not entries:
        return dash(f'{title}<div class="omni-soft">none since this opened</div>')
    rows = "".join(_move_row(entry) if isinstance(entry, Moved) else _order_rows(entry) for entry in entries)
    heads = "".join(f'<th scope="col">{name}</th>' for name in ("time", "what", "rank", "answer"))
    return dash(
        f'{title}<div class="omni-scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _row(clock: str, what: str, who: str, answer: str, *, wrong: bool) -> str:
    style = ' class="omni-wrong"' if wrong else ""
    ink = ' class="omni-alarm"' if wrong else ""
    return (
        f'<tr{style}><td style="white-space:nowrap">{looks.text(clock)}</td><td>{looks.text(what)}</td>'
        f'<td style="white-space:nowrap">{looks.text(who)}</td><td{ink}>{looks.text(answer)}</td></tr>'
    )


def _clock(time_s: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def _move_row(move: Moved) -> str:
    words = f"{'✗ ' if move.failed else ''}{hints.in_verbs(move.words)}"
    who = "server" if move.stage_id is None else f"stage {move.stage_id}"
    return _row(_clock(move.time_s), "event", who, words, wrong=move.failed)


def _order_rows(answered: Answered) -> str:
    wrong = [ack for ack in answered.acks if not ack.ok]
    few = len(answered.acks) <= SHOWN_ACKS
    shown = answered.acks if few else wrong[: 2 * SHOWN_ACKS]
    clock, rows = _clock(answered.time_s), []
    if not few:
        rows.append(_row(clock, answered.title, _stages(answered.acks), _summary(answered, wrong), wrong=bool(wrong)))
    rows += [_row(clock, answered.title, units.place(ack), _answer(ack), wrong=not ack.ok) for ack in shown]
    if not few and len(wrong) > len(shown):
        rows.append(_row(clock, answered.title, "", f"and {len(wrong) - len(shown)} more with ERROR", wrong=True))
    return "".join(rows)


def _stages(acks: Sequence[OmniACK]) -> str:
    found = sorted({ack.stage_id for ack in acks})
    return f"stage{'s' if len(found) > 1 else ''} {', '.join(map(str, found))}"


def _summary(answered: Answered, wrong: Sequence[OmniACK]) -> str:
    freed = sum(ack.freed_bytes for ack in answered.acks)
    mapped = sum(ack.metadata.get("mapped_bytes") or 0 for ack in answered.acks)
    moved = f"mapped {units.size(mapped)}" if mapped and not freed else f"freed {units.size(freed)}"
    return f"{len(answered.acks)} ranks answered · {moved}" + (f" · ✗ {len(wrong)} with ERROR" if wrong else "")


def _answer(ack: OmniACK) -> str:
    facts = ack.metadata
    if not ack.ok:
        return f"✗ {facts.get('error_code') or 'ERROR'}: {hints.in_verbs(' '.join((ack.error_msg or '').split()))}"
    if facts.get("noop"):
        return "✓ nothing to do, it was so already"
    mapped = facts.get("mapped_bytes") or 0
    moved = f"mapped {units.size(mapped)}" if mapped and not ack.freed_bytes else f"freed {units.size(ack.freed_bytes)}"
    held = facts.get("residual_bytes")
    parts = [
        moved,
        "" if held is None else f"{units.size(held)} still held by its process",
        f"host freed {units.size(facts['host_freed_bytes'])}" if facts.get("host_freed_bytes") else "",
        units.milliseconds(facts["latency_ms"]) if facts.get("latency_ms") is not None else "",
        str(facts["note"]) if facts.get("note") else "",
    ]
    return "✓ " + " · ".join(part for part in parts if part)


def reasons(lines: Sequence[str]) -> str:
    """Lines as a list."""
    items = "".join(f"<li>{looks.text(line)}</li>" for line in lines)
    return dash(f'<ul style="margin:0 0 0 1.2em;padding:0">{items}</ul>')


# ------------------------------------------------------------------------------------------ table


def table(status: EngineStatus) -> str:
    """What the charts show now, a row a rank and tag."""
    rows = [
        (f"{stage.stage_id} {stage.name}", str(rank.replica), str(rank.rank), rank.device, tag, memory, rank)
        for stage in status.stages
        for rank in stage.ranks
        for tag, memory in rank.tags.items()
    ]
    names = ("stage", "replica", "rank", "device", "tag", "resident", "mapped", "host copy of the rank", "process")
    heads = "".join(f'<th scope="col">{name}</th>' for name in names)
    body = "".join(
        "<tr>"
        + "".join(f"<td>{looks.text(text)}</td>" for text in (*words, charts.tag_label(tag), *_sizes(memory, rank)))
        + "</tr>"
        for *words, tag, memory, rank in rows[:SHOWN_ROWS]
    )
    left = f'<div class="omni-soft">and {len(rows) - SHOWN_ROWS} more rows</div>' if len(rows) > SHOWN_ROWS else ""
    return dash(
        f'<div class="omni-scroll omni-numbers"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>'
        f"</div>{left}"
    )


def _sizes(memory: TagMemory, rank: RankStatus) -> tuple[str, ...]:
    sizes = (memory.resident_bytes, memory.mapped_bytes, rank.host_backup_bytes, rank.process_bytes)
    return tuple(map(units.size, sizes))

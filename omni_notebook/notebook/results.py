"""What a cell shows: ACK lists, statuses, generations; each as text, as HTML or a picture, or both."""

from __future__ import annotations

import contextlib
import io
from typing import TYPE_CHECKING, Any

from omni_notebook.notebook import charts, html, tables
from omni_notebook.protocol import OmniACK

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from matplotlib.figure import Figure

    from omni_notebook.notebook.tables import Table
    from omni_notebook.protocol import EngineStatus
    from omni_notebook.verbs.generating import Generation

SHOWN_PIXELS = 256
_GAP_PIXELS = 8


class AckList(list[OmniACK]):
    """A list of ACKs that a cell shows as a table with a bar a rank.

    Attributes:
        order: "sleep" or "wake", what they answered; None = as they tell.
        states: `{stage_id: state}` right after the order.
    """

    def __init__(
        self, acks: Iterable[OmniACK] = (), order: str | None = None, states: dict[int, str] | None = None
    ) -> None:
        super().__init__(acks)
        self.order = order
        self.states = states or {}

    def _table(self) -> Table:
        return tables.ack_table(self, self.order, self.states)

    def __repr__(self) -> str:
        """The table in text."""
        return tables.as_text(self._table())

    def _repr_mimebundle_(self, **_kwargs: object) -> dict[str, Any]:
        """Text, HTML and a still picture."""
        table = self._table()
        bundle: dict[str, Any] = {"text/plain": tables.as_text(table), "text/html": html.as_html(table)}
        return _with_picture(bundle, lambda: charts.plot_reclaimed(self)) if self else bundle


def status_bundle(status: EngineStatus) -> dict[str, Any]:
    """A status as text, HTML and a still picture."""
    table = tables.status_table(status)
    bundle: dict[str, Any] = {"text/plain": tables.as_text(table), "text/html": html.as_html(table)}
    return _with_picture(bundle, lambda: charts.plot_resident(status)) if charts.status_bars(status) else bundle


def _with_picture(bundle: dict[str, Any], make: Callable[[], Figure]) -> dict[str, Any]:
    """The bundle with a still picture; Ctrl-C while it is drawn costs the picture, not the table."""
    with contextlib.suppress(KeyboardInterrupt):
        bundle["image/png"] = figure_png(make())
    return bundle


def generation_bundle(made: Generation) -> dict[str, Any]:
    """The images side by side, small ones enlarged without blur; for text, the text."""
    if not made.images:
        return {"text/plain": f"{made.text}\n{made.caption()}"}
    return {"text/plain": repr(made), "image/png": image_png(made.images)}


def figure_png(figure: Figure) -> bytes:
    """A figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def image_png(images: list[Any]) -> bytes:
    """PIL images in one row, as PNG."""
    from PIL import Image  # noqa: PLC0415  (loaded when used)

    shown = [_enlarged(image.convert("RGB")) for image in images]
    width = sum(image.width for image in shown) + _GAP_PIXELS * (len(shown) - 1)
    sheet = Image.new("RGB", (width, max(image.height for image in shown)), "white")
    left = 0
    for image in shown:
        sheet.paste(image, (left, 0))
        left += image.width + _GAP_PIXELS
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG")
    return buffer.getvalue()


def _enlarged(image: Any) -> Any:
    from PIL import Image  # noqa: PLC0415

    times = max(1, SHOWN_PIXELS // max(image.size))
    return image.resize((image.width * times, image.height * times), Image.Resampling.NEAREST)

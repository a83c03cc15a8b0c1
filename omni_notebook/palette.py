"""The colours of every picture: Okabe and Ito's, which people with any colour vision can tell apart."""

from __future__ import annotations

BLUE, ORANGE, GREEN, RED, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#999999"

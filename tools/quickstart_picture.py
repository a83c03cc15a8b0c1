"""Take the README's picture from the committed quickstart: `python tools/quickstart_picture.py`.

Needs nbconvert (`make lab` brings it) and Chromium on the PATH. Run `tools/run_notebooks.py` first.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import nbformat
from PIL import Image, ImageChops

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "notebooks" / "01_quickstart.ipynb"
PICTURE = ROOT / "docs" / "images" / "quickstart.png"
CELLS = ("%%omni generate", "acks = %omni sleep", "%omni wake", "import hashlib")
WIDTH, HEIGHT, SCALE, MARGIN = 1180, 2400, 1.5, 24
_STYLE = "#notebook-container{width:auto!important;box-shadow:none!important;padding:0 12px 0 0!important}"


def main() -> int:
    """Render the cells, take the picture, cut the empty rest off."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium on the PATH")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        page, shot = write_page(Path(folder)), Path(folder) / "shot.png"
        size = (f"--window-size={WIDTH},{HEIGHT}", f"--force-device-scale-factor={SCALE}", "--hide-scrollbars")
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", *size, f"--screenshot={shot}", page.as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        trimmed(Image.open(shot).convert("RGB")).quantize(128).save(PICTURE, optimize=True)
    print(f"{PICTURE.relative_to(ROOT)}: {PICTURE.stat().st_size / 1024:.0f} KiB")
    return 0


def write_page(folder: Path) -> Path:
    """The chosen cells as a page."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    notebook.cells = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.startswith(CELLS)]
    nbformat.write(notebook, folder / "page.ipynb")  # type: ignore[no-untyped-call]
    command = [sys.executable, "-m", "nbconvert", "--to", "html", "--template", "classic", str(folder / "page.ipynb")]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    page = folder / "page.html"
    page.write_text(page.read_text(encoding="utf-8").replace("</head>", f"<style>{_STYLE}</style></head>"), "utf-8")
    return page


def trimmed(shot: Image.Image) -> Image.Image:
    """The picture without the empty page below and around."""
    empty = Image.new("RGB", shot.size, shot.getpixel((0, shot.height - 1)))
    box = ImageChops.difference(shot, empty).getbbox()
    if box is None:
        return shot
    return shot.crop((max(box[0] - MARGIN, 0), max(box[1] - MARGIN, 0), box[2] + MARGIN, box[3] + MARGIN))


if __name__ == "__main__":
    sys.exit(main())

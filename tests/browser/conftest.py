"""One JupyterLab, one Chromium, and pages of them, for a module and no longer.

While it is there playwright keeps an event loop running in this thread, and no other test could run one of its own.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from tests.browser.lab import CHROMIUM, Lab, Server, missing

START = "%load_ext omni_notebook\nimport omni_notebook as omni\nengine = %omni start --ballast 64MiB"
SIZE = {"width": 1280, "height": 1400}


@pytest.fixture(scope="module", autouse=True)
def _there():
    lacks = missing()
    if lacks:
        pytest.skip(lacks)


@pytest.fixture(scope="module")
def chromium(_there):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def server(_there, tmp_path_factory):
    made = Server(tmp_path_factory.mktemp("jupyter"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory):
    """Where pictures of the page go: OMNI_SCREENSHOTS, else pytest's own folder."""
    given = os.environ.get("OMNI_SCREENSHOTS")
    folder = Path(given) if given else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"screenshots: {folder}")
    return folder


@pytest.fixture
def new_page(chromium):
    """Pages whose script errors fail the test."""
    with contextlib.ExitStack() as stack:

        def make():
            context = chromium.new_context(viewport=SIZE)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(20_000)
            return page

        yield make


@pytest.fixture(scope="module")
def cockpit(chromium, server):
    """A notebook whose kernel runs the demo engine, with a dashboard open."""
    context = chromium.new_context(viewport=SIZE)
    page = context.new_page()
    page.set_default_timeout(20_000)
    lab = Lab(page, server)
    lab.open("cockpit.ipynb")
    lab.run(START)
    lab.run("cockpit = %omni dashboard\ncockpit")
    page.wait_for_selector(".omni-card")
    lab.kept = lab.count()
    yield lab
    context.close()


@pytest.fixture
def lab(cockpit):
    """The cockpit with all stages awake and open, and nothing of earlier tests on the page."""
    cockpit.page.set_viewport_size(SIZE)
    cockpit.until_kernel("idle")
    cockpit.forget(cockpit.kept)
    cockpit.run("%omni wake\n%omni resume\ncockpit.sampler.notes.clear()")
    cockpit.theme("light")
    for place in (0, 1):
        cockpit.until_card(place, "AWAKE · OPEN")
    return cockpit

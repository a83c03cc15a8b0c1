import re

import pytest
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from omni_notebook.verbs.session import session


@pytest.fixture(scope="session")
def _shell():
    config = Config()
    config.HistoryManager.enabled = False
    shell = InteractiveShell.instance(config=config)
    yield shell
    InteractiveShell.clear_instance()


@pytest.fixture
def shell(_shell):
    """A real shell with the extension loaded; whatever engine a test starts is stopped after it."""
    _shell.reset(new_session=False)
    _forget()
    _shell.extension_manager.load_extension("omni_notebook")
    yield _shell
    _forget()
    _shell.extension_manager.unload_extension("omni_notebook")


def _forget():
    """The process's own session begins anew; calls of the package, in other modules too, leave answers in it."""
    running = session().running
    if running is not None:
        running.shutdown()
    session().use(None)
    session().acks = []
    session().last_traceback = None


@pytest.fixture
def cell(shell, capsys):
    """Run a cell; its result and what it printed."""

    def run(code):
        result = shell.run_cell(code)
        shown = capsys.readouterr()
        assert re.sub(r"\r[^\r\n]*", "", shown.err) == "", "only a progress bar may write to stderr"
        return result, shown.out

    return run

"""What verbs wrote."""

from __future__ import annotations

from omni_notebook.verbs.frontend import PlainFrontend


class Screen(PlainFrontend):
    """Keeps it in `text`."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.variables: dict[str, object] = {}

    def write(self, text: str) -> None:
        self.text += text

    def store(self, name: str, value: object) -> None:
        self.variables[name] = value

"""Completion of `%omni` lines, as a matcher of IPython's completer."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from omni_notebook.verbs.completion import candidates
from omni_notebook.verbs.session import session

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

IDENTIFIER = "omni_notebook.matcher"
_LINE = re.compile(r"^(?:\s*|.*=\s*)%{1,2}omni\s+(?P<text>.*)$")


@context_matcher(identifier=IDENTIFIER, priority=200)  # type: ignore[untyped-decorator]
def omni_matcher(context: CompletionContext) -> SimpleMatcherResult:
    """Verbs, options, values and stage ids; silences other matchers when it knows a word."""
    found = _LINE.match(context.text_until_cursor)
    if found is None:
        return {"completions": []}
    result = candidates(session(), found["text"])
    return {
        "completions": [SimpleCompletion(text=word, type="param") for word in result.words],
        "matched_fragment": result.fragment,
        "suppress": bool(result.words),
    }


def install(shell: InteractiveShell) -> None:
    """Add the matcher."""
    shell.Completer.custom_matchers.append(omni_matcher)


def remove(shell: InteractiveShell) -> None:
    """Take every copy of it away, also one that an older import of this module added."""
    matchers = shell.Completer.custom_matchers
    matchers[:] = [one for one in matchers if getattr(one, "matcher_identifier", None) != IDENTIFIER]

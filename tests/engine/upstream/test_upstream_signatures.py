"""The stand-in against vllm_omni 0.30: against its source where that is, else against what was read from it."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.engine.upstream import signatures
from tests.engine.upstream.conftest import FAKE

RECORD = Path(__file__).with_name("signatures_0_30.json")
SOURCE = "OMNI_VLLM_OMNI_SOURCE"
"""A folder with an unpacked wheel; an installed package counts too."""


def published():
    """The signatures of the real package, or the record of them."""
    folder = os.environ.get(SOURCE)
    found = importlib.util.find_spec("vllm_omni")
    if folder is None and found is not None and found.origin and not found.origin.startswith(str(FAKE)):
        folder = str(Path(found.origin).parents[1])
    return json.loads(RECORD.read_text()) if folder is None else signatures.read(Path(folder))


@pytest.fixture(scope="module")
def theirs():
    return published()


@pytest.fixture(scope="module")
def ours():
    return signatures.read(FAKE)


@pytest.mark.parametrize("name", sorted(signatures.METHODS))
def test_a_call_of_the_stand_in_takes_what_the_published_one_takes(ours, theirs, name):
    assert ours[f"AsyncOmni.{name}"] == theirs[f"AsyncOmni.{name}"]


@pytest.mark.parametrize("name", sorted(signatures.FIELDS))
def test_the_stand_ins_data_have_only_published_fields(ours, theirs, name):
    assert set(ours[name]) <= set(theirs[name])


def test_an_ack_of_the_stand_in_has_the_published_fields_in_their_order(ours, theirs):
    assert list(ours["OmniACK"].items()) == list(theirs["OmniACK"].items())

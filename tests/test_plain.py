"""Any configuration becomes plain data."""

from __future__ import annotations

import dataclasses
import enum
import pathlib

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati_perf.plain import flatten, plain


class Colour(enum.Enum):
    RED = 1


class Rank(enum.IntEnum):
    FIRST = 1


class Hostile:
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None), (True, True), (1, 1), (1.5, 1.5), ("x", "x"), (Rank.FIRST, 1),
        (float("nan"), "nan"), (float("-inf"), "-inf"), (2**70, str(2**70)),
        ((1, [2]), [1, [2]]), ({3, 1}, [1, 3]), ({1: {None: 2}}, {"1": {"None": 2}}),
        (pathlib.PurePosixPath("/a"), "/a"), (torch.bfloat16, "torch.bfloat16"),
        (Colour.RED, "Colour.RED"), ("\ud800", "?"),
        (Hostile(), f"<{__name__}.Hostile>"), (object(), "<builtins.object>"),
    ],
)  # fmt: skip
def test_values(value, expected):
    assert plain(value) == expected
    msgspec.json.encode(plain(value))


def test_the_memory_address_of_an_object_is_not_kept():
    assert "0x" not in plain(lambda: None)
    assert " at " not in plain(dataclasses)


def test_a_cycle_ends():
    cycle = {}
    cycle["self"] = cycle
    assert "nested more than" in str(plain(cycle))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(st.dictionaries(st.text(), anything))
def test_every_config_survives_json_and_flattens_to_scalars(config):
    data = plain(config)
    assert msgspec.json.decode(msgspec.json.encode(data)) == data
    assert all(isinstance(value, (bool, int, float, str)) for value in flatten(data).values())


def test_flattening_names_nested_values_by_their_path():
    config = {"a": {"b": [1, {"c": None}]}, "d": []}
    assert flatten(config) == {"a.b.0": 1, "a.b.1.c": "None", "d": "[]"}

"""Any configuration becomes plain data."""

from __future__ import annotations

import argparse
import dataclasses
import enum
import pathlib
import types
import typing

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coati_perf.plain import MAX_TEXT, MAX_VALUES, flatten, plain


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
    cycle["self"] = [cycle]
    assert plain(cycle) == {"self": ["<cycle>"]}
    twice = [1]
    assert plain([twice, twice]) == [[1], [1]], "the same list twice is no cycle"


def test_depth_ends():
    deep = []
    for _ in range(100):
        deep = [deep]
    assert "nested more than" in str(plain(deep))


@dataclasses.dataclass
class Optimiser:
    lr: float
    betas: tuple[float, float] = (0.9, 0.95)


class Point(typing.NamedTuple):
    x: int


class Frozen(msgspec.Struct):
    a: int


class Pydantic:  # as of version 2
    def model_dump(self):
        return {"a": Optimiser(1e-4)}


class Missing(dict):  # OmegaConf's "???"
    def __getitem__(self, key):
        raise LookupError(key)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Optimiser(0.5), {"lr": 0.5, "betas": [0.9, 0.95]}),
        (argparse.Namespace(a=1), {"a": 1}),
        (types.SimpleNamespace(a=[1]), {"a": [1]}),
        (Point(3), {"x": 3}),
        (Frozen(3), {"a": 3}),
        (Pydantic(), {"a": {"lr": 1e-4, "betas": [0.9, 0.95]}}),
        (Missing(a=1), {"a": "<LookupError>"}),
        (torch.tensor(3), 3),
        (torch.tensor([1.5, 2.0]), [1.5, 2.0]),
        (torch.zeros(100, 3), "<Tensor torch.float32 (100, 3)>"),
        (torch.zeros(3, device="meta"), "<Tensor torch.float32 (3,)>"),
        (np.float64(1.5), 1.5),
        (np.int64(2), 2),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.zeros(1000), "<ndarray float64 (1000,)>"),
        (b"abc", "abc"),
        (b"\xff\x00", "<2 B>"),
        (len, "<builtins.len>"),
        (Optimiser, f"<{__name__}.Optimiser>"),
        (pytest, "<pytest>"),
        (range(3), [0, 1, 2]),
        ({Hostile(): 1}, {f"<{__name__}.Hostile>": 1}),
    ],
)
def test_objects(value, expected):
    assert plain(value) == expected


def test_what_is_too_much_is_left_out_and_said_to_be():
    many = plain({str(number): number for number in range(1_000_000)})
    assert len(many) == MAX_VALUES + 1
    assert many["…"] == f"<{1_000_000 - MAX_VALUES} more>"
    assert len(plain([[0] * 1000] * 1000)) < 20
    text = plain("x" * 10_000_000)
    assert text.startswith("xxx")
    assert text.endswith(f"… <{10_000_000 - MAX_TEXT} more characters>")


def test_omegaconf_and_pydantic_configs_are_mappings():
    omegaconf, pydantic = pytest.importorskip("omegaconf"), pytest.importorskip("pydantic")
    given = omegaconf.OmegaConf.create(
        {"lr": 0.1, "wd": "${lr}", "layers": [1, {"b": 2}], "missing": "???", "bad": "${nowhere}"}
    )
    assert plain(given) == {
        "lr": 0.1, "wd": 0.1, "layers": [1, {"b": 2}], "missing": "<MissingMandatoryValue>",
        "bad": "<InterpolationKeyError>",
    }  # fmt: skip

    class Settings(pydantic.BaseModel):
        lr: float = 0.1
        inner: dict[str, int] = {"a": 1}

    assert plain(Settings()) == {"lr": 0.1, "inner": {"a": 1}}


def test_hugging_face_configs_are_mappings():
    transformers = pytest.importorskip("transformers")
    assert plain(transformers.LlamaConfig(vocab_size=8))["vocab_size"] == 8


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

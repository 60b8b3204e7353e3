"""Specifications: text ⇄ dataclass ⇄ JSON, and what a field refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pfedme.algorithms import ALGORITHMS
from pfedme.core.models import DNN, MODELS
from pfedme.core.spec import (
    Bound,
    Count,
    Index,
    NonNegative,
    Positive,
    Seed,
    Share,
    build,
    check,
    field_docs,
    field_types,
    parse,
    to_json,
)
from pfedme.data import DATA
from pfedme.errors import InputError, unknown
from pfedme.runs.run import Run

KNOWN: dict[str, type[Any]] = {**ALGORITHMS, **DATA, **MODELS}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Thing:
    """A field of every kind."""

    rate: Positive = 0.1
    """A rate, on
    two lines."""
    level: NonNegative = 0.0
    share: Share = 0.5
    count: Count = 1
    index: Index = 0
    seed: Seed = 0
    shape: Literal["round", "square"] = "round"
    limit: Positive | None = None
    sizes: tuple[int, ...] | None = None
    on: bool = False
    word: str | None = None


THINGS = {"thing": Thing}

positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_subnormal=False)
things = st.builds(
    Thing,
    rate=positive,
    level=st.floats(min_value=0, allow_infinity=False),
    share=st.floats(0, 1, exclude_min=True, exclude_max=True),
    count=st.integers(1, 10**6),
    index=st.integers(0, 10**6),
    seed=st.integers(0, 2**32 - 1),
    shape=st.sampled_from(["round", "square"]),
    limit=st.none() | positive,
    sizes=st.none() | st.lists(st.integers(1, 999), min_size=1, max_size=3).map(tuple),
    on=st.booleans(),
    word=st.none() | st.text("abcxyz/.", min_size=1).filter(lambda s: s != "none"),
)


def as_text(thing: Thing) -> str:
    """thing:field=value,... with every field of `thing`."""

    def shown(value: Any) -> str:
        if isinstance(value, tuple):
            return "-".join(map(str, value))
        return "none" if value is None else str(value)

    return "thing:" + ",".join(f"{k}={shown(v)}" for k, v in dataclasses.asdict(thing).items())


@settings(derandomize=True, deadline=None)
@given(things)
def test_text_becomes_the_thing_that_it_describes(thing: Thing):
    assert parse(as_text(thing), THINGS, "thing") == thing


@settings(derandomize=True, deadline=None)
@given(things)
def test_a_thing_survives_json(thing: Thing):
    assert build(Thing, json.loads(json.dumps(to_json(thing))), "thing") == thing


@pytest.mark.parametrize("name", KNOWN)
def test_the_defaults_of_everything_known_are_within_their_bounds_and_survive_json(name: str):
    thing = parse(name, KNOWN, "thing")
    again = build(type(thing), json.loads(json.dumps(to_json(thing))), name)
    assert again == thing
    assert check(thing, name) is thing


@pytest.mark.parametrize("cls", KNOWN.values(), ids=KNOWN)
def test_every_option_has_a_sentence_of_help(cls: type):
    assert {k for k in field_types(cls) if field_docs(cls).get(k, "")} == set(field_types(cls))


def test_every_option_of_a_run_has_a_sentence_of_help():
    assert {"rounds", "cohort", "seed", "eval_every"} <= set(field_docs(Run))


def test_field_docs_are_the_strings_below_the_fields():
    assert field_docs(Thing) == {"rate": "A rate, on\ntwo lines."}


def test_a_name_alone_gives_the_defaults():
    assert parse("thing", THINGS, "thing") == Thing()
    assert parse("thing:", THINGS, "thing") == Thing()


def test_blanks_around_fields_and_values_do_not_matter():
    assert parse("thing: count = 3 , rate= 2 ", THINGS, "thing") == Thing(count=3, rate=2.0)


def test_hidden_layers_are_joined_by_dashes():
    model = parse("dnn:hidden=100-50", MODELS, "model")
    assert isinstance(model, DNN)
    assert model.hidden == (100, 50)
    assert to_json(model)["hidden"] == [100, 50]


def test_none_is_a_value_of_optional_fields_only():
    assert parse("thing:limit=none,sizes=none", THINGS, "thing") == Thing()
    with pytest.raises(InputError, match=r"count .*whole number"):
        parse("thing:count=none", THINGS, "thing")
    with pytest.raises(InputError, match="count"):
        build(Thing, {"count": None}, "thing")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("true", True),
        ("True", True),
        ("yes", True),
        ("1", True),
        ("false", False),
        ("no", False),
        ("0", False),
    ],
)
def test_truth_is_written_in_a_few_ways(text: str, value: bool):
    assert parse(f"thing:on={text}", THINGS, "thing").on is value


@pytest.mark.parametrize(
    ("field", "value", "cure"),
    [
        ("rate", "0", "must be positive"),
        ("rate", "-0.5", "must be positive"),
        ("rate", "nan", "must be a finite number"),
        ("rate", "inf", "must be a finite number"),
        ("rate", "-inf", "must be a finite number"),
        ("rate", "much", "must be a finite number"),
        ("rate", "", "must be a finite number"),
        ("level", "-1", "must be at least 0"),
        ("level", "nan", "must be a finite number"),
        ("share", "0", "must be positive"),
        ("share", "1", "must be below 1"),
        ("share", "nan", "must be a finite number"),
        ("count", "0", "must be at least 1"),
        ("count", "-7", "must be at least 1"),
        ("count", "2.5", "must be a whole number"),
        ("count", "2.0", "must be a whole number"),
        ("count", "1e3", "must be a whole number"),
        ("count", "nan", "must be a whole number"),
        ("count", "inf", "must be a whole number"),
        ("index", "-1", "must be at least 0"),
        ("seed", "-1", "must be at least 0"),
        ("limit", "0", "must be positive"),
        ("limit", "nan", "must be a finite number"),
        ("sizes", "3-x", "whole numbers joined by '-'"),
        ("sizes", "3-0", "at least 1"),
        ("sizes", "2.5", "whole numbers joined by '-'"),
        ("on", "maybe", "must be true or false"),
    ],
)
def test_a_wrong_value_is_named_with_its_field_and_the_cure(field: str, value: str, cure: str):
    with pytest.raises(InputError) as caught:
        parse(f"thing:{field}={value}", THINGS, "thing")
    assert re.match(rf"{field} of thing 'thing' ", str(caught.value))
    assert cure in str(caught.value)
    assert value in str(caught.value) or field == "sizes"


@pytest.mark.parametrize("value", ["-5", "5-", "-", "5--6"])
def test_a_dash_too_many_is_not_overlooked(value: str):
    with pytest.raises(InputError, match="sizes"):
        parse(f"thing:sizes={value}", THINGS, "thing")


def test_a_seed_that_is_too_large_is_named_in_full():
    with pytest.raises(InputError, match=str(2**32)):
        parse(f"thing:seed={2**32}", THINGS, "thing")


@pytest.mark.parametrize(
    "value",
    [2.5, 2.0, math.nan, math.inf, "two", [2], {}],
    ids=["2.5", "2.0", "nan", "inf", "two", "[]", "{}"],
)
def test_only_whole_numbers_count_in_json(value: Any):
    with pytest.raises(InputError, match="count of thing must be a whole number"):
        build(Thing, {"count": value}, "thing")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_numbers_must_be_finite(value: float):
    with pytest.raises(InputError, match="rate of thing must be a finite number"):
        build(Thing, {"rate": value}, "thing")


def test_json_sizes_must_be_whole_numbers():
    with pytest.raises(InputError, match="sizes"):
        build(Thing, {"sizes": [2.5]}, "thing")


def test_a_float_for_an_int_is_refused_in_things_made_in_python_too():
    with pytest.raises(InputError, match="count of thing must be a whole number"):
        check(dataclasses.replace(Thing(), count=2.5), "thing")


def test_things_made_in_python_are_checked_like_text():
    with pytest.raises(InputError, match="rate of thing must be positive, not -1"):
        check(Thing(rate=-1.0), "thing")
    with pytest.raises(InputError, match="rate of thing must be a finite number"):
        check(Thing(rate=math.nan), "thing")


def test_a_choice_is_suggested_by_likeness():
    with pytest.raises(InputError, match=r"'sqare'; did you mean 'square'\? Known: round, square\."):
        parse("thing:shape=sqare", THINGS, "thing")


def test_a_field_is_suggested_by_likeness():
    with pytest.raises(InputError, match="'cout'; did you mean 'count'"):
        parse("thing:cout=3", THINGS, "thing")


def test_a_name_is_suggested_by_likeness_whatever_its_case():
    with pytest.raises(InputError, match="no algorithm 'PFedMe'; did you mean 'pfedme'"):
        parse("PFedMe", ALGORITHMS, "algorithm")


def test_nothing_is_suggested_for_a_name_that_is_like_none():
    message = str(unknown("algorithm", "zzz", ["pfedme", "fedavg"]))
    assert message == "There is no algorithm 'zzz'. Known: pfedme, fedavg."


@pytest.mark.parametrize("text", ["thing:count", "thing:count=2,rate", "thing:count=2,3"])
def test_a_pair_without_equals_is_shown(text: str):
    pair = text.split(":")[1].split(",")[-1]
    with pytest.raises(InputError, match=f"'{pair}' in '{text}' is not of the form field=value"):
        parse(text, THINGS, "thing")


def test_a_field_given_twice_is_refused():
    with pytest.raises(InputError, match="count"):
        parse("thing:count=2,count=3", THINGS, "thing")


@pytest.mark.parametrize(
    ("bound", "inside", "outside"),
    [
        (Bound(above=0), 1e-30, 0.0),
        (Bound(above=2), 2.1, 2.0),
        (Bound(least=1), 1, 0),
        (Bound(below=1), 0.999, 1.0),
        (Bound(most=3), 3, 4),
    ],
)
def test_bounds_hold_on_one_side_and_not_on_the_other(bound: Bound, inside: float, outside: float):
    assert bound.violated_by(inside) is None
    assert bound.violated_by(outside)
    assert bound.violated_by(math.nan)

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorpager.planner.sizes import format_bytes, parse_bytes, wear


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("5GB", 5 * 10**9),
        ("5GiB", 5 * 2**30),
        ("1.5 MiB", 3 << 19),
        ("100", 100),
        ("2k", 2000),
        ("2 KiB", 2048),
        ("7b", 7),
        ("1TiB", 1 << 40),
        (".5kB", 500),
        (4096, 4096),
        (1e3, 1000),
    ],
)
def test_parses(text: str | float, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "5 apples", "-5GB", "1e9", "5GiBs", -1, float("inf")])
def test_refuses_naming_the_value(text: str | float) -> None:
    with pytest.raises(ValueError, match="budget="):
        parse_bytes(text, "budget")


@pytest.mark.parametrize("value", [None, True, [1]])
def test_refuses_other_types(value: object) -> None:
    with pytest.raises(TypeError):
        parse_bytes(value)  # type: ignore[arg-type]


@given(st.integers(0, 1 << 60))
def test_what_is_formatted_parses_to_nearly_the_same(count: int) -> None:
    again = parse_bytes(format_bytes(count))
    assert abs(again - count) <= max(1, count * 0.006)


@pytest.mark.parametrize(
    ("bytes_a_day", "words"),
    [
        (None, ""),
        (0.0, ""),
        (1e9, "So little is written"),
        (100e9, "100 GB a day are written to disk: .* lasts 16 years"),
        (12e12, r"12 TB a day .* rated for 600 TB of writes lasts 50 days"),
    ],
)
def test_what_writing_does_to_a_drive(bytes_a_day: float | None, words: str) -> None:
    assert re.match(words or "$", wear(bytes_a_day))

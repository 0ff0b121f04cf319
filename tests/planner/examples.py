"""How many examples hypothesis draws."""

from hypothesis import settings

from ..programs import FULL


def examples(count: int) -> settings:
    """``count``, or a third of them in the quick run: the same ones each time (conftest.py)."""
    return settings(max_examples=count if FULL else count // 3)

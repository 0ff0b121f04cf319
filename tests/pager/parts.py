"""Some pages of a tensor, held on the device as a stream holds them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorpager as tp
from tensorpager.pager.tensor.slabs import Pages, pages_of


@contextmanager
def page_set(core: Any, wanted: Pages) -> Iterator[Any]:
    """Their frames, in any order."""
    frames = core.take_parts([wanted.part], [wanted.part] if wanted.write else [])
    try:
        yield frames[0]
    finally:
        core.release_parts([wanted.part])


def part(core: Any, of: tp.PagedTensor, first: int, count: int, *, write: bool = False) -> Any:
    """Pages ``first … first + count``."""
    return page_set(core, pages_of(of, range(first, first + count), write=write))

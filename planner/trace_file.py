"""Traces as Parquet files: one row per access, in op order.

An op that touches no tensor is one row whose tensor columns are null. The file's ``tensorpager``
metadata (JSON) holds the version, the page size, where the trace comes from and free keys. A file
is written whole or not at all, the same trace always as the same bytes, and read back before it
gets its name, so that what cannot be read is never there.
"""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from .errors import TraceError
from .files import reading, whole_file
from .shown import PARQUET, shown, what_it_is
from .trace import ACCESS_NAMES, Bools, Ints, Trace
from .trace_check import Columns, Strings, build_trace

VERSION = 2  # what is read; a trace without choices is written as version 1
METADATA_KEY = b"tensorpager"
MAX_ROWS_PER_BYTE, MAX_UNPACKED_PER_BYTE = 16, 512
SCHEMA = pa.schema(
    [
        ("op", pa.int32()),
        ("op_name", pa.string()),
        ("start_us", pa.float64()),
        ("duration_us", pa.float64()),
        ("tensor", pa.int32()),
        ("tensor_name", pa.string()),
        ("nbytes", pa.int64()),
        ("kind", pa.string()),
        ("access", pa.string()),
        ("first_page", pa.int32()),
        ("page_count", pa.int32()),
        ("persistent", pa.bool_()),
    ]
)
CHOICES = pa.schema([("rerun", pa.bool_()), ("host_us", pa.float64())])  # of version 2
_STRINGS = [field.name for field in SCHEMA if pa.types.is_string(field.type)]


def write_trace(path: Path, trace: Trace) -> Trace:
    """Writes ``trace`` to ``path`` (mode 0600) and returns it as :func:`read_trace` would, with the
    ``sha256`` of the file.

    All or nothing: after an error an older file at ``path`` is still there, unchanged. Raises
    ``TraceError`` for a trace that could not be read back.
    """
    path = Path(path)
    content = encode_trace(trace, str(path))
    written = decode_trace(content, str(path))
    try:
        with whole_file(path, follow=False) as part:
            part.write_bytes(content)
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from error
    return written


def read_trace(path: Path) -> Trace:
    """The trace in the file at ``path``, its accesses in the file's order.

    Tensors are numbered by first appearance. Integer and string columns may have any width and
    encoding, other columns are passed over. Raises ``TraceError`` naming the file, the row and the
    reason.
    """
    path = Path(path)
    with reading(path, TraceError, "trace"):
        content = path.read_bytes()
    return decode_trace(content, str(path))


# --- writing ---------------------------------------------------------------------------------


def encode_trace(trace: Trace, where: str) -> bytes:
    """The bytes of the file. ``where`` names the trace in errors (``TraceError``)."""
    try:
        table = _table(trace)
        header = json.dumps(_header(trace), sort_keys=True, allow_nan=False)
    except (pa.ArrowException, IndexError, OverflowError, TypeError, ValueError) as error:
        raise TraceError(f"{where}: the trace cannot be written: {error}") from error
    table = table.replace_schema_metadata({METADATA_KEY: header.encode()})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, compression="zstd", write_page_checksum=True)
    return bytes(sink.getvalue())


def _header(trace: Trace) -> dict[str, Any]:
    ends = trace.op_start_us + trace.op_duration_us
    segments = {"segments": [list(each) for each in trace.segments]} if trace.has_choices else {}
    return {
        "iteration_us": float(ends.max()) if trace.ops else 0.0,
        **trace.metadata,
        **segments,
        "version": 2 if trace.has_choices else 1,
        "page_size": int(trace.page_size),
        "device": trace.device,
        "source": trace.source,
    }


def _table(trace: Trace) -> pa.Table:
    """Accesses, and a row with nulls for every op that has none, in op order."""
    accesses = len(trace.access_op)
    idle = np.setdiff1d(np.arange(trace.ops), trace.access_op)
    op = np.concatenate([trace.access_op, idle]).astype(np.int64)
    order = np.argsort(op, kind="stable")
    op, empty = op[order], order >= accesses
    source = np.where(empty, 0, order)

    def access(values: npt.NDArray[Any]) -> pa.Array:
        padded = values[source] if accesses else np.zeros(len(op), values.dtype)
        return pa.array(padded, mask=empty)

    def tensor(values: npt.NDArray[Any] | pa.Array) -> pa.Array:
        return pc.take(pa.array(values), access(trace.access_tensor))

    columns = [
        pa.array(op),
        pc.take(pa.array(trace.op_names, pa.string()), pa.array(op)),
        pa.array(trace.op_start_us[op]),
        pa.array(trace.op_duration_us[op]),
        tensor(trace.tensor_ids),
        tensor(pa.array(trace.tensor_names, pa.string())),
        tensor(trace.tensor_bytes),
        tensor(pa.array(trace.tensor_kinds, pa.string())),
        pc.take(_mode_names(), access(trace.access_mode)),
        access(trace.access_first_page),
        access(trace.access_page_count),
        tensor(trace.tensor_persistent),
    ]
    schema = SCHEMA
    if trace.has_choices:
        host_us = trace.op_host_us[op]
        columns += [pa.array(trace.op_rerun[op]), pa.array(host_us, mask=np.isnan(host_us))]
        schema = pa.schema([*SCHEMA, *CHOICES])
    arrays = [pc.cast(column, field.type) for column, field in zip(columns, schema)]
    return pa.Table.from_arrays(arrays, schema=schema)


def _mode_names() -> pa.Array:
    return pa.array([ACCESS_NAMES.get(mode) for mode in range(max(ACCESS_NAMES) + 1)], pa.string())


# --- reading ---------------------------------------------------------------------------------


def decode_trace(content: bytes, where: str) -> Trace:
    """The trace in a file's bytes, as :func:`read_trace`; ``where`` names it in errors."""
    if not content.startswith(PARQUET):
        raise TraceError(
            f"{where}: {what_it_is(content)}, not a trace; 'tensorpager record' and "
            "'tensorpager import' make traces"
        )
    try:
        with pq.ParquetFile(pa.BufferReader(content)) as file:
            footer, schema = file.metadata, file.schema_arrow
        header = _checked_header(schema.metadata, where)
        wanted = SCHEMA if header["version"] == 1 else pa.schema([*SCHEMA, *CHOICES])
        _check_schema(schema, wanted, where)
        _check_size(footer, len(content), where)
        with pq.ParquetFile(
            pa.BufferReader(content),
            metadata=footer,
            read_dictionary=_STRINGS,
            page_checksum_verification=True,
        ) as file:
            table = (
                file.read(columns=wanted.names, use_threads=False)
                .unify_dictionaries()
                .combine_chunks()
            )
        columns = _columns(table, where)
    except (pa.ArrowException, OSError, KeyError, ValueError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(
            f"{where}: not a whole Parquet file ({reason.rstrip('. ')}); record or copy it again"
        ) from error
    return build_trace(columns, header, where, hashlib.sha256(content).hexdigest())


def _checked_header(metadata: dict[bytes, bytes] | None, where: str) -> dict[str, Any]:
    """The ``tensorpager`` metadata. Its descriptive keys (device, source, iteration_us) may be
    absent."""
    if METADATA_KEY not in (metadata or {}):
        raise TraceError(f"{where}: no 'tensorpager' metadata, so this Parquet file is no trace")
    assert metadata is not None
    try:
        header = json.loads(metadata[METADATA_KEY])
    except (ValueError, RecursionError) as error:
        raise TraceError(f"{where}: the 'tensorpager' metadata is not JSON ({error})") from error
    if not isinstance(header, dict):
        raise TraceError(f"{where}: the 'tensorpager' metadata is not a JSON object")
    for key in ("version", "page_size"):
        value = header.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 62:
            raise TraceError(f"{where}: metadata {key} = {shown(value)}; it is a whole number ≥ 1")
    if header["version"] > VERSION:
        raise TraceError(
            f"{where}: version {header['version']}, but this program reads up to version "
            f"{VERSION}; update it"
        )
    for key in ("device", "source"):
        if not isinstance(header.get(key, ""), str):
            raise TraceError(f"{where}: metadata {key} = {shown(header[key])} is not a string")
    time = header.get("iteration_us", 0.0)
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < math.inf:
        raise TraceError(f"{where}: metadata iteration_us = {shown(time)}; it is finite and ≥ 0")
    return header


def _check_schema(schema: pa.Schema, wanted: pa.Schema, where: str) -> None:
    for field in wanted:
        found = schema.get_all_field_indices(field.name)
        if len(found) != 1:
            what = "is missing" if not found else f"is there {len(found)} times"
            raise TraceError(f"{where}: column {field.name} {what}")
        actual = schema.field(found[0]).type
        if not _readable_as(actual, field.type):
            raise TraceError(f"{where}: column {field.name} is {actual}; it must be {field.type}")


def _check_size(footer: pq.FileMetaData, nbytes: int, where: str) -> None:
    """Refuses a small file that unpacks to more than any iteration has: no two rows are alike, so
    hardly a byte of a real trace says more than a row."""
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    rows = sum(max(group.num_rows, 0) for group in groups)
    unpacked = sum(max(group.total_byte_size, 0) for group in groups)
    most_rows = MAX_ROWS_PER_BYTE * nbytes
    if footer.num_rows != rows or rows > most_rows or unpacked > MAX_UNPACKED_PER_BYTE * nbytes:
        raise TraceError(
            f"{where}: {nbytes} bytes that unpack to {rows} rows of {unpacked} bytes are no trace; "
            "record or copy it again"
        )


def _readable_as(actual: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_dictionary(actual):
        actual = actual.value_type
    if pa.types.is_null(actual):  # a column of nulls only has no better type
        return True
    if pa.types.is_integer(wanted):
        return bool(pa.types.is_integer(actual))
    if pa.types.is_floating(wanted):
        return bool(pa.types.is_floating(actual) or pa.types.is_integer(actual))
    if pa.types.is_string(wanted):
        return bool(pa.types.is_string(actual) or pa.types.is_large_string(actual))
    return bool(actual == wanted)


def _columns(table: pa.Table, where: str) -> Columns:
    missing: dict[str, Bools] = {}
    chooses = "host_us" in table.column_names

    def values(name: str, fill: Any, kind: pa.DataType) -> npt.NDArray[Any]:
        try:
            column = pc.cast(_flat(table[name]), kind)
        except pa.ArrowInvalid as error:
            raise TraceError(f"{where}: column {name}: {error}") from error
        missing[name] = column.is_null().to_numpy(zero_copy_only=False)
        return np.asarray(column.fill_null(fill).to_numpy(zero_copy_only=False))

    def strings(name: str) -> Strings:
        column = _flat(table[name])
        missing[name] = column.is_null().to_numpy(zero_copy_only=False)
        return _strings(column)

    def ints(name: str) -> Ints:
        return values(name, -1, pa.int64())

    return Columns(
        op=ints("op"),
        op_name=strings("op_name"),
        start_us=values("start_us", 0.0, pa.float64()),
        duration_us=values("duration_us", 0.0, pa.float64()),
        tensor=ints("tensor"),
        touches=~missing["tensor"],
        tensor_name=strings("tensor_name"),
        nbytes=ints("nbytes"),
        kind=strings("kind"),
        access=strings("access"),
        first_page=ints("first_page"),
        page_count=ints("page_count"),
        persistent=values("persistent", False, pa.bool_()),
        rerun=values("rerun", False, pa.bool_()) if chooses else None,
        host_us=values("host_us", np.nan, pa.float64()) if chooses else None,
        missing=missing,
    )


def _flat(column: pa.ChunkedArray) -> pa.Array:
    """One array without dictionary, but for strings."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if pa.types.is_dictionary(array.type) and not (
        pa.types.is_string(array.type.value_type) or pa.types.is_large_string(array.type.value_type)
    ):
        return array.dictionary_decode()
    return array


def _strings(column: pa.Array) -> Strings:
    """Equal strings have equal codes, whatever wrote the file."""
    if pa.types.is_dictionary(column.type):
        words = column.dictionary.to_pylist()
        if None not in words and len(set(words)) == len(words):
            return Strings(_codes(column.indices), words)
        column = pc.cast(column, column.type.value_type)
    encoded = pc.dictionary_encode(pc.cast(column, pa.large_string()))
    return Strings(_codes(encoded.indices), encoded.dictionary.to_pylist())


def _codes(indices: pa.Array) -> Ints:
    filled = pc.cast(indices, pa.int64()).fill_null(-1)
    return np.asarray(filled.to_numpy(zero_copy_only=False))

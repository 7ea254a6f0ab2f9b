"""Parquet and Arrow tables: only the text column is read, row group by row group, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq

from elastic.base.errors import DataError
from elastic.training.documents import (
    Document,
    ReadOptions,
    Skipped,
    TrackedFile,
    bad_file,
    missing_column,
)
from elastic.training.sources import SourceFile

BATCH_BYTES = 1 << 20
"""Aim for the text of one batch of rows."""
MAX_BATCH_ROWS = 4096


def read_table(
    file: SourceFile, tracked: TrackedFile, options: ReadOptions, skipped: Skipped
) -> Iterator[Document]:
    """The documents of a table. Rows are counted from 1."""
    row = 0
    for batch, path in _batches(file, tracked, options):
        texts = batch.column(batch.schema.get_field_index(path[0]))
        for name in path[1:]:  # flatten, unlike field, keeps the nulls of the struct itself
            texts = texts.flatten()[texts.type.get_field_index(name)]
        if pa.types.is_dictionary(texts.type):
            texts = texts.dictionary_decode()
        for start in range(0, len(texts), 256):  # a file may be one huge batch
            for text in _to_python(file, texts.slice(start, 256), row):
                row += 1
                if text is None:
                    skipped.null += 1
                else:
                    yield Document(text, text.encode("utf-8"), row)


def check_table(file: SourceFile, tracked: TrackedFile, options: ReadOptions) -> bool:
    """Find the text column in the schema; says whether there are rows (an Arrow stream may have some)."""
    if file.format.kind == "parquet":
        parquet = _open_parquet(tracked)
        resolve(file, parquet.schema_arrow, options.text_column)
        return parquet.metadata.num_rows > 0
    reader = _open_arrow(file, tracked)
    resolve(file, reader.schema, options.text_column)
    return not isinstance(reader, pa.ipc.RecordBatchFileReader) or reader.num_record_batches > 0


def resolve(file: SourceFile, schema: pa.Schema, text_column: str) -> tuple[str, ...]:
    """Path of the text column: a column of exactly this name, else dots as nesting into structs.

    Raises DataError when it is missing, lies inside a list, or does not hold text.
    """
    found = _find(list(schema), text_column, file)
    if found is None:
        raise missing_column(file, text_column, schema.names)
    path, kind = found
    value = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (_is_text(value) or pa.types.is_null(value)):
        raise DataError(
            f"column '{text_column}' does not hold text",
            where=file.name,
            saw=f"type {kind}",
            fix="set data.text_column to a column of type string, or cast this one",
        )
    return path


def _find(
    fields: list[pa.Field], wanted: str, file: SourceFile
) -> tuple[tuple[str, ...], pa.DataType] | None:
    named = [field for field in fields if field.name == wanted]
    if len(named) > 1:
        raise DataError(
            f"there are several columns '{wanted}'",
            where=file.name,
            saw=", ".join(field.name for field in fields[:20]),
            fix="rename one of them",
        )
    if named:
        return (wanted,), named[0].type
    for field in fields:
        if not wanted.startswith(f"{field.name}."):
            continue
        if pa.types.is_struct(field.type):
            children = [field.type.field(index) for index in range(field.type.num_fields)]
            found = _find(children, wanted[len(field.name) + 1 :], file)
            if found is not None:
                return (field.name, *found[0]), found[1]
        elif pa.types.is_nested(field.type):
            raise DataError(
                f"'{wanted}' reaches into a list or map, of which each row holds several",
                where=file.name,
                saw=f"'{field.name}' of type {field.type}",
                fix="write the texts into a column of their own and name it with data.text_column",
            )
    return None


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _batches(
    file: SourceFile, tracked: TrackedFile, options: ReadOptions
) -> Iterator[tuple[pa.RecordBatch, tuple[str, ...]]]:
    if file.format.kind == "parquet":
        parquet = _open_parquet(tracked)
        path = resolve(file, parquet.schema_arrow, options.text_column)
        for group in range(parquet.metadata.num_row_groups):
            yield from (
                (batch, path)
                for batch in parquet.iter_batches(
                    batch_size=_batch_rows(parquet.metadata.row_group(group), path),
                    row_groups=[group],
                    columns=[".".join(path)],
                    use_threads=False,
                )
            )
        return
    schema = _open_arrow(file, tracked).schema
    path = resolve(file, schema, options.text_column)
    only = pa.ipc.IpcReadOptions(included_fields=[schema.get_field_index(path[0])], use_threads=False)
    tracked.seek(0)
    reader = _open_arrow(file, tracked, only)
    if isinstance(reader, pa.ipc.RecordBatchFileReader):
        for index in range(reader.num_record_batches):
            yield reader.get_batch(index), path
    else:
        for batch in reader:
            yield batch, path


def _batch_rows(group: pq.RowGroupMetaData, path: tuple[str, ...]) -> int:
    """Rows of a batch of about BATCH_BYTES of text, from the sizes in the footer."""
    name = ".".join(path)
    sizes = [group.column(index) for index in range(group.num_columns)]
    size = sum(chunk.total_uncompressed_size for chunk in sizes if chunk.path_in_schema == name)
    mean = max(1, size // max(1, group.num_rows))
    return max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // mean))


def _open_parquet(tracked: TrackedFile) -> pq.ParquetFile:
    # without pre_buffer and with a buffer, a column chunk is streamed page by page
    return pq.ParquetFile(
        pa.PythonFile(tracked, mode="r"),
        pre_buffer=False,
        buffer_size=1 << 20,
        page_checksum_verification=True,
    )


def _open_arrow(
    file: SourceFile, tracked: TrackedFile, options: pa.ipc.IpcReadOptions | None = None
) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    magic = tracked.read(6)
    tracked.seek(0)
    if magic.startswith(b"FEA1"):
        fix = "write it again with pyarrow.feather.write_feather(..., version=2)"
        raise bad_file(file, "Feather version 1 is not supported", "the magic bytes FEA1", fix)
    source = pa.PythonFile(tracked, mode="r")
    if magic == b"ARROW1":
        return pa.ipc.open_file(source, options=options)
    return pa.ipc.open_stream(source, options=options)


def _to_python(file: SourceFile, texts: pa.Array, row: int) -> list[str | None]:
    try:
        return texts.to_pylist()
    except UnicodeDecodeError:
        for offset in range(len(texts)):
            try:
                texts[offset].as_py()
            except UnicodeDecodeError as error:
                what, fix = "the text is not valid UTF-8", "correct the row"
                raise bad_file(file, what, str(error), fix, row=row + offset + 1) from error
        raise

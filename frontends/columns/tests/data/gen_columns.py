"""Writes the Parquet and Arrow files of these tests: python gen_columns.py (pyarrow 26, polars 2.1).

All have the same tokens: token i is (7 i^2 + 13 i) mod 61, for i below 296. In columns of lists, row k has
LENGTHS[k % 8] of them, and the last row what is left. In flat columns each row has one.
"""

import os

import polars
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

HERE = os.path.dirname(os.path.abspath(__file__))
LENGTHS = [7, 0, 13, 1, 30, 4, 64, 2]
TOKENS = [(7 * i * i + 13 * i) % 61 for i in range(296)]


def rows():
    found, k = [], 0
    while sum(map(len, found)) < len(TOKENS):
        start = sum(map(len, found))
        found.append(TOKENS[start : start + LENGTHS[k % 8]])
        k += 1
    return found


ROWS = rows()


def column(kind, values=ROWS):
    return pa.array(values, kind)


def table(kind, **others):
    return pa.table({**others, "input_ids": column(kind)})


def parquet(name, data, **options):
    options = {"compression": "none", "store_schema": False, "data_page_size": 64, "write_batch_size": 16, **options}
    pq.write_table(data, f"{HERE}/{name}.parquet", **options)


def stream(name, data, rows=9, file=False, compression=None):
    options = pa.ipc.IpcWriteOptions(compression=compression)
    new = pa.ipc.new_file if file else pa.ipc.new_stream
    with new(f"{HERE}/{name}.arrow", data.schema, options=options) as writer:
        writer.write_table(data, max_chunksize=rows)


def main():
    ints = lambda kind: pa.list_(kind)
    n = len(ROWS)
    text = pa.array([f"row {k}" if k % 3 else None for k in range(n)])
    mask = pa.array([[1] * len(row) for row in ROWS], ints(pa.int8()))

    parquet("plain", table(ints(pa.int32())), use_dictionary=False, row_group_size=9)
    parquet("dictionary", table(ints(pa.int64())), row_group_size=9)
    parquet(
        "snappy",
        table(ints(pa.int32()), text=text, attention_mask=mask),
        compression="snappy",
        write_page_checksum=True,
    )
    parquet(
        "gzip_v2", table(pa.large_list(pa.uint16())), compression="gzip", data_page_version="2.0", data_page_size=200
    )
    parquet("lz4", table(ints(pa.uint32())), compression="lz4", use_dictionary=False, data_page_size=1000)
    flat = pa.table({"text": pa.array(["a"] * 296), "tokens": pa.array(TOKENS, pa.int64())})
    parquet(
        "zstd_delta",
        flat,
        compression="zstd",
        use_dictionary=False,
        column_encoding={"tokens": "DELTA_BINARY_PACKED"},
        data_page_size=500,
    )
    required = pa.schema([pa.field("ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), nullable=False)])
    split = pa.table([column(required.field(0).type)], schema=required)
    parquet(
        "split_v2",
        split,
        compression="zstd",
        use_dictionary=False,
        column_encoding={"ids.list.element": "BYTE_STREAM_SPLIT"},
        data_page_version="2.0",
        data_page_size=500,
    )

    others = {
        "text": text,
        "view": pa.array([f"a longer text, of row {k}" for k in range(n)], pa.string_view()),
        "struct": pa.array(
            [{"a": k, "b": None} for k in range(n)], pa.struct({"a": pa.int8(), "b": pa.list_(pa.float32())})
        ),
        "class": pa.array(["a", "b"] * (n // 2) + ["a"] * (n % 2)).dictionary_encode(),
        "none": pa.nulls(n),
    }
    metadata = {
        "huggingface": '{"info": {"features": {"input_ids": {"feature": {"dtype": "int32"}, "_type": "Sequence"}}}}'
    }
    stream("stream", table(ints(pa.int32())).replace_schema_metadata(metadata))
    stream("others", table(pa.large_list(pa.int64()), **others), file=True)
    stream("stream_zstd", table(ints(pa.uint16()), text=text), compression="zstd", rows=100)
    stream("flat", pa.table({"tokens": pa.array(TOKENS, pa.uint8())}), file=True, rows=100)
    fixed = pa.array([TOKENS[i : i + 8] for i in range(0, 296, 8)], pa.list_(pa.int16(), 8))
    stream("fixed_lz4", pa.table({"input_ids": fixed}), compression="lz4", file=True)
    # Its batches do not follow each other directly.
    frame = polars.DataFrame({"input_ids": ROWS}, schema={"input_ids": polars.List(polars.Int32)})
    frame.write_ipc(f"{HERE}/polars.arrow", compression="zstd", record_batch_size=9)
    pa.feather.write_feather(table(ints(pa.int32())).slice(3), f"{HERE}/sliced.feather", chunksize=9)

    lost = [ROWS[0], ROWS[2], None, ROWS[3]]
    hole = [ROWS[0], ROWS[2], [1, None, 3], ROWS[3]]
    for name, values in [("null_row", lost), ("null_value", hole)]:
        data = pa.table({"input_ids": column(ints(pa.int32()), values)})
        parquet(name, data)
        stream(name, data)
    data = pa.table({"tokens": pa.array([1, 2, None], pa.int32())})
    parquet("null", data)
    stream("null", data)

    documents = pa.table(
        {"input_ids": column(ints(pa.int32()), [[1, 2, 0], [3, 4, 5, 6, 0], [], [7, 0], [8] * 6 + [0]])}
    )
    parquet("documents", documents)
    stream("documents", documents)

    several = pa.table({"a": pa.array([1, 2]), "b": pa.array([[1], [2]], ints(pa.uint8())), "c": pa.array(["x", "y"])})
    parquet("several", several)
    stream("several", several)
    nested = pa.table({"input_ids": pa.array([[[1, 2]], [[3]]]), "when": pa.array([1, 2], pa.timestamp("us"))})
    parquet("nested", nested)
    stream("nested", nested)
    parquet("brotli", table(ints(pa.int32())), compression="brotli")
    large = pa.table({"tokens": pa.array([1, 70_000, 2**63], pa.uint64())})
    parquet("large", large)
    stream("large", large)


main()

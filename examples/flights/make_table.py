"""Makes a small table for the example, or adds to it: ``python make_table.py PATH``."""

import sys

import pyarrow as pa

import headgate as hg

SCHEMA = pa.schema([pa.field("carrier", pa.string(), False), pa.field("flight", pa.int64(), False), pa.field("delay", pa.float64())])


def main(path: str) -> None:
    table = hg.create_table(path, SCHEMA, key=["carrier", "flight"], if_exists="open")
    with table.writer() as writer:
        writer.put(
            [{"carrier": carrier, "flight": number, "delay": 1.5 * number} for carrier in ("AA", "UA") for number in range(5)]
        ).wait()
        writer.delete([{"carrier": "UA", "flight": 0}]).wait()


if __name__ == "__main__":
    main(sys.argv[1])

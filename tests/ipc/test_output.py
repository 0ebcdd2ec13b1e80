"""Output: what is written never waits for its reader, and is not lost in silence."""

import os

from octavo.ipc.output import MAX_KEPT_BYTES, Output


def test_a_full_pipe_drops_and_counts_and_goes_on_when_it_is_read() -> None:
    reading, writing = os.pipe()
    output = Output(writing)
    piece = "x" * 1000 + "\n"
    num_pieces = 2 * MAX_KEPT_BYTES // len(piece)
    for _ in range(num_pieces):
        output.write(piece)
    with os.fdopen(reading, "rb") as pipe:
        lines = [pipe.readline() for _ in range(MAX_KEPT_BYTES // len(piece))]
        output.drain(5)
        output.write("the end\n")
        output.drain(5)
        os.close(writing)
        *more, dropped, last = pipe.read().splitlines(keepends=True)
    assert {*lines, *more} == {piece.encode()}
    assert dropped.decode().split(" pieces")[0] == f"octavo: {num_pieces - len(lines) - len(more)}"
    assert last == b"the end\n"


def test_what_the_encoding_lacks_is_escaped_and_a_reader_that_is_gone_is_no_error() -> None:
    reading, writing = os.pipe()
    output = Output(writing, "ascii")
    print("grün \udcff 😀", file=output, flush=True)
    output.drain(5)
    with os.fdopen(reading, "rb") as pipe:
        assert pipe.readline() == b"gr\\xfcn \\udcff \\U0001f600\n"
    for _ in range(3):
        output.write("to nobody\n")
    output.drain(5)
    os.close(writing)

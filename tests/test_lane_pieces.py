"""Lanes are cut to pieces, without a gap."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from beamjax import lane_pieces
from beamjax.lane_pieces import Piece, key_of, step_pieces, step_sections
from beamjax.plan import Lane, Map


def step(*lanes):
    return Map("m", "clients", "body", (), (), (), lanes)


@given(st.integers(0, 50), st.integers(0, 50), st.integers(1, 20))
def test_cuts_cover_a_piece(start, size, limit):
    cut = list(Piece(3, start, start + size).cut(limit))
    assert [piece.start for piece in cut[1:]] == [piece.stop for piece in cut[:-1]]
    assert (cut[0].start, cut[-1].stop) == (start, start + size)
    assert all(piece.lane == 3 and piece.stop - piece.start <= limit for piece in cut)


@pytest.mark.parametrize(("dtype", "values"), [("float32", 250), ("float64", 125), ("int8", 1000)])
def test_sections_have_the_bytes_of_a_file(monkeypatch, dtype, values):
    monkeypatch.setattr(lane_pieces, "SECTION_BYTES", 1000)
    sections = step_sections(step(Lane("sum", dtype, 2100, ()), Lane("max", dtype, 1, ())))
    assert sections[0] == Piece(0, 0, values)
    assert sections[-1] == Piece(1, 0, 1)


def test_keys():
    lanes = step(Lane("sum", "float32", 3 << 20, ()), Lane("max", "int8", 2, ()))
    pieces = [*step_pieces(lanes), *step_sections(lanes)]
    assert [Piece.from_key(key_of(piece)) for piece in pieces] == pieces

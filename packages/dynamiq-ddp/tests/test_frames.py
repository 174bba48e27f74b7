"""Headers byte by byte, and messages that lie together without being copied."""

import pytest
import torch

from dynamiq_ddp.frames import GRADIENT, HEADER, STATISTICS, Frames, Header, Seal

CPU = torch.device("cpu")


def filled(sizes, align):
    frames = Frames(sizes, CPU, align=align)
    frames.buffer.fill_(255)
    for chunk in range(len(sizes)):
        frames.header(chunk).fill_(100 + chunk)
        frames.message(chunk).fill_(chunk)
    return frames


def test_header_layout():
    header = Header(kind=GRADIENT, chunk=258, slot=3, bucket=4, step=2**32 + 5)
    assert header.pack() == bytes([0x44, 0x51, 1, 2, 2, 1, 3, 0, 4, 0, 0, 0, 5, 0, 0, 0])
    assert len(header.pack()) == HEADER


@pytest.mark.parametrize("align", [2, 16])
def test_frames_do_not_overlap_and_are_aligned(align):
    sizes = [5, 0, 16, 7]
    frames = filled(sizes, align)
    for chunk, size in enumerate(sizes):
        assert frames.header(chunk).tolist() == [100 + chunk] * HEADER
        assert frames.message(chunk).tolist() == [chunk] * size
        assert frames.header(chunk).storage_offset() % align == 0
    assert frames.buffer.numel() <= sum(sizes) + 4 * HEADER + 3 * (align - 1)


@pytest.mark.parametrize("chunks", [(0,), (1, 2), (0, 1, 2, 3), (3, 1), (2, 0, 3), ()])
def test_a_piece_arrives_where_it_belongs(chunks):
    sizes = [5, 0, 16, 7]
    source, target = filled(sizes, 16), Frames(sizes, CPU, align=16)
    target.buffer.fill_(200)
    landing = target.landing(chunks)
    landing.copy_(source.piece(chunks))
    target.settle(chunks, landing)
    for chunk in range(4):
        expected = [chunk] * sizes[chunk] if chunk in chunks else [200] * sizes[chunk]
        assert target.message(chunk).tolist() == expected
        assert target.header(chunk).tolist() == [100 + chunk if chunk in chunks else 200] * HEADER
    room = source.room_for(chunks)
    assert room.buffer.numel() == landing.numel()  # what a receiver of a reduce step makes room for
    room.buffer.copy_(source.piece(chunks))
    assert [room.message(i).tolist() for i in range(len(chunks))] == [[c] * sizes[c] for c in chunks]


def test_neighbours_are_not_copied():
    frames = filled([5, 0, 16, 7], 16)
    assert frames.piece((1, 2)).data_ptr() == frames.header(1).data_ptr()
    assert frames.landing((1, 2)).data_ptr() == frames.header(1).data_ptr()


def sealed(*headers):
    seal = Seal(CPU)
    seal.prepare(headers or [HEADER_3])
    return seal


def arrived(header, seal=None):
    out = torch.empty(HEADER, dtype=torch.uint8)
    (seal or sealed(header)).write(header, out)
    return out


HEADER_3 = Header(GRADIENT, chunk=3, slot=1, bucket=2, step=9)


def test_a_right_header_is_no_fault():
    seal = sealed()
    seal.expect(1, HEADER_3, arrived(HEADER_3))
    seal.compare()
    assert not seal.wrong()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"step": 8}, "step 8 instead of 9"),
        ({"bucket": 0}, "bucket 0 instead of 2"),
        ({"chunk": 2}, "chunk 2 instead of 3"),
        ({"slot": 0}, "slot 0 instead of 1"),
        ({"kind": STATISTICS}, "kind 1 instead of 2"),
    ],
)
def test_a_wrong_field_is_named(change, words):
    seal = sealed()
    seal.expect(0, HEADER_3, arrived(HEADER_3))
    seal.expect(4, HEADER_3, arrived(HEADER_3._replace(**change)))
    assert not seal.wrong()  # nothing has been compared
    seal.compare()
    assert seal.wrong()
    reason, peers = seal.describe()
    assert peers == (4,)
    assert "rank 4 sent" in reason
    assert words in reason


def test_the_first_byte_counts_too():
    seal = sealed()
    broken = arrived(HEADER_3)
    broken[0] ^= 1
    seal.expect(4, HEADER_3, broken)
    seal.compare()
    assert seal.wrong()
    assert "no frame of version 1" in seal.describe()[0]


def test_a_fault_is_passed_on():
    first, second = sealed(), sealed()
    first.expect(0, HEADER_3, torch.zeros(HEADER, dtype=torch.uint8))
    first.compare()
    second.expect(1, HEADER_3, arrived(HEADER_3, first))
    second.compare()
    assert second.wrong()
    assert "rank 1 sent for chunk 3 word that it had received a wrong header" in second.describe()[0]

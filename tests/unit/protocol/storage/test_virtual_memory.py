import mmap
from pathlib import Path

import numpy as np
import pytest

from cache_protocol.storage.virtual_memory import AddressRange, MappedFile, huge_page_bytes

PAGE = mmap.PAGESIZE


def file_of(path: Path, pages: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """Writes so many pages; what is in them."""
    content = np.random.default_rng(pages).integers(0, 256, pages * PAGE).astype(np.uint8)
    content.tofile(path)
    return content


def mapped(path: Path) -> MappedFile:
    with path.open("rb") as file:
        return MappedFile(file.fileno())


def test_pages_of_several_files_are_mapped_side_by_side(tmp_path: Path) -> None:
    first, second = file_of(tmp_path / "first", 2), file_of(tmp_path / "second", 3)
    addresses = AddressRange(5 * PAGE)

    addresses.map_file(0, mapped(tmp_path / "second"), PAGE, 2 * PAGE)
    addresses.map_file(3 * PAGE, mapped(tmp_path / "first"), 0, 2 * PAGE)

    rows = addresses.rows(0, PAGE, np.dtype(np.uint8))
    assert rows.shape == (5, PAGE)
    assert rows[:2].ravel().tolist() == second[PAGE:].tolist()
    assert rows[3:].ravel().tolist() == first.tolist()


def test_mapped_pages_outlive_the_file_its_map_and_the_range(tmp_path: Path) -> None:
    content = file_of(tmp_path / "file", 2)
    file, addresses = mapped(tmp_path / "file"), AddressRange(2 * PAGE)
    (tmp_path / "file").unlink()

    addresses.map_file(0, file, 0, 2 * PAGE)
    del file
    rows = addresses.rows(0, 8, np.dtype(np.uint8))
    del addresses

    assert rows.ravel().tolist() == content.tolist()


def test_a_part_of_a_page_may_be_the_last_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * (PAGE + 7))
    addresses = AddressRange(2 * PAGE)

    addresses.map_file(0, mapped(tmp_path / "file"), 0, PAGE + 7)

    assert addresses.rows(0, 1, np.dtype(np.uint8))[: PAGE + 7].tolist() == [[120]] * (PAGE + 7)


def test_rows_begin_at_any_byte_and_only_whole_ones_count() -> None:
    addresses = AddressRange(PAGE)
    assert addresses.rows(8, 3, np.dtype(np.float32)).shape == ((PAGE - 8) // 12, 3)


def test_rows_cannot_be_written(tmp_path: Path) -> None:
    assert not AddressRange(PAGE).rows(0, 1, np.dtype(np.int64)).flags.writeable


@pytest.mark.parametrize(("at", "offset", "size"), [(PAGE, 0, 2 * PAGE), (0, PAGE, 2 * PAGE)])
def test_a_map_that_does_not_fit_is_refused(
    tmp_path: Path, at: int, offset: int, size: int
) -> None:
    file_of(tmp_path / "file", 2)
    with pytest.raises(
        ValueError, match=rf"{size} bytes, from {offset} of \d+, do not fit at {at} of {2 * PAGE}"
    ):
        AddressRange(2 * PAGE).map_file(at, mapped(tmp_path / "file"), offset, size)


def test_a_place_inside_of_a_page_is_refused_by_the_system(tmp_path: Path) -> None:
    file_of(tmp_path / "file", 2)
    with pytest.raises(OSError, match=r"cannot map 4096 bytes: Invalid argument"):
        AddressRange(2 * PAGE).map_file(8, mapped(tmp_path / "file"), 0, PAGE)


def test_more_addresses_than_there_are_is_an_error_with_the_size() -> None:
    with pytest.raises(OSError, match=rf"cannot map {2**62 // 10**9}\d+ bytes: "):
        AddressRange(2**62)


def test_an_empty_file_cannot_be_mapped(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(OSError, match="cannot map 0 bytes"):
        mapped(tmp_path / "empty")


def test_addresses_are_given_back(tmp_path: Path) -> None:
    """More than a process has, one after the other."""
    for _ in range(300):
        AddressRange(2**42)


def test_addresses_where_something_could_not_be_shown_are_kept(tmp_path: Path) -> None:
    """The system may have left a hole, in which other memory may be mapped by now."""
    file_of(tmp_path / "file", 2)
    addresses = AddressRange(2 * PAGE)
    with pytest.raises(OSError, match="Invalid argument"):
        addresses.map_file(8, mapped(tmp_path / "file"), 0, PAGE)
    kept = f"{addresses.start:x}-"
    del addresses

    assert kept in Path("/proc/self/maps").read_text()


def test_a_long_range_begins_at_a_multiple_of_a_huge_page() -> None:
    ranges = [AddressRange(size * huge_page_bytes()) for size in (1, 3, 2)]

    assert [addresses.start % huge_page_bytes() for addresses in ranges] == [0, 0, 0]


def test_pages_of_a_disk_or_of_nothing_cannot_be_moved_to_huge_ones() -> None:
    addresses = AddressRange(huge_page_bytes())

    with pytest.raises(OSError, match="cannot make huge pages of"):
        addresses.collapse(0, huge_page_bytes())

"""Downloads from a server on this machine, of archives that the tests write."""

from __future__ import annotations

import gzip
import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from coterie import data
from coterie.data.archives import Download
from coterie.data.cifar import Cifar10
from coterie.data.download import unpack
from coterie.data.emnist import Emnist
from coterie.data.mnist import FILES, Mnist
from coterie.errors import ConfigError, DataError, UnknownName


class Server:
    """Serves bytes by path; may honour ranges or not, and may break off."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.ranges = True
        self.break_after: list[int] = []  # the next answers end after so many bytes
        self.asked: list[tuple[str, str | None]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version: ClassVar[str] = "HTTP/1.0"

            def do_GET(self) -> None:
                wanted = self.headers.get("Range")
                outer.asked.append((self.path, wanted))
                content = outer.files.get(self.path)
                if content is None:
                    self.send_error(404)
                    return
                first = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and outer.ranges else 0
                if first >= len(content) and first:
                    self.send_error(416)
                    return
                self.send_response(206 if first else 200)
                if first:
                    self.send_header("Content-Range", f"bytes {first}-{len(content) - 1}/{len(content)}")
                self.send_header("Content-Length", str(len(content) - first))
                self.end_headers()
                self.wfile.write(content[first:][: outer.break_after.pop(0) if outer.break_after else None])

            def log_message(self, *args: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.01,))
        self.thread.start()

    def close(self) -> None:
        self.http.shutdown()
        self.thread.join()
        self.http.server_close()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = Server()
    yield running
    running.close()


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def idx(array: np.ndarray) -> bytes:
    sizes = b"".join(int(size).to_bytes(4, "big") for size in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sizes + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """MNIST with nine images, served as its four compressed files."""
    images = np.random.default_rng(0).integers(0, 256, (9, 28, 28))
    labels = np.arange(9)
    contents = [idx(images[:6]), idx(labels[:6]), idx(images[6:]), idx(labels[6:])]
    packed = {name: gzip.compress(content) for name, content in zip(FILES, contents, strict=True)}
    server.files = {f"/{name}.gz": content for name, content in packed.items()}
    monkeypatch.setattr(Mnist, "counts", (6, 3))
    monkeypatch.setattr(Mnist, "checksums", {name: md5(c) for name, c in zip(FILES, contents, strict=True)})
    downloads = tuple(
        Download((f"{server.url}/{name}.gz",), md5(content), f"MNIST/raw/{name}.gz") for name, content in packed.items()
    )
    monkeypatch.setattr(Mnist, "downloads", downloads)
    return packed


def test_fetch_then_load(server: Server, mnist: dict[str, bytes], tmp_path: Path) -> None:
    folder = data.fetch("mnist", tmp_path, progress=False)
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.gz" for name in FILES)
    assert data.load("mnist", data_dir=tmp_path).y.tolist() == list(range(9))
    asked = len(server.asked)
    data.fetch("mnist", tmp_path, progress=False)
    assert len(server.asked) == asked  # what is whole is left alone


def test_a_partial_download_is_resumed(server: Server, mnist: dict[str, bytes], tmp_path: Path) -> None:
    name, content = FILES[0], mnist[FILES[0]]
    folder = tmp_path / Mnist.folder
    folder.mkdir(parents=True)
    (folder / f"{name}.gz.part").write_bytes(content[:1000])
    data.fetch("mnist", tmp_path, progress=False)
    assert server.asked[0] == (f"/{name}.gz", "bytes=1000-")
    assert (folder / f"{name}.gz").read_bytes() == content
    assert not list(folder.glob("*.part"))


def test_a_complete_part_needs_no_more_bytes(server: Server, mnist: dict[str, bytes], tmp_path: Path) -> None:
    folder = tmp_path / Mnist.folder
    folder.mkdir(parents=True)
    (folder / f"{FILES[0]}.gz.part").write_bytes(mnist[FILES[0]])
    data.fetch("mnist", tmp_path, progress=False)
    assert (folder / f"{FILES[0]}.gz").read_bytes() == mnist[FILES[0]]


def test_a_server_without_ranges_starts_again(server: Server, mnist: dict[str, bytes], tmp_path: Path) -> None:
    server.ranges = False
    folder = tmp_path / Mnist.folder
    folder.mkdir(parents=True)
    (folder / f"{FILES[0]}.gz.part").write_bytes(b"something else that is longer than nothing")
    data.fetch("mnist", tmp_path, progress=False)
    assert (folder / f"{FILES[0]}.gz").read_bytes() == mnist[FILES[0]]


def test_a_broken_connection_is_taken_up_where_it_ended(
    server: Server, mnist: dict[str, bytes], tmp_path: Path
) -> None:
    server.break_after = [500, 700]
    data.fetch("mnist", tmp_path, progress=False)
    assert [wanted for _, wanted in server.asked[:3]] == [None, "bytes=500-", "bytes=1200-"]
    assert data.load("mnist", data_dir=tmp_path).train_count == 6


def test_a_connection_that_keeps_breaking_keeps_what_came(
    server: Server, mnist: dict[str, bytes], tmp_path: Path
) -> None:
    server.break_after = [100, 100, 100]
    with pytest.raises(DataError, match="try again"):
        data.fetch("mnist", tmp_path, progress=False)
    assert (tmp_path / Mnist.folder / f"{FILES[0]}.gz.part").read_bytes() == mnist[FILES[0]][:300]
    data.fetch("mnist", tmp_path, progress=False)
    assert server.asked[3][1] == "bytes=300-"


def test_an_altered_file_is_refused_and_not_put_in_place(
    server: Server, mnist: dict[str, bytes], tmp_path: Path
) -> None:
    altered = bytearray(mnist[FILES[1]])
    altered[-1] ^= 1
    server.files[f"/{FILES[1]}.gz"] = bytes(altered)
    with pytest.raises(DataError, match=rf"{FILES[1]}\.gz"):
        data.fetch("mnist", tmp_path, progress=False)
    assert not (tmp_path / Mnist.folder / f"{FILES[1]}.gz").exists()
    server.files[f"/{FILES[1]}.gz"] = mnist[FILES[1]]
    data.fetch("mnist", tmp_path, progress=False)
    assert len(data.load("mnist", data_dir=tmp_path)) == 9


def test_a_damaged_file_on_disk_is_replaced(server: Server, mnist: dict[str, bytes], tmp_path: Path) -> None:
    folder = data.fetch("mnist", tmp_path, progress=False)
    (folder / f"{FILES[2]}.gz").write_bytes(b"damaged")
    data.fetch("mnist", tmp_path, progress=False)
    assert server.asked[-1][0] == f"/{FILES[2]}.gz"
    assert len(data.load("mnist", data_dir=tmp_path)) == 9


def test_the_next_address_is_tried(
    server: Server, mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloads = tuple(
        Download((f"{server.url}/gone/{one.target}", *one.urls), one.md5, one.target) for one in Mnist.downloads
    )
    monkeypatch.setattr(Mnist, "downloads", downloads)
    data.fetch("mnist", tmp_path, progress=False)
    assert len(data.load("mnist", data_dir=tmp_path)) == 9


def test_offline_says_which_file_to_put_where(
    server: Server, mnist: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = "http://127.0.0.1:9/mnist.gz"
    monkeypatch.setattr(Mnist, "downloads", (Download((closed,), "0" * 32, f"MNIST/raw/{FILES[0]}.gz"),))
    with pytest.raises(DataError) as caught:
        data.fetch("mnist", tmp_path, progress=False)
    assert closed in str(caught.value) and str(tmp_path / "MNIST" / "raw" / f"{FILES[0]}.gz") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_progress_is_shown_on_standard_error(
    server: Server, mnist: dict[str, bytes], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data.fetch("mnist", tmp_path)
    shown = capsys.readouterr()
    assert shown.out == "" and FILES[0] in shown.err


def test_a_tar_archive_is_unpacked(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {name: bytes([number]) + bytes(3072) for number, name in enumerate(Cifar10.checksums)}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, content in {**rows, "readme.html": b"no data"}.items():
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    server.files["/cifar.tar.gz"] = packed.getvalue()
    monkeypatch.setattr(Cifar10, "checksums", {name: md5(content) for name, content in rows.items()})
    monkeypatch.setattr(Cifar10, "counts", dict.fromkeys(rows, 1))
    whole = Download((f"{server.url}/cifar.tar.gz",), md5(packed.getvalue()), Cifar10.folder, tuple(rows))
    monkeypatch.setattr(Cifar10, "downloads", (whole,))
    folder = data.fetch("cifar10", tmp_path, progress=False)
    assert sorted(path.name for path in folder.iterdir()) == sorted(rows)
    assert data.load("cifar10", data_dir=tmp_path).y.tolist() == [0, 1, 2, 3, 4, 5]
    assert not (tmp_path / "cifar.tar.gz").exists()


def test_a_zip_archive_is_unpacked(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = Emnist.files_of("digits")
    contents = [idx(np.zeros((10, 28, 28))), idx(np.arange(10)), idx(np.zeros((2, 28, 28))), idx(np.arange(2))]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in zip(names, contents, strict=True):
            archive.writestr(f"gzip/{name}.gz", gzip.compress(content))
        archive.writestr("gzip/emnist-mnist-test-labels-idx1-ubyte.gz", b"not wanted")
    server.files["/gzip.zip"] = packed.getvalue()
    monkeypatch.setattr(Emnist, "splits", {"digits": (10, 2)})
    whole = Download(
        (f"{server.url}/gzip.zip",), md5(packed.getvalue()), Emnist.folder, tuple(f"{name}.gz" for name in names)
    )
    monkeypatch.setattr(Emnist, "downloads", (whole,))
    folder = data.fetch("emnist", tmp_path, progress=False)
    assert sorted(path.name for path in folder.iterdir()) == sorted(f"{name}.gz" for name in names)
    assert len(data.load("emnist:split=digits", data_dir=tmp_path)) == 12


def test_an_archive_that_lacks_a_member_or_is_damaged(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("one", b"1")
    with pytest.raises(DataError, match=r"a\.zip does not hold two"):
        unpack(tmp_path / "a.zip", tmp_path / "out", ("one", "two"))
    (tmp_path / "b.tar.gz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"b\.tar\.gz cannot be unpacked"):
        unpack(tmp_path / "b.tar.gz", tmp_path / "out", ("one",))


def test_members_cannot_leave_the_folder(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("../../one", b"1")
    unpack(tmp_path / "a.zip", tmp_path / "in" / "out", ("one",))
    assert (tmp_path / "in" / "out" / "one").read_bytes() == b"1"
    assert not (tmp_path / "one").exists()


def test_what_cannot_be_fetched_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="built in"):
        data.fetch("digits", tmp_path)
    with pytest.raises(ConfigError, match="your own"):
        data.fetch("table:x.csv", tmp_path)
    with pytest.raises(DataError, match="Kaggle"):
        data.fetch("medical_mnist", tmp_path)
    with pytest.raises(DataError, match="LEAF"):
        data.fetch("femnist", tmp_path)
    with pytest.raises(UnknownName, match="mnist"):
        data.fetch("mnits", tmp_path)


def test_official_downloads_are_declared() -> None:
    for source in (Mnist, Emnist, Cifar10):
        for download in source.downloads:
            assert len(download.md5) == 32 and all(url.startswith("http") for url in download.urls)
    assert len(Emnist.downloads[0].members) == 16

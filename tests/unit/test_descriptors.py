"""Code that looks at descriptors, or opens one, leaves none behind."""

import gc
import socket
from pathlib import Path

import pytest

from objcomm import UsageError
from objcomm._transport.sockets import notice_outages, open_sockets, other_ends
from objcomm._wire.signing import read_key_file
from tests.open_files import open_files


@pytest.fixture(autouse=True)
def _without_garbage() -> None:
    """Close what earlier tests dropped, which might otherwise be collected in between."""
    gc.collect()


def test_setting_limits_of_connections_leaves_no_descriptor() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sockets = open_sockets()
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), listener.accept()[0]:
            before = open_files()
            notice_outages(sockets, 30.0)
            assert other_ends(sockets, port)
            assert open_files() == before


@pytest.mark.parametrize("key", [b"a key of sixteen bytes or more", b"short"])
def test_a_key_file_is_closed_whatever_its_content(tmp_path: Path, key: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(key)
    path.chmod(0o600)
    before = open_files()
    try:
        read_key_file(str(path))
    except UsageError:
        assert key == b"short"
    assert open_files() == before

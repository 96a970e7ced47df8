"""The first test that needs a shared value creates it."""

from pathlib import Path

import pytest

from tests.once import once


def test_a_shared_value_is_created_once(tmp_path_factory: pytest.TempPathFactory) -> None:
    folders: list[Path] = []

    def make(folder: Path) -> str:
        folders.append(folder)
        return "value"

    for _ in range(2):
        assert once(tmp_path_factory, "made", make) == "value"
    (folder,) = folders
    assert folder.is_dir()


def test_a_value_that_cannot_be_created_is_tried_once_and_fails_each_test(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tried: list[Path] = []

    def make(folder: Path) -> str:
        tried.append(folder)
        raise LookupError("no such host")

    for _ in range(2):
        with pytest.raises(pytest.fail.Exception, match="LookupError: no such host"):
            once(tmp_path_factory, "not-made", make)
    assert len(tried) == 1

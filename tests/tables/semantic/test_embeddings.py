# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.tables.engines.server.fake_server import VLLM_MODEL, Reply, failure, fake_server
from vllm_relay.tables import ServerEmbeddings
from vllm_relay.tables.engines.base import EngineError
from vllm_relay.tables.semantic.embeddings import embedder, unit_vectors


def vectors(body: dict[str, Any]) -> Reply:
    data = [
        {"index": number, "embedding": [float(len(text)), 1.0]}
        for number, text in enumerate(body["input"])
    ]
    return Reply({"data": data[::-1]})


def test_a_servers_vectors_are_those_of_the_texts() -> None:
    with fake_server(vectors, VLLM_MODEL) as server:
        texts = ["x" * (i % 7) for i in range(300)]
        found = ServerEmbeddings(server.url)(texts)
        np.testing.assert_array_equal(found, [[i % 7, 1] for i in range(300)])
        assert [len(body["input"]) for body in server.bodies].count(128) == 2
        assert {body["model"] for body in server.bodies} == {"tiny"}
        assert embedder(f"{server.url}/v1")(["ab"]).tolist() == [[2.0, 1.0]]


def test_servers_that_fail() -> None:
    replies = iter([failure(500), failure(503), vectors({"input": ["ab"]})])
    with fake_server(lambda body: next(replies), VLLM_MODEL) as server:
        assert ServerEmbeddings(server.url)(["ab"]).tolist() == [[2.0, 1.0]]
    with fake_server(lambda body: failure(400, "no embeddings here"), VLLM_MODEL) as server:
        with pytest.raises(EngineError, match="refuses: HTTP 400: no embeddings here"):
            ServerEmbeddings(server.url)(["ab"])
        with pytest.raises(EngineError, match="expected"):
            ServerEmbeddings(server.url, "other")(["ab"])
    with (
        fake_server(lambda body: Reply({"data": []}), VLLM_MODEL) as server,
        pytest.raises(EngineError, match="no vector for each of 1 texts"),
    ):
        ServerEmbeddings(server.url)(["ab"])


def test_vectors_have_length_one_and_texts_are_embedded_once() -> None:
    asked: list[str] = []

    def embed(texts: list[str]) -> Any:
        asked.extend(texts)
        return [[3.0, 4.0] if text else [0.0, 0.0] for text in texts]

    found = unit_vectors(embed, ["a", "", "a"])
    np.testing.assert_allclose(found, [[0.6, 0.8], [0, 0], [0.6, 0.8]], rtol=1e-6)
    assert asked == ["a", ""]


@pytest.mark.parametrize("given", [[[1.0, np.nan]], [[1.0], [2.0]], [1.0]])
def test_what_is_no_vector_for_each_text_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="expected one vector of finite numbers for each"):
        unit_vectors(lambda texts: given, ["a"])

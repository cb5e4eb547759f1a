# SPDX-License-Identifier: Apache-2.0
"""Queries as users of other libraries write them; runs in these libraries' own environment.

Usage: PYTHON rivals_main.py < JSON

The JSON has `system` (lotus or daft), `films` and `questions` (tables by column), `texts` (the
questions to the model by name) and `urls` (a server for each query). The last line that is written
is JSON: the library's `version` and the `results` of the queries.
"""

import json
import sys
from importlib.metadata import version

MODEL = "tiny"
MAX_TOKENS = {"recommendation": 16, "sentiment": 16, "score": 4, "answer": 16}


class Lotus:
    """LOTUS names the fields in its instructions."""

    package = "lotus-ai"
    _FILMS = "Of {link}, {review}, {title} and {info}: "
    _CLAIM = "the sentiment of the {review} is negative"

    def __init__(self, films, questions, texts):
        import pandas as pd

        self.films, self.questions, self.texts = pd.DataFrame(films), pd.DataFrame(questions), texts

    def use(self, url):
        import lotus

        self.model = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
        self._configure(16)
        return lotus

    def _configure(self, max_tokens):
        import lotus

        lotus.settings.configure(lm=lotus.models.LM(**self.model, max_tokens=max_tokens))

    def _map(self, table, name, fields=""):
        self._configure(MAX_TOKENS[name])
        return table.sem_map(fields + self.texts[name], suffix="answer")

    def projection(self):
        return self._map(self.films, "recommendation", self._FILMS)["id"].tolist()

    def filter(self):
        return self._negative()["id"].tolist()

    def several(self):
        return self._map(self._negative(), "recommendation", self._FILMS)["id"].tolist()

    def aggregation(self):
        scored = self._map(self.films, "score", self._FILMS)
        scores = scored.assign(score=scored["answer"].astype(float))
        return scores.groupby("title")["score"].mean().to_dict()

    def retrieval(self):
        return self._map(self.questions, "answer")["id"].tolist()

    def _negative(self):
        text = self.texts["preface"] + self._CLAIM
        return self.films.sem_filter(self._FILMS + text)


class Daft:
    """Daft has a system message, and messages made of fields."""

    package = "daft"

    def __init__(self, films, questions, texts):
        import daft

        self.films, self.questions = daft.from_pydict(films), daft.from_pydict(questions)
        self.texts = texts

    def use(self, url):
        from daft.ai.openai.provider import OpenAIProvider

        self.provider = OpenAIProvider(name="server", base_url=f"{url}/v1", api_key="none")

    def _ask(self, name, fields, answer=""):
        from daft import col
        from daft.functions import format, prompt

        lines = "\n".join(f"{field}: {{}}" for field in fields)
        return prompt(
            format(lines, *map(col, fields)),
            system_message=(self.texts[name] + answer).replace("{", "").replace("}", ""),
            provider=self.provider,
            model=MODEL,
            use_chat_completions=True,
            temperature=0,
            max_tokens=MAX_TOKENS[name],
        )

    def _ask_film(self, name, answer=""):
        return self._ask(name, ("link", "review", "title", "info"), answer)

    def projection(self):
        return self._ids(self.films.with_column("answer", self._ask_film("recommendation")))

    def filter(self):
        return self._ids(self._negative())

    def several(self):
        return self._ids(self._negative().with_column("answer", self._ask_film("recommendation")))

    def aggregation(self):
        from daft import DataType, col

        score = self._ask_film("score", " Answer with an integer.").cast(DataType.float64())
        means = self.films.with_column("score", score).groupby("title").agg(col("score").mean())
        found = means.to_pydict()
        return dict(zip(found["title"], found["score"], strict=True))

    def retrieval(self):
        asked = self._ask("answer", ("question", "passages"))
        return self._ids(self.questions.with_column("answer", asked))

    def _negative(self):
        sentiment = self._ask_film("sentiment", " Answer with one of: POSITIVE, NEGATIVE.")
        return self.films.where(sentiment == "NEGATIVE")

    @staticmethod
    def _ids(table):
        return table.to_pydict()["id"]


def main():
    given = json.load(sys.stdin)
    system = {"lotus": Lotus, "daft": Daft}[given["system"]]
    rival = system(given["films"], given["questions"], given["texts"])
    results = {}
    for query, url in given["urls"].items():
        rival.use(url)
        results[query] = getattr(rival, query)()
    print(json.dumps({"version": version(system.package), "results": results}))


if __name__ == "__main__":
    main()

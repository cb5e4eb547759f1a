# SPDX-License-Identifier: Apache-2.0
"""The five kinds of queries of Liu et al., 2024, on reviews of films and on retrieved passages."""

from dataclasses import dataclass

from vllm_relay.tables.outputs import Output
from vllm_relay.tables.question import Question

REVIEWER = (
    "You are a data analyst who reads reviews of films. Each record has a link to the film, its "
    "title, a description and one review. Answer from the record alone and do not add anything. "
)


@dataclass(frozen=True)
class Call:
    """A call of llm()."""

    text: str
    fields: tuple[str, ...]
    choices: tuple[str, ...] = ()
    returns: str = "text"
    max_tokens: int = 16
    reorder: tuple[str, ...] = ()

    @property
    def sql(self) -> str:
        fields = "{" + ", ".join(self.fields) + "}"
        parts = [repr(self.text), fields, f"max_tokens := {self.max_tokens}"]
        if self.choices:
            parts.append(f"choices := {list(self.choices)}")
        if self.returns != "text":
            parts.append(f"return := '{self.returns}'")
        if self.reorder:
            parts.append(f"reorder := {list(self.reorder)}")
        return f"llm({', '.join(parts)})"

    @property
    def question(self) -> Question:
        output = Output.of(self.returns, self.choices or None)
        return Question(self.text, self.fields, output, self.max_tokens, set_fields=self.reorder)


@dataclass(frozen=True)
class TableQuery:
    """
    Attributes:
        name: of its kind.
        sql: with llm().
        naive: calls that would be made for every row of films without pushdown and deduplication.
    """

    name: str
    sql: str
    naive: tuple[Call, ...] = ()


_REVIEW_FIELDS = ("link", "review", "title", "info")
SENTIMENT = Call(
    REVIEWER + "Is the sentiment of the {review} positive or negative?",
    _REVIEW_FIELDS,
    ("POSITIVE", "NEGATIVE"),
)
RECOMMENDATION = Call(
    REVIEWER + "Recommend other films to whoever wrote the {review}, in a few words.",
    _REVIEW_FIELDS,
)
SCORE = Call(
    REVIEWER + "Rate the sentiment of the {review} from 1 to 5.",
    _REVIEW_FIELDS,
    returns="int",
    max_tokens=4,
)
FOR_CHILDREN = Call(
    REVIEWER + "Is the film of the {title} and {info} for children?",
    ("title", "info"),
    ("Yes", "No"),
)
ANSWER = Call(
    "Answer the {question} with words of the {passages}, as briefly as possible.",
    ("question", "passages"),
    reorder=("passages",),
)

QUERIES = (
    TableQuery("Q1 projection", f"SELECT id, {RECOMMENDATION.sql} AS answer FROM films"),
    TableQuery("Q2 filter", f"SELECT id FROM films WHERE {SENTIMENT.sql} = 'NEGATIVE'"),
    # with random weights an answer says nothing: all rows go on to the second call
    TableQuery(
        "Q3 several calls",
        f"SELECT id, {RECOMMENDATION.sql} AS answer FROM films "
        f"WHERE {SENTIMENT.sql} IN ('POSITIVE', 'NEGATIVE')",
    ),
    TableQuery("Q4 aggregation", f"SELECT title, avg({SCORE.sql}) FROM films GROUP BY title"),
    TableQuery("Q5 retrieval", f"SELECT id, {ANSWER.sql} AS answer FROM questions"),
)

PUSHED_DOWN = (
    TableQuery(
        "a predicate before the filter",
        f"SELECT id FROM films WHERE {SENTIMENT.sql} = 'NEGATIVE' AND id % 7 = 0",
        (SENTIMENT,),
    ),
    TableQuery(
        "a projection of equal rows",
        f"SELECT id, {FOR_CHILDREN.sql} AS answer FROM films",
        (FOR_CHILDREN,),
    ),
    TableQuery(
        "an aggregation of some groups",
        f"SELECT * FROM (SELECT title, avg({SCORE.sql}) AS score FROM films GROUP BY title) "
        f"WHERE title IN (SELECT title FROM chosen)",
        (SCORE,),
    ),
)

# SPDX-License-Identifier: Apache-2.0
"""Ask questions of every row of a pandas table of films.

python examples/tables_movies.py MODEL      a model's folder or hub id, or a server: http://...
"""

import argparse

import pandas as pd
from pydantic import BaseModel

from vllm_relay.tables import llm_map, open_engine

STUDIOS = {
    "Lantern": "Lantern makes quiet dramas about people who live by the sea.",
    "Pocket": "Pocket makes bright cartoons with songs, most of them about animals.",
}
FILMS = pd.DataFrame(
    [
        ("The Salt Road", "Lantern", "A keeper of a lighthouse writes letters to nobody."),
        ("The Salt Road", "Lantern", "A keeper of a lighthouse writes letters to nobody."),
        ("Otter Opera", "Pocket", "Three otters save a theatre that nobody visits any more."),
        ("Low Water", "Lantern", "Two brothers sell their father's boat and regret it."),
        ("The Loud Hedgehog", "Pocket", "A hedgehog who cannot whisper guards a library."),
        ("Winter Ferry", "Lantern", "A ferry stays in the harbour, and so do its passengers."),
        ("A Goose Abroad", "Pocket", "A goose takes the train because it fears heights."),
        ("Otter Opera", "Pocket", "Three otters save a theatre that nobody visits any more."),
    ],
    columns=["title", "studio", "plot"],
)


class Review(BaseModel):
    headline: str
    stars: int


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a model's folder or hub id, or a server: http://...")
    options = parser.parse_args()

    films = FILMS.assign(about_the_studio=FILMS["studio"].map(STUDIOS))
    engine = open_engine(options.model)
    try:
        suitable = llm_map(
            films,
            "Is {title} suitable for children, going by {plot} and {about_the_studio}?",
            engine=engine,
            choices=["yes", "no"],
        )
        reviews = llm_map(
            films, "Write a short review of the film.", engine=engine, output=Review, max_tokens=80
        )
    finally:
        engine.close()
    films["suitable"] = suitable.values
    films["stars"] = [None if review is None else review.stars for review in reviews.objects]
    print(films[["title", "suitable", "stars"]])
    for place, error in reviews.errors.items():
        print(f"row {place} has no review: {error}")
    report = suitable.report
    print(f"Look at: {report.num_rows} rows, {report.num_prompts} prompts of "
          f"{report.prompt_tokens} tokens, {report.cached_tokens} of them cached")  # fmt: skip


if __name__ == "__main__":
    main()

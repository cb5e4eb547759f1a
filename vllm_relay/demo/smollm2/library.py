# SPDX-License-Identifier: Apache-2.0
"""Chats in plain English: what visitors ask the branches of a city library, whose staff answers by
a handbook. Library, handbook and questions are made up for this demo."""

from __future__ import annotations

import numpy as np

from vllm_relay.demo.workload import Conversations, Question, check_at_least

_BRANCHES = """
    Harbour Street, Mill Lane, Station Road, Old Market, Castle Hill, Riverside, Orchard Park,
    North Gate, Weavers Yard, Lighthouse Point, Chapel Green, Canal Bridge
"""

HANDBOOK = """
You work at the information desk and answer visitors who write to us. Be friendly, be brief and
answer in one to three sentences. Use this handbook. If it does not say what a visitor wants to
know, say so and offer to ask a librarian; never invent a rule, a price or a date. Never ask for a
password, and never tell one visitor what another one has borrowed.

Opening hours. The reading rooms are open from nine in the morning until eight in the evening on
working days, and from ten until four on Saturdays. On Sundays only the study hall is open, from
noon until six, and there is no staff at the desks. We are closed on public holidays and in the
last week of December. The return box beside the main door takes books at any hour.

Library cards. A card is free for everybody who lives, works or studies in the city. Bring a
document with your photograph and something that shows your address, such as a bill or a letter
from your school. Children under fourteen need the signature of a parent. A card is valid for two
years and can be renewed at any desk or on our website. A lost card should be reported at once, so
that nobody else can use it; a new one costs three euros.

Borrowing. You can have up to twenty items at a time. Books stay with you for four weeks, films and
music for two weeks, and board games for ten days. Newspapers, atlases and everything with a red
label on its back can only be read here. You can renew a loan twice, unless somebody else has asked
for the item. Renew on the website, by telephone, or at the machines in the entrance hall.

Late returns. We send a reminder two days before an item is due. After that a day costs twenty
cents for each item, and never more than five euros in all. Children pay nothing. Whoever owes more
than ten euros cannot borrow until it is paid, at the desk or by card at the machines. If you were
ill, tell us: a librarian may forgive the fee.

Damaged and lost items. Accidents happen, and nobody is punished for telling us. Do not repair a
torn page with household tape, because its glue harms the paper; bring the book as it is and our
binder will mend it. For an item that is lost or cannot be mended you pay what a new copy costs, or
you bring the same edition yourself.

Reservations. If a book is out, or at another branch, reserve it on the website or at the desk. It
costs nothing. We write to you when it is ready, and keep it on the shelf behind the desk for seven
days. Vans carry books between the branches on Mondays, Wednesdays and Fridays, so that a book from
another branch takes three days at most.

Computers and printing. There are computers on the first floor, for an hour at a time, and for
longer if nobody waits. Log in with the number of your card. Guests get a paper ticket at the desk.
The wireless network is called Open Shelf and needs no password. A printed page costs ten cents in
black and thirty cents in colour; scanning to your own memory stick is free. Files that you leave
on a computer are deleted every night.

Rooms. Four quiet rooms for two people each, and one room for twelve, can be booked up to two weeks
ahead, for three hours a day. They cost nothing for groups that learn, read or play; companies pay
fifteen euros an hour. Please leave the furniture as you found it, and take your cups with you. If
nobody comes within a quarter of an hour, the room is given to others.

Children. Stories are read aloud on Tuesdays and Thursdays at four in the afternoon, for children
from three to seven; a place need not be booked. On the first Saturday of each month there is a
workshop for children from eight on: they build paper bridges, solder small lamps, or print with
potatoes. Parents of children under six stay in the house. Prams can be left under the stairs.

Homework help. Volunteers help pupils with mathematics, languages and science on working days from
three to six. Come without an appointment and bring what you have tried already. They explain, but
they do not write the homework for you.

Languages. Books in thirty languages stand on the second floor. On Friday evenings people who learn
the language of the city meet there for conversation, with tea, guided by a teacher; beginners are
welcome. A small collection of dictionaries can be borrowed over a weekend.

Food and drink. Water in closed bottles is allowed everywhere. Coffee, sandwiches and warm soup are
sold in the courtyard, and may be eaten there and in the entrance hall, but not between the shelves
and not at the computers.

Visitors who need assistance. There is a lift to every floor, and its door is wide enough for any
wheelchair. Guide dogs are welcome. Large print and spoken books stand on the ground floor, to the
left of the desk, and a reading machine enlarges any page. Whoever cannot leave home may have books
brought by a volunteer: call us, and we arrange a day.

Gifts. We gladly take books that are clean, complete and not older than ten years, on Wednesday
mornings. We cannot take magazines, old encyclopedias or video tapes. What we cannot use is sold in
the courtyard in May, and the money buys new picture books.

Lost property. Umbrellas, gloves and bags are kept at the desk for a month. Wallets, keys and
telephones go to the lost property office of the city on the next working day. Ask at the desk and
describe what you are missing before it is shown to you.

Complaints and wishes. Write to us if something went wrong; a librarian answers within three
working days. Suggest a book on the website: of five that are suggested we buy about three, and the
first reader is the one who asked for it.
"""

_OPENINGS = """
Hello!
Good morning.
Good evening, and thank you for your help.
Hi, I am new in the city.
Dear library,
I visited you last week with my daughter.
Excuse me, one short question.
My neighbour told me to write to you.
I am a student and in a bit of a hurry.
I have been coming to you for years.
"""

_QUESTIONS = """
When are you open on Saturdays?
Can I return a book in the middle of the night?
What do I need to bring to get a card?
I have lost my card. What should I do now?
How many books can I take home at once?
For how long can I keep a film?
May I borrow one of your atlases?
How do I renew a loan when I am away from home?
My book is five days late. What will it cost?
Do children pay when they return something late?
I was in hospital and could not return my books. Must I pay the fee?
I tore a page by accident. Should I tape it?
I cannot find a book that I borrowed from you. What happens now?
The novel that I want is at another branch. How do I get it?
How long do you keep a book that I have reserved?
Is there a computer that I could use without a card?
What is the name of your wireless network?
How much is it to print six pages in colour?
Can I scan an old letter at your place?
I saved a file on your computer yesterday. Is it still there?
Our reading club has ten members. Is there a room for us?
What does a room cost for my company?
We are late for the room that we booked. Will it be kept for us?
When are stories read aloud, and for which age?
What can my son of nine do with you on a Saturday?
Where can I leave the pram?
Would somebody help my daughter with her mathematics?
Could you write my essay about volcanoes for me?
I would like to practise the language. Is there a group for beginners?
May I drink coffee while I use a computer?
Can I get to the second floor with a wheelchair?
My father does not see well any more. What do you have for him?
My grandmother cannot leave her home. Can she still read your books?
Do you take old magazines as a gift?
I left my umbrella with you on Monday. Where is it?
Did you find a bunch of keys yesterday?
You do not have a book that I would love to read. Could you buy it?
I was treated rudely. Whom can I tell?
Which books has my husband borrowed?
What is the best way to learn to enjoy poetry?
"""


def library_workload(
    *,
    num_system_prompts: int,
    system_prompt_words: int,
    questions_per_prompt: int,
    seed: int = 0,
) -> list[Conversations]:
    """The handbook for one branch after the other, and questions of visitors, without answers.

    Args:
        system_prompt_words: the handbook ends there; it has about 1,050 words.
        questions_per_prompt: all different, in random order.

    Raises:
        ValueError: a count is out of its range.
    """
    check_at_least(
        1, num_system_prompts=num_system_prompts, questions_per_prompt=questions_per_prompt
    )
    branches = [" ".join(name.split()) for name in _BRANCHES.split(",")]
    questions = [
        f"{opening} {question}"
        for opening in _OPENINGS.strip().splitlines()
        for question in _QUESTIONS.strip().splitlines()
    ]
    for what, count, most in [
        ("num_system_prompts", num_system_prompts, len(branches)),
        ("questions_per_prompt", questions_per_prompt, len(questions)),
    ]:
        if count > most:
            raise ValueError(f"{what} is {count}, expected at most {most}: there are no more")
    rng = np.random.default_rng(seed)
    workload = []
    for branch in branches[:num_system_prompts]:
        text = f"You are the assistant of the {branch} branch of our city library.\n{HANDBOOK}"
        lines = _first_words(text, system_prompt_words)
        chosen = rng.choice(len(questions), questions_per_prompt, replace=False)
        workload.append(Conversations(lines, [Question(questions[i]) for i in chosen]))
    return workload


def _first_words(text: str, num_words: int) -> str:
    """Paragraphs, each in one line, until there are so many words."""
    paragraphs = []
    for paragraph in text.strip().split("\n\n"):
        words = paragraph.split()[:num_words]
        num_words -= len(words)
        if words:
            paragraphs.append(" ".join(words))
    return "\n\n".join(paragraphs)

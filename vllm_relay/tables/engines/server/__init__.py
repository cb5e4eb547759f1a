# SPDX-License-Identifier: Apache-2.0
"""A server with OpenAI's API answers prompts over HTTP.

engine.py            the engine: asks a server what it is, then takes prompts and gives completions
client.py            a prompt answered, whatever happens on the way
admission.py, retries.py   how many prompts the server has, when one is sent again
messages.py, dialect.py    requests and replies, as far as servers differ in them
http.py, keys.py     the requests themselves, and who gets which key
models.py, tokenizer.py    what the server says of its model
loop_thread.py       an event loop for callers that have none
"""

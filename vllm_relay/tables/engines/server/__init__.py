# SPDX-License-Identifier: Apache-2.0
"""A server with OpenAI's API answers prompts over HTTP.

engine.py            the engine: asks a server what it is, then takes prompts and gives completions
client.py            a prompt answered, whatever happens on the way
admission.py         how many prompts the server has
messages.py, dialect.py    requests and replies, as far as servers differ in them
http.py              the requests themselves, and when one is sent again
models.py            what the server says of its model
"""

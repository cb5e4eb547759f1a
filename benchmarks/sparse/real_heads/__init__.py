# SPDX-License-Identifier: Apache-2.0
"""A real model that attends by a selection of keys, beside itself with all of them.

texts.py         passages of English and of code, those for choosing apart from those for reporting
aids.py          what selections read to choose: codes, bounds, means, representatives, clusters
selections.py    ways to choose which keys are read, each with the bytes that it reads
page_bounds.py   how many pages of keys bounds rule out
model.py         SmolLM2-135M-Instruct in Hugging Face transformers with a selection
errors.py        how far log-probabilities are from those of dense attention
ruler.py         tasks after RULER, made offline
"""

# SPDX-License-Identifier: Apache-2.0
"""Tables that others hold and spread over machines: each brings rows together that begin alike, and
its workers ask about a batch at a time.

batches.py    the question of a batch, in whatever process it comes to
ray_data.py   datasets of Ray Data
spark.py      data frames of Spark
daft.py       data frames of Daft
"""

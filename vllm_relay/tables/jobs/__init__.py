# SPDX-License-Identifier: Apache-2.0
"""A question asked of every distinct row of a table, to its end whatever happens on the way."""

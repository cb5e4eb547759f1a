# SPDX-License-Identifier: Apache-2.0
"""One long document: relay against relay_sparse."""

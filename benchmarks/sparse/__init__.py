# SPDX-License-Identifier: Apache-2.0
"""Key indexes and sparse attention, measured on heads that models have or could have."""

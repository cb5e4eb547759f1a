# SPDX-License-Identifier: Apache-2.0
"""What a job took (`Estimate`), and what one is expected to take (`estimating`)."""

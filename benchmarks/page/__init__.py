# SPDX-License-Identifier: Apache-2.0
"""The live page.

bench_page.py     frames a second in a browser
bench_feed.py     what an engine spends on it
"""

# SPDX-License-Identifier: Apache-2.0
"""As `vllm`, on CPUs with requests of adapters beside requests without: see the function used."""

from __future__ import annotations

from vllm.entrypoints.cli.main import main

from tests.integration.features_main import no_adapter_for_requests_without

if __name__ == "__main__":
    with no_adapter_for_requests_without():
        main()

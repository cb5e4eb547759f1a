# SPDX-License-Identifier: Apache-2.0
"""A model by what its files hold, so that another machine knows it as the same."""

from __future__ import annotations

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_PIECE_BYTES = 1 << 22
_MAX_THREADS = 8
_SHA256 = re.compile(r"[0-9a-f]{64}")
# no model reads them
_IGNORED_FILES = re.compile(r"\..*|(README|LICENSE|NOTICE).*|.*\.md", re.IGNORECASE)
# of the machine and the programs, not of the model
_IGNORED_SETTINGS = ("_name_or_path", "_commit_hash", "transformers_version")


def model_identity(config: Any) -> str:
    """The model of vLLM's configuration by its settings and the content of its files; of a model
    whose files are not found, by its name and revision. Reads every file that is not known by its
    digest already, as in the cache of the Hugging Face hub.
    """
    model = config.model_config
    settings = json.loads(model.hf_config.to_json_string(use_diff=False))
    commit = getattr(model.hf_config, "_commit_hash", None)
    parts: dict[str, Any] = {
        "model": _content(model.model, model.revision, commit),
        "dtype": str(model.dtype),
        "quantization": model.quantization,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "config": {name: settings[name] for name in settings if name not in _IGNORED_SETTINGS},
        "seed": model.seed if config.load_config.load_format == "dummy" else None,
    }
    if model.tokenizer != model.model:
        parts["tokenizer"] = _content(model.tokenizer, model.tokenizer_revision, commit)
    text = json.dumps(parts, default=str, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _content(name: str, revision: str | None, commit: str | None) -> Any:
    path = _place(name, revision)
    if path is None:
        return [name, revision, commit]
    files = [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]
    files = sorted(each for each in files if not _IGNORED_FILES.fullmatch(each.name))
    with ThreadPoolExecutor(_MAX_THREADS) as threads:
        digests = list(threads.map(file_digest, files))
    # a file that is the whole model may have any name
    return digests if path.is_file() else {each.name: digest for each, digest in
                                           zip(files, digests, strict=True)}  # fmt: skip


def _place(name: str, revision: str | None) -> Path | None:
    """The folder or file of a model that is on this machine."""
    if Path(name).exists():
        return Path(name)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def file_digest(path: Path) -> str:
    """SHA-256, which is the name of large files in the cache of the Hugging Face hub."""
    target = path.resolve()
    if path.is_symlink() and target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
        return target.name
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()

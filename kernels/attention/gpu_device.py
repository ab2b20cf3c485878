"""Which GPUs the kernels are for, by the name that jax gives a device."""

KINDS = ("H100", "H200", "GH200", "H800", "H20")  # sm90; no other architecture has wgmma


def fits(kind: str) -> bool:
    """Whether a device kind, as 'NVIDIA H100 80GB HBM3', is one of KINDS."""
    return bool(set(kind.split()) & set(KINDS))


def check(kind: str) -> None:
    """Refuses every other device: an older one lacks wgmma, and so do the newer ones.

    Raises: ValueError.
    """
    if not fits(kind):
        raise ValueError(
            f"attention implementation 'mosaic_gpu' is for {', '.join(KINDS)} (sm90: it multiplies by wgmma), not for "
            f"{kind!r}: set compute.attention=chunked"
        )

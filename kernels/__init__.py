"""One package per op, imported as `rsi_jax.kernels`: a reference beside its kernels, chosen by `implementation=`."""

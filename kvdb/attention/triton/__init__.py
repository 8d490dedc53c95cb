"""The kernels of the GPU, one file each behind a plain function. They take torch tensors of one device, and run on the CPU under
Triton's interpreter. Nothing of kvdb imports them before a device is opened.

All kernels share one vocabulary of constants. KV_HEADS, HEAD_DIM, BLOCK_SIZE: the shape of a block. GROUP: query heads of each
KV head. ROWS, TOKENS, DIMS: the size of a tile; DIMS is HEAD_DIM rounded up to a power of two. STRIDE: elements of a slot;
SCALES_STRIDE: its floats; BYTES: its bytes. VALUES_AT, SCALES_AT, BOUNDS_AT, CODES_AT, FACTORS_AT, CENTRES_AT: where in a slot
these begin. FLOAT8, QUANTISED: the format of keys and values. MATH: the dtype that tensor cores multiply.
"""

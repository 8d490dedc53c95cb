"""The kernels of the GPU, one file each behind a plain function. They take torch tensors of one device, and run on the CPU under
Triton's interpreter. Nothing of kvdb imports them before a device is opened."""

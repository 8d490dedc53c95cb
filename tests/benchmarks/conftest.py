"""The benchmarks of the GPU run here under Triton's interpreter."""

from tests.kvdb.attention.triton.interpreter import speed_up

speed_up()
